"""What products lose to a kernel that waits beside them, as NCCL's do for ranks that are not there yet."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial

import torch

from lab.gpu.record import Measurement
from megatron_vocabpar.layers.kernels.dispatch import why_not_triton
from megatron_vocabpar.runtime.streams import clock, multiprocessors, side_stream

BLOCKS = (1, 2, 4, 8, 16)
_MOST_READS = 1 << 24  # some seconds: a kernel that is never released ends by itself
_ROUNDS = 9

PRODUCTS = {
    "F, n 2048, H 5120": (2048, 5120, 15360, 20),
    "S, n 2048, H 3072, p 8": (2048, 3072, 16384, 20),
    "S, n 2048, H 5120, p 32": (2048, 5120, 4096, 60),
    "8192 cubed": (8192, 8192, 8192, 4),
}
"""By name [i, j] x [j, k], and how many of them one measurement runs."""


def measurements(device: torch.device, tiny: bool) -> Iterator[Measurement]:
    """Each product beside each number of blocks of 512 threads, which fill a multiprocessor each."""
    why = why_not_triton(device, torch.float32)
    for name, sizes in PRODUCTS.items():
        run = _products(device, *((64, 64, 64, 2) if tiny else sizes))
        for blocks in BLOCKS:
            measure = partial(_not_run, why) if why else partial(_beside, device, run, blocks)
            yield f"{name} beside {blocks} blocks", measure


def _not_run(why: str) -> list[dict[str, object]]:
    return [{"not_run": why}]


def _products(device: torch.device, i: int, j: int, k: int, count: int) -> Callable[[], None]:
    a, b = (torch.randn(rows, columns, device=device).bfloat16() for rows, columns in ((i, j), (j, k)))
    out = torch.empty(i, k, dtype=torch.bfloat16, device=device)

    def run() -> None:
        for _ in range(count):
            torch.mm(a, b, out=out)

    return run


def _beside(device: torch.device, run: Callable[[], None], blocks: int) -> list[dict[str, object]]:
    """How much longer the products take, and how many multiprocessors they lose by that."""
    from lab.gpu.triton_spin import spin

    stream, mark, of_all = side_stream(device, "lab"), clock(device), multiprocessors(device)
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    seen = torch.zeros(blocks, dtype=torch.int32, device=device)

    def turn_s(waits: bool) -> float:
        flag.zero_()
        waiting = stream.submit(lambda: spin(flag, seen, _MOST_READS)) if waits else None
        start = mark()
        run()
        end = mark()
        flag.fill_(1)  # in the main stream, behind the products
        if waiting is not None:
            waiting.wait()
        return end() - start()

    # alone and beside take turns: clocks drift by more than a block takes
    ratios = [1.0 / turn_s(False) * turn_s(True) for _ in range(2 + _ROUNDS)]
    stream.close()
    longer = statistics.median(ratios[2:])
    return [{"blocks": blocks, "ratio": longer, "multiprocessors": of_all * (1.0 - 1.0 / longer)}]
