"""The numbers of an emulation in a results folder, and its bars: ``vocabpar train``'s report shows them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_vocabpar.schedule.draw.lengths import Length, lay_out_lengths
from megatron_vocabpar.schedule.draw.svg import draw_svg
from megatron_vocabpar.train.output import EMULATION_FILE, EMULATION_PICTURE_FILE
from megatron_vocabpar.train.plots import COLOURS, OTHER_COLOUR
from megatron_vocabpar.train.tables import emulation_settings


def write_emulation(folder: Path, record: Mapping[str, Any]) -> None:
    """Write the numbers and the picture into a results folder, whose report shows them."""
    (folder / EMULATION_FILE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (folder / EMULATION_PICTURE_FILE).write_text(emulation_svg(record), encoding="utf-8")


def emulation_svg(record: Mapping[str, Any]) -> str:
    """A bar for each schedule, in its method's colour."""
    rows = []
    for row in record["schedules"]:
        method = row["name"].rpartition(" + ")[2]  # of "v-half + vocab-2"
        colour = COLOURS.get(method, OTHER_COLOUR)
        rows.append(Length(row["name"], row["net_ms"], row["measured_idle"], row["predicted_ms"], colour))
    return draw_svg(lay_out_lengths(f"An iteration, emulated: {emulation_settings(record)}", rows))
