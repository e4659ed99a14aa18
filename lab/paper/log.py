"""Reads times, losses and peaks of memory from Megatron-LM's training log."""

from __future__ import annotations

import re
from dataclasses import dataclass

_ITERATION = re.compile(
    r" iteration +(?P<number>\d+)/ *\d+ \|.*? elapsed time per iteration \(ms\): (?P<ms>[\d.]+) \|"
    r"(?:.*? lm loss: (?P<loss>[-+.\dEe]+) \|)?"
)
_MEMORY = re.compile(
    r"\[Rank (?P<rank>\d+)\] \(after \d+ iterations\) memory \(MB\) \|.*?"
    r" max allocated: (?P<allocated>[\d.]+) \|.*? max reserved: (?P<reserved>[\d.]+)"
)
_OUT_OF_MEMORY = re.compile(r"OutOfMemoryError|CUDA out of memory|CUBLAS_STATUS_ALLOC_FAILED")


@dataclass(frozen=True)
class Log:
    """The numbers in one training's log; memory is the largest peak that each global rank reported."""

    iteration_ms: tuple[float, ...]  # in order
    losses: tuple[float, ...]  # of the iterations that report one
    allocated_mib: dict[int, float]
    reserved_mib: dict[int, float]
    out_of_memory: bool


def read_log(text: str) -> Log:
    """Read the log of one training; fields that the log lacks are empty."""
    iterations = {int(line["number"]): line for line in _ITERATION.finditer(text)}
    ordered = [iterations[number] for number in sorted(iterations)]
    allocated: dict[int, float] = {}
    reserved: dict[int, float] = {}
    for line in _MEMORY.finditer(text):
        rank = int(line["rank"])
        allocated[rank] = max(allocated.get(rank, 0.0), float(line["allocated"]))
        reserved[rank] = max(reserved.get(rank, 0.0), float(line["reserved"]))
    return Log(
        iteration_ms=tuple(float(line["ms"]) for line in ordered),
        losses=tuple(float(line["loss"]) for line in ordered if line["loss"]),
        allocated_mib=allocated,
        reserved_mib=reserved,
        out_of_memory=_OUT_OF_MEMORY.search(text) is not None,
    )
