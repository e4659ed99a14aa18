"""Times of contenders that take turns, round by round: the machine's drift cancels in their ratios."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

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


class Apart(NamedTuple):
    """Milliseconds of one call, of the host that issues it and of the device that carries it out."""

    host_ms: float
    device_ms: float


_FIRST_SLEEP_MS = 20.0


def host_and_device(
    contenders: Mapping[str, Contender], rounds: int, device: torch.device, calls: int
) -> dict[str, Apart]:
    """Medians over the rounds of what the host and a GPU take for a call, each without the other.

    The device sleeps while the host issues all ``calls`` of a measurement, so the host never waits for it.
    When it wakes up everything is issued, so it never waits for the host: events before and after the calls
    tell its time.
    """
    cycles_per_ms = _cycles_per_ms(device)
    sleep_ms = dict.fromkeys(contenders, _FIRST_SLEEP_MS)
    found: dict[str, list[Apart]] = {name: [] for name in contenders}
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for r in range(-2, rounds):
        for name, run in contenders.items():
            torch.cuda.synchronize(device)
            torch.cuda._sleep(int(cycles_per_ms * sleep_ms[name]))
            first.record()
            start = time.perf_counter()
            for call in range(calls):
                run((r + call) % ROTATED)
            host_ms = 1e3 * (time.perf_counter() - start)
            last.record()
            last.synchronize()
            sleep_ms[name] = 2 * host_ms  # of the next round
            if r >= 0:
                found[name].append(Apart(host_ms / calls, first.elapsed_time(last) / calls))
    return {
        name: Apart(*map(statistics.median, zip(*measured, strict=True))) for name, measured in found.items()
    }


def _cycles_per_ms(device: torch.device) -> float:
    """Cycles of a device's sleeping kernel in a millisecond."""
    cycles, first, last = 10**7, *(torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(cycles)  # the first launch of a kernel loads it
    first.record()
    torch.cuda._sleep(cycles)
    last.record()
    torch.cuda.synchronize(device)
    return cycles / max(first.elapsed_time(last), 0.1)


def ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Median over the rounds of one contender's time over another's."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))
