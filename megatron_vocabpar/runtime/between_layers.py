"""Launches between the layers of a pass.

The executor hands over what the schedule has put inside a pass, by the share of the pass's layers that come
before. A hook reports that a layer has ended; what is due is launched then, on the thread that runs
the layers, and with its stream as the current one.

    executor    within(0F7, [0.25: 0C1.5, 0.5: 0RECV_F8]) ------------------- 0F7 ends: launch what is left
    layers              1        2        3        4 ...
                                 launch 0C1.5      launch 0RECV_F8

Next: ``pipeline/layer_hooks.py``, which has the hooks of F and B.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from megatron_vocabpar.schedule.words.passes import Instruction, PassType, parts_of

Launch = Callable[[], None]
_ROUNDING = 1e-6  # of shares


class BetweenLayers:
    """What is to be launched inside the pass under way.

    Attributes:
        stages: those whose layers have hooks that report their ends.
    """

    def __init__(self, stages: Iterable[int] = ()) -> None:
        self.stages = set(stages)
        self._due: deque[tuple[float, Launch]] = deque()
        self._ended: dict[PassType, float] = {}

    def has_layer_hooks(self, item: Instruction) -> bool:
        """Whether hooks report when the layers of an instruction end."""
        return all(part.stage in self.stages for part in parts_of(item))

    @contextmanager
    def within(self, item: Instruction, launches: Iterable[tuple[float, Launch]]) -> Iterator[None]:
        """The context of a pass or pair, with what is launched inside it, by rising shares."""
        self._due.extend(launches)
        self._ended = {part.type: 0.0 for part in parts_of(item) if isinstance(part.type, PassType)}
        yield
        self.reached(1.0)

    @property
    def shares(self) -> list[float]:
        """After which shares of the layers there is something to launch."""
        return [share for share, _ in self._due]

    def layer_ended(self, type_: PassType, share: float) -> None:
        """A layer has ended, with which ``share`` of the layers in F, B or W are done.

        The share of a pair is the mean of its F's and its B's. Layers of type F that end within a B are
        computed again; they do not count.
        """
        if not self._due or type_ not in self._ended:
            return
        self._ended[type_] = max(self._ended[type_], share)
        self.reached(sum(self._ended.values()) / len(self._ended))

    def reached(self, share: float) -> None:
        """Launch what is due when this share of the layers is done."""
        while self._due and self._due[0][0] <= share + _ROUNDING:
            self._due.popleft()[1]()
