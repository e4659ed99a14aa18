"""The list: every check of ``vocabpar doctor --gpu`` in its order, for a machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from megatron_vocabpar.doctor import communicators, environment, kernels, training
from megatron_vocabpar.doctor.check_runs import Check, Finding
from megatron_vocabpar.schedule.words.methods import BASELINE, DEFAULT, METHODS

MOST_PROCESSES, MOST_STAGES = 8, 4
DTYPES = ("bfloat16", "float16", "float32")


def checks(
    device: str, gpus: int, folder: str, sizes: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
) -> list[Check]:
    """Every check of a machine, in the order of the table.

    Args:
        device: ``cuda``; ``cpu`` in tests.
        gpus: how many of them, at least 1.
        folder: for the results of trainings.
        sizes: arguments of some functions, by name, in place of their own; empty but in tests.
    """
    rows = [Check("environment variables", environment.variables, {}, 120)]

    def add(
        name: str,
        function: Callable[..., Finding],
        timeout_s: float,
        after: str | None = None,
        ranks: int = 1,
        **arguments: Any,
    ) -> None:
        values = {"device": device, **arguments, **sizes.get(function.__name__, {})}
        rows.append(Check(name, function, values, timeout_s, ranks, after))

    add("versions", environment.versions, 120)
    add("GPUs", environment.gpus, 120)
    add("row kernels in use", environment.row_kernels, 120)
    for kernel in (kernels.exponentials, kernels.scale_rows, kernels.scatter_add_rows, kernels.gradients):
        for dtype in DTYPES:
            add(f"kernel {kernel.__name__}, {dtype}", kernel, 180, dtype=dtype)
    add("kernels of the statistics, float32", kernels.statistics, 180, dtype="float32")
    for kernel in (kernels.large_exponentials, kernels.large_rows):
        add(f"kernel {kernel.__name__}, beyond 2^31 elements", kernel, 300, dtype="bfloat16")
    add("communicators", communicators.communicators, 240, ranks=min(gpus, MOST_PROCESSES))
    pp = min(gpus, MOST_STAGES)
    for dtype, methods in (("fp32", METHODS), ("bf16", (BASELINE, DEFAULT))):
        for method in methods:
            name, stock = (f"training {which}, {dtype}" for which in (method, BASELINE))
            after = None if method == BASELINE else stock
            add(name, training.train, 300, after, method=method, dtype=dtype, pp=pp, folder=folder)
    return rows
