"""Times of contenders that take turns, round by round: the machine's drift cancels in their ratios."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

ROTATED = 3
"""Inputs that contenders rotate over."""

Contender = Callable[[int], object]
"""Called with which of the rotated inputs to use."""


def now_ms(device: torch.device) -> float:
    """Time after everything issued so far: the clock's on a GPU, this thread's processor time on the CPU."""
    if device.type == "cpu":
        return time.thread_time() * 1e3
    torch.cuda.synchronize(device)
    return time.perf_counter() * 1e3


def time_rounds(
    contenders: Mapping[str, Contender], rounds: int, device: torch.device, calls: int = 1
) -> dict[str, list[float]]:
    """Milliseconds a call of every contender in every round, after two rounds of warm-up.

    Args:
        calls: calls in one measurement, for work that is too short to be timed alone.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for r in range(-2, rounds):
        for name, run in contenders.items():
            start = now_ms(device)
            for call in range(calls):
                run((r + call) % ROTATED)
            elapsed = now_ms(device) - start
            if r >= 0:
                times[name].append(elapsed / calls)
    return times


def ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Median over the rounds of one contender's time over another's."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))
