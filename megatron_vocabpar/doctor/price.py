"""What layers take beside others on this machine: the numbers of ``plan/price.py``, measured.

- ``busy_gpu``: products with pauses between them, and without. The slope is how much longer they take on a
  GPU that never pauses than on one that always does.
- ``waiting_kernel``: products beside a kernel that spins on 1, 2, 4, ... multiprocessors. They lose more than
  it holds: on an H200 with 8 of 132, products [8192, 8192] take as long as on 114, and [4096, 4096] as on 88.
- ``waiting_collective``: products of rank 0 beside a collective that the others join only afterwards, at
  several numbers of channels, and at as many as NCCL chooses: what it holds, in multiprocessors.

Each writes what it has found to a folder; ``written`` puts it together for ``vocabpar plan --costs``.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_vocabpar.doctor.overlap import median_ms
from megatron_vocabpar.doctor.processes import Rank, on_processes
from megatron_vocabpar.doctor.result import Finding
from megatron_vocabpar.layers.kernels.dispatch import why_not_triton
from megatron_vocabpar.runtime.comm import all_reduce, create_groups
from megatron_vocabpar.runtime.streams import clock, default_device, multiprocessors, side_stream

BLOCKS = (1, 2, 4, 8, 16, 32)
CHANNELS = (1, 2, 4, 8, 16, 32, None)
"""Limits that are tried; None: as many as NCCL chooses."""
_PAUSED, _ROUNDS = 0.35, 9  # the busy share with pauses, as in the published runs; products of a median
_MOST_READS = 1 << 24  # seconds: a kernel that is never released ends by itself
_USUAL = 8  # blocks: about what the published runs' collectives took
_PART, _PARTS = "price-{}.json", ("busy", "kernel", "collective")


def products(device: torch.device, size: int, count: int) -> Callable[[], None]:
    """A function that starts ``count`` products of [size, size] in 16 bits, as large as layers have them."""
    a = torch.randn(size, size, device=device).to(torch.bfloat16 if device.type == "cuda" else torch.float32)
    out = torch.empty_like(a)

    def run() -> None:
        for _ in range(count):
            torch.mm(a, a, out=out)

    return run


def busy_gpu(device: str, folder: str, size: int = 8192, count: int = 8, seconds: float = 4.0) -> Finding:
    """The slope: products without pauses and with them, each for some seconds before it counts."""
    where = default_device(device, 0)
    run = products(where, size, count)
    paused_ms, busy_ms = (_settled_ms(where, run, busy, seconds) for busy in (_PAUSED, 1.0))
    slope = (busy_ms / paused_ms - 1.0) / (1.0 - _PAUSED)
    _note(folder, "busy", slope=max(0.0, slope / (1.0 - slope * _PAUSED)))
    return Finding("ok", f"busy for {100 * _PAUSED:.0f} % {paused_ms:.2f} ms, always {busy_ms:.2f} ms")


def _settled_ms(device: torch.device, run: Callable[[], None], busy: float, seconds: float) -> float:
    """Median ms of the later half of runs, over ``seconds`` in which the GPU is busy for a share ``busy``."""
    mark, times_s = clock(device), list[float]()
    until = time.monotonic() + seconds
    while time.monotonic() < until or len(times_s) < _ROUNDS:
        start = mark()
        run()
        times_s.append(mark()() - start())
        time.sleep(times_s[-1] * (1.0 / busy - 1.0))
    return 1e3 * statistics.median(times_s[len(times_s) // 2 :])


def waiting_kernel(device: str, folder: str, sizes: Sequence[int] = (4096, 8192)) -> Finding:
    """How many multiprocessors products lose to a waiting kernel, by its blocks; the mean of sizes counts.

    Alone and beside take turns: clocks drift by more than one block takes.
    """
    where = default_device(device, 0)
    if why := why_not_triton(where, torch.float32):
        return Finding("not run", reason=why)
    from megatron_vocabpar.doctor.triton_spin import spin

    stream, mark, of_all = side_stream(where, "doctor"), clock(where), multiprocessors(where)
    flag = torch.zeros(1, dtype=torch.int32, device=where)

    def turn_s(run: Callable[[], None], seen: torch.Tensor | None) -> float:
        flag.zero_()
        waiting = None if seen is None else stream.submit(lambda: spin(flag, seen, _MOST_READS))
        start = mark()
        run()
        end = mark()
        flag.fill_(1)
        if waiting is not None:
            waiting.wait()
        return end() - start()

    def loss(run: Callable[[], None], blocks: int) -> float:
        seen = torch.zeros(blocks, dtype=torch.int32, device=where)
        ratios = [turn_s(run, None) / turn_s(run, seen) for _ in range(2 + _ROUNDS)]
        return lost(statistics.median(ratios[2:]), of_all)

    found = dict[int, dict[int, float]]()
    for size in sizes:
        run = products(where, size, 4 * (max(sizes) // size) ** 3)
        found[size] = {blocks: loss(run, blocks) for blocks in BLOCKS}
    stream.close()
    channels = statistics.fmean(each[_USUAL] for each in found.values())
    _note(folder, "kernel", channels=channels)
    figures = (f"[{size}] {', '.join(f'{ms:.0f}' for ms in each.values())}" for size, each in found.items())
    blocks = ", ".join(map(str, BLOCKS))
    return Finding(
        "ok", f"of {of_all} multiprocessors, beside {blocks} blocks products lose {'; '.join(figures)}"
    )


def lost(speed: float, of_all: int) -> float:
    """The multiprocessors that products have lost which reach this share of their speed alone."""
    return max(0.0, of_all * (1.0 - speed))


@on_processes
def waiting_collective(rank: Rank, folder: str, size: int = 8192, count: int = 4, mib: int = 16) -> Finding:
    """How many multiprocessors a collective holds while it waits, by its limit of channels."""
    device, run, held = rank.device, products(rank.device, size, count), dict[int | None, float]()
    tensor = torch.zeros(mib * 2**18, device=device)
    alone_ms = median_ms(device, run)
    for channels in CHANNELS:
        groups = create_groups((0, dist.get_rank(), 0), len(rank.groups.ranks), 1, channels=channels)
        reduce = partial(all_reduce, groups, tensor)
        reduce()  # connects
        stream = side_stream(device, "doctor")
        times_s, mark = [], clock(device)
        for _ in range(2 + _ROUNDS):
            dist.barrier()
            if dist.get_rank() == 0:
                event = stream.submit(reduce)
                start = mark()
                run()
                times_s.append(mark()() - start())
                dist.barrier()
            else:
                dist.barrier()
                event = stream.submit(reduce)
            event.wait()
        stream.close()
        if times_s:
            beside_ms = 1e3 * statistics.median(times_s[2:])
            held[channels] = lost(alone_ms / beside_ms, multiprocessors(device))
    if dist.get_rank() == 0:
        _note(folder, "collective", channels=held[None])
    figures = ", ".join(f"{each:.1f} with {'NCCL’s' if k is None else k}" for k, each in held.items())
    return Finding("ok", f"products {alone_ms:.2f} ms; multiprocessors held, by channels: {figures}")


def written(folder: str | Path) -> dict[str, Any] | None:
    """What the checks have found, as a cost file has it; None without a slope.

    What a collective holds counts where several GPUs have measured it, else what a kernel does.
    """
    found: dict[str, float] = {}
    for part in _PARTS:
        path = Path(folder) / _PART.format(part)
        found |= json.loads(path.read_text()) if path.exists() else {}
    return {"price": found} if "slope" in found else None


def _note(folder: str, name: str, **values: float) -> None:
    (Path(folder) / _PART.format(name)).write_text(json.dumps(values))
