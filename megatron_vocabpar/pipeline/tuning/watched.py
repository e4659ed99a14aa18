"""A forward-backward function and those who look at its iterations, one after another.

Before each training iteration every watcher is asked whether it wants a measured timeline of it, and gets it
afterwards. All ranks ask the same watchers in the same order, so they may communicate in both.

Next: ``measured_plan.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from megatron_vocabpar.pipeline.forward_backward import ForwardBackward
from megatron_vocabpar.runtime.profile import Span, Timeline


class Watcher(Protocol):
    """Looks at training iterations; ``wants`` must answer the same on all ranks."""

    def wants(self, m: int) -> bool:
        """Before an iteration of ``m`` microbatches: whether it is to be measured."""

    def saw(self, spans: list[Span]) -> None:
        """After one that was wanted."""


class Watched:
    """``run``, with its training iterations shown to ``watchers``.

    Args:
        run: the forward-backward function.
        timeline: the one that it was made with.
        watchers: asked in this order.
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
