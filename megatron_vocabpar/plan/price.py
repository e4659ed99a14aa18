"""How much longer layers take on a busy GPU and beside collectives, and how few channels collectives need.

    time of layers = alone x (1 + busy x slope) x (1 + resident x channels / multiprocessors)

A GPU that is busy most of the time takes longer for the same layers than one that idles (its clocks are
lower), whatever the schedule. A kernel that waits for other ranks holds ``channels`` multiprocessors;
``resident`` is how many such kernels there are on average beside layers. With 0.5 of them, 15 channels and
132 multiprocessors layers take 5.7 % longer. Shares are means over ranks: within a row of the published
passes ranks differ by 2 % for other reasons, so a rank's own share says little.

The price lies between its evidence: the passes of the paper's runs on A100, where both numbers are fitted,
and kernels on an H200, where both are measured. What a gain would be at either end says how far off it is.

A collective's kernel holds a multiprocessor for each *channel* of NCCL, from its launch to its end, and a
channel carries about 20 GB/s within a node. So a schedule needs the fewest that its slack allows. For
example, dX of 4,096 tokens and a hidden size of 8,192 is 134 MB in float32, which the reduction to the last
stage sends once; if 2.5 ms pass between the last rank's S and the first pass that needs it, 3 channels carry
it in time. Between nodes they must be enough for the network: 50 GB/s take 3. Measured on an H200, one or two
channels slow layers half as much as four to eight do.

Source: ``data/price.json``; ``lab/paper/price.py`` fits a price to the published passes.
Next: ``choice.py``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron_vocabpar.plan.hardware import Hardware
from megatron_vocabpar.plan.job import Job
from megatron_vocabpar.plan.model import Model
from megatron_vocabpar.schedule.data.schema import check, read_object, text_of
from megatron_vocabpar.schedule.play.events import Events
from megatron_vocabpar.schedule.play.launches import windows
from megatron_vocabpar.schedule.play.lower import communications
from megatron_vocabpar.schedule.play.residence import busy_share, resident_beside_layers
from megatron_vocabpar.schedule.times.costs import PassCosts, PassTimes
from megatron_vocabpar.schedule.words.passes import CommType

CHANNEL_GB_S = 20.0
"""What a channel carries within a node, 10^9 bytes a second: assumed."""
_FLOAT = 4  # bytes of an element
_NO_TIME = dict.fromkeys(("F_ms", "B_ms", "W_ms"), 0.0)  # what else a cost file must have


@dataclass(frozen=True)
class Use:
    """What else a GPU does while layers run, means over the ranks of a schedule.

    Attributes:
        busy: the share of the iteration in which a rank runs passes.
        resident: collectives that are resident beside layers, on average.
    """

    busy: float = 1.0
    resident: float = 0.0

    @staticmethod
    def of(events: Events) -> Use:
        """Those of a simulated schedule."""
        return Use(fmean(busy_share(events)), fmean(resident_beside_layers(events)))


@dataclass(frozen=True)
class Price:
    """What layers take.

    Attributes:
        slope: how much longer layers take on a GPU that is always busy than on one that idles.
        channels: multiprocessors that a resident collective takes from layers.
        ends: the prices between which this one lies; none if it was measured on the GPUs in question.
    """

    slope: float
    channels: float
    ends: tuple[Price, ...] = ()

    def factor(self, use: Use, multiprocessors: int) -> float:
        """The time of layers over their time alone."""
        return (1.0 + use.busy * self.slope) * (1.0 + use.resident * self.channels / multiprocessors)

    def longer(self, use: Use, reference: Use, multiprocessors: int) -> float:
        """The time of layers over their time where ``reference`` is all that the GPU does."""
        return self.factor(use, multiprocessors) / self.factor(reference, multiprocessors)


def allowed_ms(events: Events, times: PassTimes) -> float:
    """The ms that a collective may take without delaying a pass: as planned, and what all have to spare."""
    launch_windows = windows(events, communications(events), times).values()
    spare = min((window.deadline_ms - window.ready_ms for window in launch_windows), default=0.0)
    return times.comms[CommType.C1] + spare


def fewest_channels(model: Model, job: Job, hardware: Hardware, allowed: float) -> int:
    """The channels with which a microbatch's input gradient is reduced in ``allowed`` ms."""
    # Each of a stage's t ranks has its part of every row.
    moved = _FLOAT * model.seq_length * job.micro_batch * model.hidden / job.c
    needed = moved / (allowed * 1e6) if allowed else hardware.link_gb_s
    if job.gpus > hardware.per_node:
        needed = max(needed, hardware.network_gb_s)
    return max(1, ceil(needed / CHANNEL_GB_S))


def read_measured(path: str | Path) -> tuple[Price | None, PassCosts | None]:
    """The price and the passes' times in a cost file; a file may have the price alone.

    If the file does not say how many multiprocessors a collective holds, it is as many as usual.

    Raises:
        ValueError: if the file cannot be read, or is malformed; the message names the file.
    """
    data = read_object(text_of(path, f"costs from {path}"), f"costs file {path}")
    if set(data) != {"price"}:
        costs = PassCosts.load(path)
    else:
        costs = None
        try:
            check({**_NO_TIME, **data}, "costs")
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    if "price" not in data:
        return None, costs
    entry = data["price"]
    usual = usual_price().channels
    return Price(float(entry["slope"]), channels=float(entry.get("channels", usual))), costs


@cache
def usual_price() -> Price:
    """The price of GPUs that were not measured, between its ends."""
    ends, usual = ([_price(entry) for entry in _data()[name]] for name in ("ends", "usual"))
    return Price(usual[0].slope, usual[0].channels, tuple(ends))


def _price(entry: Mapping[str, Any]) -> Price:
    return Price(float(entry["slope"]), float(entry["channels"]))


def pair_error(kind: str, *, alike: bool) -> float:
    """The mean error of planned ratios of speed beside published ones, relative.

    Args:
        kind: ``dense`` or ``experts``.
        alike: only the schedule differs within a pair; otherwise the parallel configuration does.
    """
    return float(_data()["pairs"]["schedules" if alike else "configurations"][kind]["error"])


@cache
def _data() -> dict[str, Any]:
    return json.loads((resources.files(__package__) / "data" / "price.json").read_text("utf-8"))
