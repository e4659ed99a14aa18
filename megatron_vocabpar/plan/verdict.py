"""Whether our schedules are faster than Megatron's own, or whether that is undecided.

What collectives take from layers has two readings (``price.py``), and a gain that is smaller than the
planner's own error says nothing. So ours or Megatron's is *decided* where both readings agree and both gains
are larger than the error. For example, 1.05 and 1.04 times as fast is decided, with an error of 0.024; 1.05
and 1.01 is not, nor are 1.03 and 0.97.

Next: ``advice.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_vocabpar.plan.choice import Choice
from megatron_vocabpar.plan.price import gain_error


@dataclass(frozen=True)
class Verdict:
    """How many times as fast our best is as Megatron's best, by the first and by the last reading."""

    gains: tuple[float, float]

    @property
    def reason(self) -> str:
        """Why nothing is decided; empty if it is."""
        if min(self.gains) < 1.0 < max(self.gains):
            return "the two readings of what collectives take from layers disagree"
        if min(abs(gain - 1.0) for gain in self.gains) < gain_error():
            return f"the planner's own error is {100 * gain_error():.1f} %"
        return ""

    def __str__(self) -> str:
        waiting, transfers = (f"{gain:.2f}" for gain in self.gains)
        words = (
            f"ours is {waiting} times as fast as Megatron's best if collectives hold multiprocessors while "
            f"they wait, {transfers} if only transfers count"
        )
        return f"Undecided: {words}; {self.reason}" if self.reason else f"By both readings {words}"


def verdict(choices: Sequence[Choice]) -> Verdict | None:
    """The verdict on choices that fit; None unless there are ours and Megatron's."""
    ours = [choice for choice in choices if not choice.stock]
    stock = [choice for choice in choices if choice.stock]
    if not ours or not stock:
        return None
    first = min(choice.iteration_ms for choice in stock) / min(choice.iteration_ms for choice in ours)
    return Verdict(
        (first, min(choice.other_ms for choice in stock) / min(choice.other_ms for choice in ours))
    )
