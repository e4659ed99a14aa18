"""How much of this machine other programs take while something is measured. Next: ``emulation.py``."""

from __future__ import annotations

import os
import time

import psutil

NOTABLE = 0.1
"""Share of the processors from which on other work spoils a measurement of time."""


class OtherWork:
    """Counts the processor time that other programs take from its creation on.

    Children count as this program's once they have ended and been waited for.
    """

    def __init__(self) -> None:
        self._start_s, self._before_s = time.monotonic(), _others_s()

    def share(self) -> float:
        """The share of all processors that other programs took: 0 to 1."""
        there_s = (time.monotonic() - self._start_s) * (os.cpu_count() or 1)
        return min(max((_others_s() - self._before_s) / there_s, 0.0), 1.0)


def _others_s() -> float:
    """Processor seconds since the machine started, without those of this process and its children."""
    machine = psutil.cpu_times()
    # user has guest in it, and nice guest_nice.
    busy_s = sum(
        getattr(machine, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal")
    )
    return busy_s - sum(os.times()[:4])


def warning(share: float) -> str:
    """One sentence for a share that is worth it, else an empty text."""
    if share < NOTABLE:
        return ""
    return (
        f"Other programs took {100 * share:.0f} % of this machine's processors meanwhile: times and idle "
        "shares are too long, and ratios may be wrong; run it again on a machine with nothing else to do."
    )
