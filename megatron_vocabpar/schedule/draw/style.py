"""The colour and the explanation of each type of pass, for all pictures.

Colours differ in lightness too, for greyscale print and colour blindness. A rank's second and later chunks
have a darker shade.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_vocabpar.schedule.words.passes import CommType, PassType
from megatron_vocabpar.schedule.words.schedule import Schedule

INK, QUIET = "#222222", "#666666"  # of texts


@dataclass(frozen=True, slots=True)
class Style:
    """How one type of pass is drawn: background and text colour as ``#rrggbb``, and its explanation."""

    fill: str
    ink: str
    meaning: str


STYLES: dict[PassType, Style] = {
    PassType.F: Style("#9ec5f4", "#12233d", "forward"),
    PassType.B: Style("#a8dcb5", "#10301b", "backward"),
    PassType.W: Style("#d9e08a", "#2b3005", "weight gradient"),
    PassType.S: Style("#f6b26b", "#3d2200", "output layer S"),
    PassType.S2: Style("#f9d9a8", "#3d2200", "output layer S2"),
    PassType.T: Style("#d9534f", "#ffffff", "output layer T"),
    PassType.L: Style("#222222", "#ffffff", "loss function"),
    PassType.TW: Style("#e8a09d", "#3d0a08", "output layer TW"),
    PassType.R: Style("#b56576", "#ffffff", "output layer R"),
    PassType.IF: Style("#c9b3e6", "#281544", "input forward"),
    PassType.IB: Style("#7d5ba6", "#ffffff", "input backward"),
}


# The data that a pass waits for when it waits for a communication.
MEANINGS: dict[CommType, str] = {
    CommType.RECV_F: "the output of the previous stage",
    CommType.RECV_B: "the input gradient of the next stage",
    CommType.C0: "the last stage's output, for every rank",
    CommType.C1: "the softmax statistics of all ranks",
    CommType.C2: "the reduction after C1",
    CommType.C3: "the input gradient of the output layer",
    CommType.CG: "the gradient of every token's loss",
    CommType.CI: "the embedded tokens",
    CommType.CIB: "the gradient of the embedded tokens",
}


def types_in(schedule: Schedule) -> list[PassType]:
    """The types of pass that the schedule has, in the order of the legend."""
    present = {pass_.type for passes in schedule.ranks for pass_ in passes}
    return [type_ for type_ in STYLES if type_ in present]


def shade(colour: str, chunk: int) -> str:
    """``colour``, made darker for the later chunks of a rank."""
    factor = 0.82**chunk
    parts = [int(colour[k : k + 2], 16) for k in (1, 3, 5)]
    return "#" + "".join(f"{round(part * factor):02x}" for part in parts)
