"""The table of ``docs/kernels.md`` of what was measured on a GPU: ``python -m lab page measured`` prints it.

A row is a pass on a shape, as ``python -m lab kernels --save lab/results`` has recorded it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lab.kernels.tables import number
from lab.paper.published import published_scaling

RECORD = Path(__file__).parents[1] / "results" / "nvidia-h200_2026-11-26.json"
OTHERS = ("liger", "cce")
_IN_THE_PAPER = {"vocab-1": "output-vocab-1", "vocab-2": "output-vocab-2", "IF+IB": "input"}
"""The layers of the paper's Table 3, by our names of their passes."""


def record_table() -> Iterator[str]:
    """Our time in ms, the bare products', others' over ours, and the scaling beside the paper's."""
    yield (
        "| shape | passes | ours, ms | three products, ms | published | PyTorch | liger | cce | scaling, % | "
        "the paper's, % |"
    )
    yield "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    scaling = {(layer, n, p): percent for layer, n, p, percent in published_scaling()}
    for row in json.loads(RECORD.read_text(encoding="utf-8"))["rows"]:
        if row["method"] in ("IF", "IB"):
            continue
        of_paper = scaling.get((_IN_THE_PAPER.get(row["method"], ""), row["n"], row["p"]))
        yield f"| p {row['p']}, H {row['hidden']} | {row['method']} | {' | '.join(_cells(row, of_paper))} |"


def _cells(row: Mapping[str, Any], of_paper: float | None) -> Iterator[str]:
    for value in (
        row["ours_ms"],
        row["three_gemms_ms"],
        row["speedup_over_published"],
        row["speedup_over_pytorch"],
        *(row["speedup_over_others"].get(name) for name in OTHERS),
    ):
        yield number(value, missing="–")
    for percent in (row["scaling_percent"], of_paper):
        yield number(percent, 0, missing="–")
