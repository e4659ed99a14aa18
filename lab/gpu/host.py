"""What the host takes to issue single operations, in microseconds: the prices that S and T are made of."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import torch

from lab.gpu.record import Measurement
from lab.timing import now_ms
from megatron_vocabpar.layers.gemm import add_product_, product
from megatron_vocabpar.layers.kernels import dispatch
from megatron_vocabpar.runtime.streams import side_stream

_CALLS, _ROUNDS = 100, 7  # a GPU's queue is 1,024 deep: the host never waits for it


def issue_us(run: Callable[[], object], device: torch.device) -> float:
    """Median microseconds of the host to issue ``run``; the device has nothing else to do."""
    for _ in range(5):
        run()
    times_s = []
    for _ in range(_ROUNDS):
        now_ms(device)  # once the device has nothing left to do
        start = time.perf_counter()
        for _ in range(_CALLS):
            run()
        times_s.append((time.perf_counter() - start) / _CALLS)
    now_ms(device)
    return 1e6 * statistics.median(times_s)


def measurements(device: torch.device) -> Iterator[Measurement]:
    """Each operation on tensors of [256, 256], which a GPU finishes before the next one is issued."""
    x = torch.randn(256, 256, device=device).to(torch.bfloat16)
    wide, row = torch.zeros(256, 256, device=device), torch.randn(256, device=device)
    out = torch.empty_like(x)
    side = side_stream(device, "lab")
    operations: dict[str, Callable[[], object]] = {
        "an empty function": lambda: None,
        "torch.empty [256, 4]": lambda: torch.empty((256, 4), device=device),
        "a view of rows": lambda: x[0:128],
        "row * 0.5 [256]": lambda: row * 0.5,
        "mm, 16 bits": lambda: torch.mm(x, x, out=out),
        "product into fp32": lambda: product(x, x, wide),
        "product added to fp32": lambda: add_product_(wide, x, x),
        "isfinite().all()": lambda: x.isfinite().all(),
        "stable argsort [256]": lambda: torch.argsort(row, stable=True),
        "cat of one tensor": lambda: torch.cat([row]),
        "row kernel scale_rows": lambda: dispatch.scale_rows(x, row),
        "work on a side stream, and its wait": lambda: side.submit(lambda: None).wait(),
    }
    for name, run in operations.items():
        yield name, lambda run=run: [{"us": issue_us(run, device)}]  # type: ignore[misc]
    side.close()
