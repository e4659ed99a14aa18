"""Compares the paper's results with simulated ones: Tables 3, 5 and 6, which Figures 11 to 14 draw.

If the passes of a cell's own run were published, its MFU is simulated from them (``measured.py``), otherwise
from the estimates for an A100 (``plan/times.py``). Its memory is that of ``plan/stage_memory.py``.

Next: ``figures.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import mean

from lab.paper.measured import MeasuredRow, predict
from lab.paper.published import (
    PEAK_TFLOPS,
    Cell,
    cells,
    peak_gib,
    published_passes,
    published_scaling,
)
from megatron_vocabpar.plan.choice import Request
from megatron_vocabpar.plan.choices import choice_of
from megatron_vocabpar.plan.hardware import hardware_named

MEASURED, ESTIMATED = "measured passes", "estimated passes"


@dataclass(frozen=True)
class Compared:
    """A published cell and its simulation; ``source`` says where the simulated passes' times come from."""

    cell: Cell
    mfu_percent: float
    peak_gib: float
    source: str

    def pair(self, memory: bool) -> tuple[float, float | None]:
        """The simulated and the published value: peak memory, or MFU."""
        if memory:
            return self.peak_gib, self.cell.peak_memory_gb
        return self.mfu_percent, self.cell.mfu_percent

    def error(self, memory: bool) -> float | None:
        """The relative error of the simulation; None if the published run ran out of memory."""
        simulated, published = self.pair(memory)
        return None if published is None else simulated / published - 1.0


def compare(table: str) -> Iterator[Compared]:
    """Simulate ``table5`` or ``table6``, cell by cell."""
    measured = {_setting(row): row for row in published_passes()} if table == "table5" else {}
    for cell in cells(table):
        row = measured.get((cell.method, cell.gpus, cell.seq_length, cell.vocab_k * 1000))
        if row is not None:
            length_ms, source = predict(row).predicted_ms, MEASURED
        else:
            length_ms, source = estimated_ms(cell), ESTIMATED
        yield Compared(cell, mfu_percent(cell, length_ms), peak_gib(cell), source)


def estimated_ms(cell: Cell) -> float:
    """The ms of a cell's iteration, from estimated passes."""
    gpu = hardware_named("A100")
    request = Request(cell.model, cell.job, gpu, gpu.memory_gib)
    choice = choice_of(request, cell.method, cell.family.name, cell.job.m)
    assert not choice.problem, choice.problem
    return choice.iteration_ms


def mfu_percent(cell: Cell, length_ms: float) -> float:
    """MFU as the paper counts it: relative to 320 TFLOP/s."""
    flops = cell.model.step_flops * cell.model.seq_length * cell.job.m
    return 100 * flops / (length_ms * 1e-3 * cell.gpus * PEAK_TFLOPS * 1e12)


@dataclass(frozen=True)
class Scaling:
    """An entry of Table 3: rate of a shard over the whole layer's, in per cent."""

    layer: str
    seq_length: int
    gpus: int
    published: float
    measured: float | None  # from the published passes; None where there are none
    vocab: int | None  # of the measured runs; the table's is 256,000


def table3() -> list[Scaling]:
    """Table 3, from the published passes of the largest vocabulary at each sequence length."""
    return [
        Scaling(layer, length, gpus, percent, *(_scaling(layer, length, gpus) or (None, None)))
        for layer, length, gpus, percent in published_scaling()
    ]


def _scaling(layer: str, seq_length: int, gpus: int) -> tuple[float, int] | None:
    """The whole layer's time over that of p shards, in per cent, and the vocabulary.

    The whole layer's time is the extra time of the first or the last rank over the mean of the others.
    """
    method = layer.removeprefix("output-") if layer.startswith("output-") else "vocab-1"
    rows = {_setting(row): row for row in published_passes()}
    vocabs = [
        row.vocab
        for row in rows.values()
        if (row.method, row.p, row.seq_length) == (method, gpus, seq_length)
    ]
    if not vocabs:
        return None
    undivided, shards = (rows[name, gpus, seq_length, max(vocabs)] for name in ("baseline", method))
    passes = ("F_us_per_rank", "B_us_per_rank")
    work = [sum(undivided.passes_ms[key][rank] for key in passes) for rank in range(gpus)]
    extra = work[0 if layer == "input" else -1] - mean(work[1:-1])
    columns = ["IF_us_per_rank", "IB_us_per_rank"] if layer == "input" else ["output_us_per_rank"]
    shard = sum(mean(shards.passes_ms[key]) for key in columns)
    return 100 * extra / (gpus * shard), max(vocabs)


def _setting(row: MeasuredRow) -> tuple[str, int, int, int]:
    return row.method, row.p, row.seq_length, row.vocab
