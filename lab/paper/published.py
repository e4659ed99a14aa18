"""The paper's settings and results: Tables 1 to 3, 5 and 6, and the passes published with the artifact.

``data/cells.csv`` holds Tables 5 and 6 (an empty cell ran out of memory), ``data/models.csv`` the models of
Tables 1 and 2, ``data/scaling.csv`` Table 3, ``data/measured_passes.csv`` the artifact's times. All are from
A100 with 80 GB. MFU is relative to 320 TFLOP/s: with this peak the published iteration times give the tables'
figures. The tables' GB are GiB: the baseline's peak grows by 2.93 from 64k to 128k ids, which is 16 bytes a
weight.

Source: Balancing Pipeline Parallelism with Vocabulary Parallelism, section 6, appendix F, artifact.
Next: ``simulated.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

from lab.paper.measured import MeasuredRow, read_measured
from lab.paper.rows import CsvRow, read_rows
from megatron_vocabpar.plan.job import Job
from megatron_vocabpar.plan.model import Model
from megatron_vocabpar.plan.stage_memory import GIB, PUBLISHED, Held, stage_memory
from megatron_vocabpar.schedule.make.families import Family, claimed_peak, family_named
from megatron_vocabpar.schedule.words.methods import Method, method_named
from megatron_vocabpar.schedule.words.placement import Placement

PEAK_TFLOPS = 320.0
_FAMILIES = {"table5": "1f1b", "table6": "v-half"}


@dataclass(frozen=True)
class Cell:
    """One published result: MFU in per cent and peak memory in GiB; None where it ran out of memory."""

    gpus: int
    seq_length: int
    method: str
    vocab_k: int
    mfu_percent: float | None
    peak_memory_gb: float | None
    table: str = "table5"

    @property
    def family(self) -> Family:
        return family_named(_FAMILIES[self.table])

    @property
    def job(self) -> Job:
        return Job(p=self.gpus, m=128)

    @property
    def model(self) -> Model:
        """The GPT of Tables 1 and 2."""
        sizes = _models()[self.table, self.gpus]
        hidden, heads = sizes["hidden"], sizes["heads"]
        return Model(
            name=f"{sizes['size_b']}B",
            source="Tables 1 and 2 of the paper",
            vocab=self.vocab_k * 1000,
            hidden=hidden,
            layers=sizes["layers"],
            seq_length=self.seq_length,
            heads=heads,
            groups=heads,
            head_dim=hidden // heads,
            ffn=4 * hidden,
            gated=False,
            dropout=True,
            learned_positions=True,
        )

    @property
    def tflops(self) -> float | None:
        """Model operations, in 10^12 a second and GPU; None if it ran out of memory."""
        return None if self.mfu_percent is None else self.mfu_percent / 100 * PEAK_TFLOPS


@cache
def cells(table: str) -> tuple[Cell, ...]:
    """The results of ``table5`` or ``table6``."""
    return tuple(_cell(row) for row in _data("cells") if row.cells["table"] == table)


def _cell(row: CsvRow) -> Cell:
    gpus, seq_length, vocab_k = (int(row.cells[name]) for name in ("gpus", "seq_length", "vocab_k"))
    mfu, peak = (row.number(name) if row.cells[name] else None for name in ("mfu_percent", "peak_memory_gb"))
    return Cell(gpus, seq_length, row.cells["method"], vocab_k, mfu, peak, row.cells["table"])


@cache
def _models() -> dict[tuple[str, int], dict[str, int]]:
    """The models' sizes by table and number of GPUs."""
    rows = [dict(row.cells) for row in _data("models")]
    return {
        (row.pop("table"), int(row["gpus"])): {name: int(text) for name, text in row.items()} for row in rows
    }


def published_scaling() -> list[tuple[str, int, int, float]]:
    """Table 3: layer, sequence length, GPUs, and per cent of linear scaling."""
    return [
        (row.cells["layer"], int(row.cells["seq_length"]), gpus, row.number(f"p{gpus}"))
        for row in _data("scaling")
        for gpus in (8, 16, 32)
    ]


def published_passes() -> list[MeasuredRow]:
    """The rows of measured passes that were published with the artifact."""
    return read_measured(_path("measured_passes"))


def _data(name: str) -> list[CsvRow]:
    return read_rows(_path(name), "published results", ())


def _path(name: str) -> Path:
    with resources.as_file(resources.files(__package__) / "data" / f"{name}.csv") as path:
        return path


def peak_gib(cell: Cell) -> float:
    """A cell's peak by the memory model: the fullest rank's, with the microbatches that the paper claims."""
    method: Method = method_named(cell.method)
    family, model, job = cell.family, cell.model, cell.job
    placement = Placement(job.p, family.chunks, family.shape)
    layers = [model.layers // placement.num_stages] * placement.num_stages
    held = [Held(_held(method, family, rank, job.p)) for rank in range(job.p)]
    stages = stage_memory(model, job, method, placement, layers, held, PUBLISHED, outside=False)
    return max(stage.total for stage in stages) / GIB


def _held(method: Method, family: Family, rank: int, p: int) -> float:
    """Microbatches of activations: the claim on the fullest rank; in 1F1B one less on each further rank."""
    most = claimed_peak(method, p, family, family.chunks)
    return most - rank if family.shape == "standard" and not method.in_step else most
