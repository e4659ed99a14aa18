"""What layers take beside others on this machine: the numbers of ``plan/price.py``, measured.

- ``busy_gpu``: products with pauses between them, and without. The slope is how much longer they take on a
  GPU that never pauses than on one that always does.
- ``waiting_kernel``: products beside a kernel that spins on 1, 2, 4, ... multiprocessors. One that holds a
  tenth of them should make products take a ninth longer, so that 1 multiprocessor *costs* 1.
- ``waiting_collective``: products of rank 0 beside a collective that the others join only afterwards, at
  several numbers of channels, and at as many as NCCL chooses: what it holds, in multiprocessors.

Each writes what it has found to a folder; ``written`` puts it together for ``vocabpar plan --costs``.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping
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
from megatron_vocabpar.runtime.streams import Event, clock, default_device, multiprocessors, side_stream

BLOCKS = (1, 2, 4, 8, 16, 32)
CHANNELS = (1, 2, 4, 8, 16, 32, None)
"""Limits that are tried; None: as many as NCCL chooses."""
_PAUSED, _ROUNDS = 0.35, 9  # the busy share with pauses, as in the published runs; products of a median
_MOST_READS = 1 << 24  # seconds: a kernel that is never released ends by itself
_PART = "price-*.json"


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


def waiting_kernel(device: str, folder: str, size: int = 8192, count: int = 4) -> Finding:
    """What a multiprocessor costs that a waiting kernel holds."""
    where = default_device(device, 0)
    if why := why_not_triton(where, torch.float32):
        return Finding("not run", reason=why)
    from megatron_vocabpar.doctor.triton_spin import spin

    stream, run = side_stream(where, "doctor"), products(where, size, count)
    flag = torch.zeros(1, dtype=torch.int32, device=where)

    def beside_ms(blocks: int) -> float:
        seen = torch.zeros(blocks, dtype=torch.int32, device=where)
        waiting = list[Event[None]]()

        def ready() -> None:
            while waiting:
                waiting.pop().wait()
            flag.zero_()
            waiting.append(stream.submit(lambda: spin(flag, seen, _MOST_READS)))

        def released() -> None:
            run()
            flag.fill_(1)

        return median_ms(where, released, ready)

    alone_ms = median_ms(where, run)
    beside = {blocks: beside_ms(blocks) for blocks in BLOCKS}
    stream.close()
    of_all = multiprocessors(where)
    cost = cost_of_one(alone_ms, beside, of_all)
    _note(folder, "kernel", cost=cost)
    figures = ", ".join(f"{100 * (ms / alone_ms - 1):+.1f} % on {blocks}" for blocks, ms in beside.items())
    return Finding("ok", f"products {alone_ms:.2f} ms, {figures}: one of {of_all} costs {cost:.2f}")


def cost_of_one(alone_ms: float, beside_ms: Mapping[int, float], of_all: int) -> float:
    """By least squares, how many multiprocessors products lose for each that a waiting kernel holds."""
    lost = {blocks: of_all * (1.0 - alone_ms / ms) for blocks, ms in beside_ms.items()}
    return max(0.0, sum(k * each for k, each in lost.items()) / sum(k * k for k in lost))


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
            held[channels] = max(0.0, multiprocessors(device) * (1.0 - alone_ms / beside_ms))
    if dist.get_rank() == 0:
        _note(folder, "collective", channels=held[None])
    figures = ", ".join(f"{each:.1f} with {'NCCL’s' if k is None else k}" for k, each in held.items())
    return Finding("ok", f"products {alone_ms:.2f} ms; multiprocessors held, by channels: {figures}")


def written(folder: str | Path) -> dict[str, Any] | None:
    """What the checks have found, as a cost file has it; None without a slope and a price of waiting.

    On one GPU the number of channels is that of the published runs, times the cost of one.
    """
    found: dict[str, float] = {}
    for part in sorted(Path(folder).glob(_PART)):
        found |= json.loads(part.read_text())
    if "slope" not in found:
        return None
    price = {"slope": found["slope"]}
    price |= {name: found[name] for name in ("channels", "cost") if name in found}
    return {"price": price}


def _note(folder: str, name: str, **values: float) -> None:
    (Path(folder) / _PART.replace("*", name)).write_text(json.dumps(values))
