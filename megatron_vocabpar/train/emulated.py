"""The numbers of ``python -m lab emulate`` in a results folder, whose report shows them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_vocabpar.train.output import EMULATION_FILE
from megatron_vocabpar.train.tables import TextTable

_HEADINGS = (
    "schedule", "predicted ms", "ran, ms", "empty passes", "net ms", "differs", "idle, predicted", "measured",
)  # fmt: skip


def read_emulation(folder: Path) -> dict[str, Any] | None:
    """The numbers of a folder's emulation, if there was one."""
    path = folder / EMULATION_FILE
    if not path.is_file():
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        emulation_table(record)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(
            f"{path} is not an emulation ({error}); remove it, or run python -m lab emulate"
        ) from error
    return record


def settings(record: Mapping[str, Any]) -> str:
    """What was emulated, in words."""
    return f"{record['pp']} ranks, {record['microbatches']} microbatches, {record['costs']}"


def emulation_table(record: Mapping[str, Any]) -> TextTable:
    """A row a schedule; the note says when the machine was busy with other work."""
    rows = [
        [
            row["name"],
            f"{row['predicted_ms']:,.1f}",
            f"{row['net_ms'] + row['critical_passes'] * row['empty_pass_ms']:,.1f}",
            f"{row['critical_passes']} × {row['empty_pass_ms']:.3f}",
            f"{row['net_ms']:,.1f}",
            f"{100 * row['error']:+.1f} %",
            f"{100 * row['predicted_idle']:.1f} %",
            f"{100 * row['measured_idle']:.1f} %",
        ]
        for row in record["schedules"]
    ]
    return TextTable(f"Emulated: {settings(record)}", [[*_HEADINGS], *rows], record.get("warning", ""))
