"""The numbers and the bars of ``vocabpar emulate`` in a results folder, whose report shows them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_vocabpar.schedule.draw.lengths import Length, lay_out_lengths
from megatron_vocabpar.schedule.draw.svg import draw_svg
from megatron_vocabpar.train.output import EMULATION_FILE, EMULATION_PICTURE_FILE
from megatron_vocabpar.train.pictures import COLOURS, OTHER_COLOUR
from megatron_vocabpar.train.tables import TextTable

_HEADINGS = (
    "schedule", "predicted ms", "ran, ms", "empty passes", "net ms", "differs", "idle, predicted", "measured",
)  # fmt: skip


def write_emulation(folder: Path, record: Mapping[str, Any]) -> None:
    """Write the numbers and the picture; ``record`` is that of ``measure.emulation.record``."""
    (folder / EMULATION_FILE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (folder / EMULATION_PICTURE_FILE).write_text(emulation_svg(record), encoding="utf-8")


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
            f"{path} is not an emulation ({error}); remove it, or run vocabpar emulate"
        ) from error
    return record


def emulation_svg(record: Mapping[str, Any]) -> str:
    """A bar for each schedule, in its method's colour."""
    rows = []
    for row in record["schedules"]:
        method = row["name"].rpartition(" + ")[2]  # of "v-half + vocab-2"
        colour = COLOURS.get(method, OTHER_COLOUR)
        rows.append(Length(row["name"], row["net_ms"], row["measured_idle"], row["predicted_ms"], colour))
    return draw_svg(lay_out_lengths(f"An iteration, emulated: {settings(record)}", rows))


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
