"""The list: every check of ``vocabpar doctor --gpu`` in its order, for a machine.

Functions are named by text, so that the list can be made, and its processes started, without a GPU in use.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from megatron_vocabpar.doctor.result import Check
from megatron_vocabpar.schedule.words.methods import BASELINE, DEFAULT, METHODS

MOST_PROCESSES, MOST_STAGES = 8, 4
DTYPES = ("bfloat16", "float16", "float32")
_ROOM = "megatron_vocabpar.doctor"


def checks(
    device: str, gpus: int, folder: str, sizes: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
) -> list[Check]:
    """Every check of a machine, in the order of the table.

    Args:
        device: ``cuda``; ``cpu`` in tests.
        gpus: how many of them, at least 1.
        folder: for the results of trainings.
        sizes: arguments of some functions (``module:function``) in place of their own; empty but in tests.
    """
    rows = [Check("environment variables", f"{_ROOM}.surroundings:variables", {}, 120)]

    def add(name: str, target: str, timeout_s: float, after: str | None = None, **arguments: Any) -> None:
        values = {"device": device, **arguments, **sizes.get(target, {})}
        rows.append(Check(name, f"{_ROOM}.{target}", values, timeout_s, after))

    add("versions", "surroundings:versions", 120)
    add("GPUs", "surroundings:gpus", 120)
    add("row kernels in use", "surroundings:row_kernels", 120)
    add("products on a busy GPU", "price:busy_gpu", 180, folder=folder)
    add("products beside a kernel that waits", "price:waiting_kernel", 180, folder=folder)
    for kernel in ("exponentials", "scale_rows", "scatter_add_rows"):
        for dtype in DTYPES:
            add(f"kernel {kernel}, {dtype}", f"kernels:{kernel}", 180, dtype=dtype)
    add("kernels of the statistics, float32", "kernels:statistics", 180, dtype="float32")
    for kernel in ("large_exponentials", "large_rows"):
        add(f"kernel {kernel}, beyond 2^31 elements", f"kernels:{kernel}", 300, dtype="bfloat16")
    for dtype in DTYPES:
        for padding in (0, 37):
            shard = "a padded shard" if padding else "a shard"
            name = f"output layer of {shard}, {dtype}"
            add(name, "layers:output_layer", 180, dtype=dtype, padding=padding)
    processes, pp = min(gpus, MOST_PROCESSES), min(gpus, MOST_STAGES)
    add("a copy beside products", "overlap:copy_beside_products", 180)
    warm = "communicators"
    add(warm, "communicators:communicators", 240, processes=processes)
    target = "price:waiting_collective"
    add("products beside a collective that waits", target, 300, warm, processes=processes, folder=folder)
    for what in ("all-reduce", "all-to-all"):
        target = f"overlap:{what.replace('-', '_')}_beside_products"
        add(f"an {what} beside products", target, 240, warm, processes=processes)
    for dtype, methods in (("fp32", METHODS), ("bf16", (BASELINE, DEFAULT))):
        for method in methods:
            name, stock = (f"training {which}, {dtype}" for which in (method, BASELINE))
            after = None if method == BASELINE else stock
            arguments = {"method": method, "dtype": dtype, "pp": pp, "folder": folder}
            add(name, "training:train", 300, after, **arguments)
    return rows
