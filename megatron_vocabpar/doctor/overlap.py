"""Whether a side stream's work runs beside matrix products on the main stream: together against alone.

Vocabulary parallelism hides its collectives behind the transformer passes (section 6.1 of the paper), by
``runtime/streams.py``. Pairs of F and B hide the exchange between experts. Here a side stream copies to the
host, in one process, or all-reduces or exchanges rows, over several.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import ceil

import torch
import torch.distributed as dist

from megatron_vocabpar.doctor.processes import Rank, on_processes
from megatron_vocabpar.doctor.result import Finding
from megatron_vocabpar.runtime.comm import all_reduce, exchange_rows
from megatron_vocabpar.runtime.streams import clock, default_device, side_stream

ROUNDS = 9
LEAST_HIDDEN = {"copy": 0.5, "all-reduce": 0.25, "all-to-all": 0.25}
"""Part of the shorter work that must be hidden: copies have their own engines, collectives share the SMs."""


@dataclass(frozen=True)
class Times:
    """Medians in milliseconds: products alone, the side stream's work alone, both together."""

    products_ms: float
    side_ms: float
    together_ms: float

    @property
    def hidden(self) -> float:
        """Share of the shorter work that the longer one hides: 1 at best, 0 if they run one by one."""
        saved = self.products_ms + self.side_ms - self.together_ms
        return saved / min(self.products_ms, self.side_ms)


def judge(times: Times, what: str) -> Finding:
    """Ok where enough of the shorter work is hidden."""
    figure = (
        f"products {times.products_ms:.2f} ms, {what} {times.side_ms:.2f} ms, together "
        f"{times.together_ms:.2f} ms: {100 * times.hidden:.0f} % hidden"
    )
    if times.hidden >= LEAST_HIDDEN[what]:
        return Finding("ok", figure)
    return Finding(
        "failed", figure, f"less than {100 * LEAST_HIDDEN[what]:.0f} % of the shorter one is hidden"
    )


def median_ms(
    device: torch.device, run: Callable[[], object], ready: Callable[[], object] = lambda: None
) -> float:
    """Median milliseconds of ``run`` on the current device, after two rounds of warm-up.

    ``ready`` goes before each, untimed.
    """
    mark, times = clock(device), []
    for _ in range(2 + ROUNDS):
        ready()
        start = mark()
        run()
        times.append(1e3 * (mark()() - start()))
    return statistics.median(times[2:])


def measure(device: torch.device, work: Callable[[], object], size: int) -> Times:
    """Times of ``work`` on a side stream, and of products [size, size], as many as take about as long.

    Args:
        device: the current one.
        work: what the side stream does; on a GPU it returns before it is done.
        size: rows and columns of the products' operands.
    """
    stream = side_stream(device, "doctor")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a = torch.randn(size, size, device=device, dtype=dtype)
    out = torch.empty_like(a)

    def products(count: int) -> None:
        for _ in range(count):
            torch.mm(a, a, out=out)

    def together(count: int) -> None:
        event = stream.submit(work)
        products(count)
        event.wait()

    side_ms = median_ms(device, lambda: stream.submit(work).wait())
    count = max(1, ceil(_agreed(side_ms / median_ms(device, lambda: products(1)), device)))
    products_ms, together_ms = (median_ms(device, partial(run, count)) for run in (products, together))
    stream.close()
    return Times(products_ms, side_ms, together_ms)


def _agreed(value: float, device: torch.device) -> float:
    """Rank 0's value on every rank; ranks that computed for different times would wait for each other."""
    if not dist.is_initialized():
        return value
    shared = torch.tensor([value], device=device)
    dist.broadcast(shared, 0)
    return float(shared)


def copy_beside_products(device: str, mib: int = 256, size: int = 2048) -> Finding:
    """A copy of ``mib`` MiB to the host on a side stream, beside products."""
    where = default_device(device, 0)
    source = torch.ones(mib * 2**18, device=where)
    target = torch.empty(source.shape, pin_memory=where.type == "cuda")

    def copy() -> None:
        target.copy_(source, non_blocking=True)

    return judge(measure(where, copy, size), "copy")


@on_processes
def all_reduce_beside_products(rank: Rank, mib: int = 64, size: int = 2048) -> Finding:
    """An all-reduce of ``mib`` MiB over all processes on a side stream, beside products; rank 0's times.

    64 MiB is the dX of a microbatch of 4096 tokens and a hidden size of 8192, in bf16.
    """
    tensor = torch.zeros(mib * 2**18, device=rank.device)

    def reduce() -> None:
        all_reduce(rank.groups, tensor)

    return judge(measure(rank.device, reduce, size), "all-reduce")


@on_processes
def all_to_all_beside_products(rank: Rank, mib: int = 64, size: int = 2048) -> Finding:
    """An all-to-all of ``mib`` MiB from each process on a side stream, beside products; rank 0's times.

    64 MiB are 4096 tokens with a hidden size of 2048, in bf16, each of which goes to four experts.
    """
    counts = [1] * len(rank.groups.ranks)
    rows = torch.zeros(len(counts), mib * 2**18 // len(counts), device=rank.device)
    received = torch.empty_like(rows)

    def exchange() -> None:
        exchange_rows(rank.groups, received, rows, counts, counts)

    return judge(measure(rank.device, exchange, size), "all-to-all")
