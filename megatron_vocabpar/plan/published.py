"""The paper's settings and results, as data.

``data/paper/tables.json`` holds Tables 1 to 3, 5 and 6, ``measured_passes.csv`` what was published with the
artifact; Table 5's MFU takes 320 TFLOP/s as an A100's peak.

Source: Balancing Pipeline Parallelism with Vocabulary Parallelism, section 6, appendix F, artifact.
Next: ``paper.py``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from megatron_vocabpar.plan.measured import MeasuredRow, read_measured
from megatron_vocabpar.plan.memory import GIB, PUBLISHED, Held, stage_memory
from megatron_vocabpar.plan.model import Model
from megatron_vocabpar.plan.times import Job
from megatron_vocabpar.schedule.make.families import Family, claimed_peak, family_named
from megatron_vocabpar.schedule.words.methods import Method, method_named
from megatron_vocabpar.schedule.words.placement import Placement

PEAK_TFLOPS = 320.0
_TABLES = {"table5": ("table1_1f1b", "1f1b"), "table6": ("table2_vhalf", "v-half")}


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
        return family_named(_TABLES[self.table][1])

    @property
    def job(self) -> Job:
        return Job(p=self.gpus, m=128)

    @property
    def model(self) -> Model:
        """The GPT of Tables 1 and 2."""
        settings = tables()[_TABLES[self.table][0]]
        place = settings["gpus"].index(self.gpus)
        hidden, heads = settings["hidden_size"][place], settings["attention_heads"][place]
        return Model(
            name=f"{settings['model_size_b'][place]}B",
            source="Tables 1 and 2 of the paper",
            vocab=self.vocab_k * 1000,
            hidden=hidden,
            layers=settings["layers"][place],
            seq_length=self.seq_length,
            heads=heads,
            groups=heads,
            head_dim=hidden // heads,
            ffn=4 * hidden,
            gated=False,
            dropout=True,
            learned_positions=True,
        )


@cache
def tables() -> dict[str, Any]:
    """``tables.json``."""
    return json.loads((resources.files(__package__) / "data" / "paper" / "tables.json").read_text("utf-8"))


def cells(table: str) -> list[Cell]:
    """The results of ``table5`` or ``table6``."""
    return [Cell(**entry, table=table) for entry in tables()[table]]


def published_passes() -> list[MeasuredRow]:
    """The rows that were published with the artifact."""
    with resources.as_file(resources.files(__package__) / "data" / "paper" / "measured_passes.csv") as path:
        return read_measured(Path(path))


def peak_gib(cell: Cell) -> float:
    """What the memory model says of a cell: the fullest rank, with the microbatches that the paper claims."""
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
