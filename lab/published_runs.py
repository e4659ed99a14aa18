"""Compares the planner with published trainings: ``python -m lab rates``, ``python -m lab page published``.

``table`` does it for trainings, ``schedules`` for schedules of one training over its 1F1B.

``published_runs.json`` holds each run's sizes, its tokens a second and GPU, its release and its source; where
a step's time is published, tokens follow from it. A third of the runs is ``held_out``: the rates in
``plan/data/rates.json`` were never fitted to them. A hash of the sizes says which (``is_held_out``), so all
releases of a configuration are on one side. Unpublished settings are assumed to be those of the planner's
launch lines: layers placed by hand, a distributed optimizer, communication of gradients beside the passes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from math import inf
from pathlib import Path
from statistics import mean, median
from typing import Any

from megatron_vocabpar.plan.choice import Choice, Request
from megatron_vocabpar.plan.choices import choice_of
from megatron_vocabpar.plan.fsdp import fsdp_choices
from megatron_vocabpar.plan.hardware import Hardware, hardware_named
from megatron_vocabpar.plan.job import Job
from megatron_vocabpar.plan.layer_counts import layouts
from megatron_vocabpar.plan.model import Model
from megatron_vocabpar.plan.plays import play_in_full, play_stock, stock_choice
from megatron_vocabpar.plan.read_config import model_preset
from megatron_vocabpar.schedule.make.choose import choose

_SIZES = (
    "model", "layers", "hardware", "gpus", "precision", "batch", "micro_batch", "seq_length", "t", "p", "c",
    "chunks", "e", "fsdp",
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One published training: its sizes as in ``Job``, and tokens a second and GPU.

    Attributes:
        model: a preset of the planner, or a model of ``published_runs.json``.
        layers: of a model that was cut or made deeper; 0: all of its own.
        precision: ``bf16``, ``fp8``, ``mxfp8`` or ``nvfp4``, of the layers' products.
        fsdp: weights, gradients and the optimizer are sharded over the replicas.
        flex, overlap: the dispatcher ``flex``, and Megatron's overlap of the experts' exchange.
        graphs: what CUDA graphs hold: ``none``; ``parts`` of layers; the ``whole`` iteration.
        release: of the software, as its source names it.
        network_gb_s: the network of a GPU; 0: that of the preset.
        certain: the dispatcher, the overlap, recomputation and graphs are those of a recipe with the
            published sizes; else of the recipe that is nearest.
    """

    model: str
    layers: int
    hardware: str
    gpus: int
    precision: str
    batch: int
    micro_batch: int
    seq_length: int
    t: int
    p: int
    c: int
    chunks: int
    e: int
    mtp: int
    fsdp: bool
    recompute: str
    flex: bool
    overlap: bool
    graphs: str
    tokens_per_s: float
    release: str
    held_out: bool
    source: str
    network_gb_s: float = 0.0
    certain: bool = True

    @property
    def job(self) -> Job:
        d = self.gpus // (self.t * self.p * self.c)
        return Job(
            p=self.p, t=self.t, c=self.c, d=d, e=self.e, m=self.batch // (d * self.micro_batch),
            micro_batch=self.micro_batch, distributed_optimizer=True, recompute=self.recompute,
            fp8="fp8" in self.precision, fp4=self.precision == "nvfp4",
            flex_dispatcher=self.flex, graphed=self.graphs == "whole",
        )  # fmt: skip

    @property
    def planned(self) -> Model:
        """The model with the run's layers, sequence length and heads."""
        model = _models()[self.model] if self.model in _models() else model_preset(self.model)
        layers = self.layers or model.layers
        return replace(model, layers=layers, seq_length=self.seq_length, mtp_depths=self.mtp)

    @property
    def gpu(self) -> Hardware:
        return hardware_named(self.hardware).connected(network_gb_s=self.network_gb_s or None)

    @property
    def iteration_ms(self) -> float:
        """The published time of an iteration."""
        return self.batch * self.seq_length / self.tokens_per_s / self.gpus * 1e3

    @property
    def kind(self) -> str:
        """The class of its model, over which errors are averaged."""
        return "experts" if self.planned.experts else "dense"

    @property
    def is_held_out(self) -> bool:
        """Whether the hash of its sizes says that no rate may be fitted to it: one of three."""
        sizes = " ".join(str(getattr(self, name)) for name in _SIZES)
        return int(sha256(sizes.encode()).hexdigest(), 16) % 3 == 0


@cache
def _data() -> dict[str, Any]:
    return dict(json.loads(Path(__file__).with_name("published_runs.json").read_text("utf-8")))


@cache
def _models() -> dict[str, Model]:
    """Models of published runs that are no presets of the planner."""
    return {name: Model(name, **sizes) for name, sizes in _data()["models"].items()}


def published_runs() -> list[Run]:
    """Every run of ``published_runs.json``."""
    return [Run(**entry) for entry in _data()["runs"]]


def planned_choice(run: Run, gpu: Hardware) -> Choice:
    """Megatron's own schedule with the run's chunks on ``gpu``, played in full with the fastest layout.

    Of a sharded run the faster of gradients in 16 and in 32 bits, as none says which it had.
    """
    model, job = run.planned, run.job
    request = Request(model, job, gpu, limit_gib=inf)
    if run.fsdp:
        return min(fsdp_choices(request), key=lambda choice: choice.iteration_ms)
    choices = [
        stock_choice(request, layout)
        for layout in layouts(model.layers, job.p, request.costs())
        if (layout.chunks, layout.overlaps) == (run.chunks, run.overlap)
    ]
    return choose(choices, lambda choice, _: play_stock(choice))[0]


def planned_tokens_per_s(run: Run) -> float:
    """Tokens a second and GPU by the planner."""
    return run.tokens_per_s * run.iteration_ms / planned_choice(run, run.gpu).iteration_ms


def errors(runs: Iterable[Run]) -> Iterator[tuple[Run, float]]:
    """Each run, with the planner's relative error."""
    for run in runs:
        yield run, planned_tokens_per_s(run) / run.tokens_per_s - 1.0


def table() -> Iterator[str]:
    """A table of the runs, in short in ``docs/plan.md``, and the mean errors."""
    yield "| model | GPUs | precision | release | t, p, c, e, v | published | planned | error | held out |"
    yield "| --- | --- | --- | --- | --- | ---: | ---: | ---: | --- |"
    compared = list(errors(published_runs()))
    for run, error in compared:
        layers = f", {run.layers} layers" if run.layers else ""
        yield (
            f"| {run.model}{layers} | {run.gpus} {run.hardware} | {run.precision} | {run.release} | {run.t}, "
            f"{run.p}, {run.c}, {run.e}, {run.chunks} | {run.tokens_per_s:,.0f} | "
            f"{run.tokens_per_s * (1 + error):,.0f} | {100 * error:+.0f} % | "
            f"{'yes' if run.held_out else ''} |"
        )
    yield from mean_errors(compared)


def mean_errors(compared: Sequence[tuple[Run, float]]) -> Iterator[str]:
    """Errors by kind: of fitted runs and of those held out, and by whether a sequence is divided."""
    for words, held_out in (("fitted", False), ("held out", True)):
        kinds = []
        for kind in ("dense", "experts"):
            sizes = [abs(e) for run, e in compared if (run.held_out, run.kind) == (held_out, kind)]
            found = f"{100 * mean(sizes):.1f} % of {len(sizes)} {kind} (median {100 * median(sizes):.1f})"
            kinds.append(found)
        yield f"Mean error of the runs {words}: {', '.join(kinds)}."
    signed = []
    for words, divides in (("with", True), ("without", False)):
        for kind in ("dense", "experts"):
            of_kind = [e for run, e in compared if (run.c > 1, run.kind) == (divides, kind)]
            signed.append(f"{100 * mean(of_kind):+.1f} % of {len(of_kind)} {kind} {words}")
    yield f"Signed means with and without context parallelism: {', '.join(signed)}."


PRIMUS = {
    "llama-2-7b on MI300X": {"interleaved": 1.09, "zb-h1": 1.13, "v-zb": 1.13, "v-half": 1.08, "v-min": 0.88},
    "qwen3-235b-a22b on MI355X": {"zb-h1": 1.080, "v-zb": 1.077, "v-half": 1.062, "v-min": 0.802},
}
"""Tokens a second over 1F1B's: AMD-AGI/Primus, docs/tech_blogs/primus_pipeline, imgs/llama2-7B-perf.png and
imgs/qwen-235B-perf.png."""


def schedules() -> Iterator[tuple[str, str, float, float]]:
    """Runs of Primus and families, with their published and planned speed over 1F1B's.

    Llama-2 7B runs over 8 MI300X of a node, Qwen3-235B over 32 MI355X with p 4 and e 8, which is planned as
    on MI300X. The article does not say how many layers and microbatches: TFLOP/s over tokens/s of the first
    are 16 layers' operations, and the article's simulator has 32 microbatches in its example.
    """
    llama = Model(
        "llama-2-7b", "Primus", vocab=32000, hidden=4096, layers=16, seq_length=4096, heads=32, groups=32,
        head_dim=128, ffn=11008,
    )  # fmt: skip
    jobs = (llama, Job(p=8, m=32)), (model_preset("qwen3-235b-a22b"), Job(p=4, d=8, e=8, m=32))
    for (name, speeds), (model, job) in zip(PRIMUS.items(), jobs, strict=True):
        request = Request(model, job, hardware_named("MI300X"), limit_gib=inf)
        times = {
            family: play_in_full(choice_of(request, "baseline", family)).iteration_ms
            for family in ("1f1b", *speeds)
        }
        for family, published in speeds.items():
            yield name, family, published, times["1f1b"] / times[family]


def schedules_table() -> Iterator[str]:
    """The table of ``schedules``."""
    yield "| run | schedule | published | planned | error |"
    yield "| --- | --- | ---: | ---: | ---: |"
    for name, family, published, planned in schedules():
        percent = round(100 * (planned / published - 1))  # a whole number has no -0
        yield f"| {name} | `{family}` | {published:.2f} | {planned:.2f} | {percent:+d} % |"
