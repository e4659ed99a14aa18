"""A forward-backward function and the watchers of its training iterations.

Before each training iteration every watcher says whether it wants the iteration's measured timeline, and
afterwards it gets it. All ranks ask the same watchers in the same order, so these may communicate.

Next: ``measured_plan.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from megatron_vocabpar.pipeline.forward_backward import ForwardBackward
from megatron_vocabpar.runtime.timeline import Span, Timeline


class Watcher(Protocol):
    """Looks at training iterations; ``wants`` must return the same on all ranks."""

    def wants(self, m: int) -> bool:
        """Called before an iteration of ``m`` microbatches: whether to measure it."""

    def saw(self, spans: list[Span]) -> None:
        """Called after a measured iteration."""


class Watched:
    """``run``, whose training iterations ``watchers`` look at, in this order.

    Args:
        run: the forward-backward function.
        timeline: the timeline that ``run`` was made with.
    """

    def __init__(self, run: ForwardBackward, timeline: Timeline, watchers: Sequence[Watcher]) -> None:
        self.run = run
        self._timeline = timeline
        self._watchers = watchers

    def __call__(self, **arguments: Any) -> list[Any]:
        """One iteration; the arguments are megatron-core's."""
        if arguments.get("forward_only"):
            return self.run(**arguments)
        wanting = [watcher for watcher in self._watchers if watcher.wants(arguments["num_microbatches"])]
        if wanting:
            self._timeline.start()
        reported = self.run(**arguments)
        spans = self._timeline.stop() if wanting else []
        for watcher in wanting:
            watcher.saw(spans)
        return reported
