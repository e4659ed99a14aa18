"""Compares the planner with published trainings; ``python -m lab page published``.

``table`` does it for trainings, ``schedules`` for schedules of one training over its 1F1B.

``published_runs.json`` holds each run's sizes, its tokens a second and GPU, its source, and whether the
shares in ``plan/data/rates.json`` were fitted to it. Unpublished settings are assumed to be those of the
planner's launch lines: layers placed by hand, a distributed optimizer, communication of gradients beside the
passes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from statistics import mean

from megatron_vocabpar.plan.choice import Request
from megatron_vocabpar.plan.choices import choice_of
from megatron_vocabpar.plan.hardware import hardware_named
from megatron_vocabpar.plan.job import Job
from megatron_vocabpar.plan.layer_counts import layouts
from megatron_vocabpar.plan.model import Model
from megatron_vocabpar.plan.plays import play_in_full, play_stock, stock_choice
from megatron_vocabpar.plan.read_config import model_preset
from megatron_vocabpar.schedule.make.choose import choose


@dataclass(frozen=True)
class Run:
    """One published training: its sizes as in ``Job``, and tokens a second and GPU."""

    model: str
    hardware: str
    gpus: int
    fp8: bool
    batch: int
    micro_batch: int
    seq_length: int
    t: int
    p: int
    c: int
    chunks: int
    e: int
    mtp: int
    recompute: str
    flex: bool
    hidden: float
    tokens_per_s: float
    fitted: bool
    source: str

    @property
    def job(self) -> Job:
        d = self.gpus // (self.t * self.p * self.c)
        return Job(
            p=self.p, t=self.t, c=self.c, d=d, e=self.e, m=self.batch // (d * self.micro_batch),
            micro_batch=self.micro_batch, distributed_optimizer=True, recompute=self.recompute, fp8=self.fp8,
            flex_dispatcher=self.flex,
        )  # fmt: skip

    @property
    def planned(self) -> Model:
        """The preset with the run's sequence length and heads."""
        return replace(model_preset(self.model), seq_length=self.seq_length, mtp_depths=self.mtp)


def published_runs() -> list[Run]:
    """Every run of ``published_runs.json``."""
    file = Path(__file__).with_name("published_runs.json")
    return [Run(**entry) for entry in json.loads(file.read_text("utf-8"))]


def planned_tokens_per_s(run: Run) -> float:
    """Tokens a second and GPU of Megatron's own schedule with the run's chunks, by the planner."""
    model, job, gpu = run.planned, run.job, hardware_named(run.hardware)
    request = Request(model, job, gpu, limit_gib=inf)
    choices = [
        stock_choice(request, layout)
        for layout in layouts(model.layers, job.p, request.costs())
        if layout.chunks == run.chunks and layout.overlaps == (run.hidden > 0.0)
    ]
    best_ms = choose(choices, lambda choice, _: play_stock(choice))[0].iteration_ms
    return run.batch * run.seq_length / best_ms * 1e3 / run.gpus


def errors(runs: Sequence[Run]) -> Iterator[tuple[Run, float]]:
    """Each run with the planner's relative error."""
    for run in runs:
        yield run, planned_tokens_per_s(run) / run.tokens_per_s - 1.0


def table() -> Iterator[str]:
    """A table of the runs, in short in ``docs/plan.md``, and the mean errors."""
    yield "| model | GPUs | precision | t, p, c, e, chunks | published | planned | error | fitted |"
    yield "| --- | --- | --- | --- | ---: | ---: | ---: | --- |"
    compared = list(errors(published_runs()))
    for run, error in compared:
        yield (
            f"| {run.model} | {run.gpus} {run.hardware} | {'fp8' if run.fp8 else 'bf16'} | {run.t}, {run.p}, "
            f"{run.c}, {run.e}, {run.chunks} | {run.tokens_per_s:,.0f} | "
            f"{run.tokens_per_s * (1 + error):,.0f} | {100 * error:+.0f} % | {'yes' if run.fitted else ''} |"
        )
    for words, fitted in (("fitted", True), ("not fitted", False)):
        sizes = [abs(error) for run, error in compared if run.fitted == fitted]
        yield f"Mean error of the {len(sizes)} {words}: {100 * mean(sizes):.1f} %."


PRIMUS = {"interleaved": 1.09, "zb-h1": 1.13, "v-zb": 1.13, "v-half": 1.08, "v-min": 0.88}
"""Tokens a second over 1F1B's, MI300X: AMD-AGI/Primus, docs/tech_blogs/primus_pipeline, llama2-7B-perf."""


def schedules() -> Iterator[tuple[str, float, float]]:
    """Families with their published and planned speed over 1F1B's, for Llama-2 7B over 8 MI300X of a node.

    The article does not say how many layers and microbatches: its TFLOP/s over its tokens/s are 16 layers'
    operations, and its simulator's example has 32 microbatches.
    """
    model = Model(
        "llama-2-7b", "Primus", vocab=32000, hidden=4096, layers=16, seq_length=4096, heads=32, groups=32,
        head_dim=128, ffn=11008,
    )  # fmt: skip
    request = Request(model, Job(p=8, m=32), hardware_named("MI300X"), limit_gib=192.0)
    times = {
        family: play_in_full(choice_of(request, "baseline", family)).iteration_ms
        for family in ("1f1b", *PRIMUS)
    }
    for family, published in PRIMUS.items():
        yield family, published, times["1f1b"] / times[family]


def schedules_table() -> Iterator[str]:
    """The table of ``schedules``."""
    yield "| schedule on MI300X | published | planned | error |"
    yield "| --- | ---: | ---: | ---: |"
    for family, published, planned in schedules():
        percent = round(100 * (planned / published - 1))  # a whole number has no -0
        yield f"| `{family}` | {published:.2f} | {planned:.2f} | {percent:+d} % |"
