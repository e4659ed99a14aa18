"""A plan on the terminal and as JSON.

Next: ``page.py``.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_vocabpar.plan.advice import launch_line, reasons, redistribution, remedies
from megatron_vocabpar.plan.memory import GIB
from megatron_vocabpar.plan.options import Option, Request, all_options, best_of

PARTS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "activations",
    "output": "output layer, S to T",
    "inputs": "embedded inputs",
    "workspaces": "workspaces",
    "reserved": "reserved, not in use",
    "outside": "NCCL, CUDA",
}
"""What fills a stage's memory, by the field of ``StageMemory``."""


@dataclass(frozen=True)
class Advice:
    """A request and its answer; where nothing fits, ``best`` is None and ``remedies`` are filled."""

    request: Request
    options: tuple[Option, ...]
    best: Option | None
    launch: str
    reasons: tuple[str, ...]
    remedies: tuple[str, ...]


def advise(request: Request, *, workers: int = 1) -> Advice:
    """Try every option and say which is best, or what would make one fit; with so many processes."""
    options = tuple(all_options(request, workers=workers))
    best = best_of(request, options)
    if best is None:
        return Advice(
            request, options, None, "", tuple(redistribution(request, options)), tuple(remedies(request))
        )
    why = tuple(reasons(request, options, best))
    return Advice(request, options, best, launch_line(request, best), why, ())


def summary(request: Request) -> list[str]:
    """What is planned, and where its numbers come from."""
    model, job, gpu = request.model, request.job, request.hardware
    shape = f"V {model.vocab:,}, H {model.hidden:,}, L {model.layers}, s {model.seq_length:,}"
    sizes = f"p {job.p}, t {job.t}, d {job.d}" + (f", e {job.e}" if model.experts else "")
    times = "measured costs" if request.measured else "estimated from its data sheet"
    return [
        f"{model.name}: {model.parameters / 1e9:.1f} B parameters, {shape}",
        f"{sizes}: {job.gpus} {gpu.name}, {request.limit_gib:.1f} GiB each; {job.m} microbatches of "
        f"{job.micro_batch}; times {times}",
    ]


def print_advice(advice: Advice, console: Console) -> None:
    """The table, the memory of the chosen stages, the launch line and why."""
    request, best = advice.request, advice.best
    for line in summary(request):
        console.print(Text(line))
    console.print(_options_table(advice))
    for option in advice.options:
        if option.problem:
            console.print(Text(f"{option.name}: {option.problem}"))
    for option in dict.fromkeys(filter(None, (best, advice.options[0]))):
        if not option.problem:
            console.print(Text(f"{option.name}: GiB of each rank at its peak"))
            console.print(_memory_table(option))
    if best is None:
        console.print(Text("Nothing fits. What would:"))
        for line in advice.remedies or ("nothing that was tried; use more GPUs or a smaller model",):
            console.print(Text(f"- {line}"))
        for line in advice.reasons:
            console.print(Text(f"- {line}"))
        return
    console.print(Text(f"Recommended: {best.name}"))
    for line in advice.reasons:
        console.print(Text(f"- {line}"))
    console.print()
    print(advice.launch)  # as it is, for copying


def _options_table(advice: Advice) -> Table:
    request = advice.request
    table = _table("family", "method")
    for name in ("ms", "MFU %", "tokens/s", "idle %", "GiB a rank"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("fits")
    for option in advice.options:
        if not option.problem:
            table.add_row(*_cells(option, request, advice.best))
    return table


def _table(*left: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in left:
        table.add_column(name, no_wrap=True)
    return table


def _cells(option: Option, request: Request, best: Option | None) -> list[str]:
    totals = [stage.total / GIB for stage in option.stages]
    mark = "best" if option == best else "yes" if option.fits(request) else "no"
    return [
        option.family,
        option.method,
        f"{option.iteration_ms:,.0f}",
        f"{100 * option.mfu(request):.1f}",
        f"{option.tokens_per_s(request):,.0f}",
        f"{100 * option.idle:.1f}",
        f"{min(totals):.1f}–{max(totals):.1f}",
        mark,
    ]


def _memory_table(option: Option) -> Table:
    table = _table("rank")
    for rank in range(len(option.stages)):
        table.add_column(str(rank), justify="right", no_wrap=True)
    for name, words in PARTS.items():
        values = [getattr(stage, name) / GIB for stage in option.stages]
        if max(values) >= 0.05:
            table.add_row(words, *(f"{value:.1f}" for value in values))
    table.add_row("sum", *(f"{stage.total / GIB:.1f}" for stage in option.stages), style="bold")
    return table


def advice_json(advice: Advice) -> str:
    """Everything, as one JSON object; memory in GiB."""
    request = advice.request
    return json.dumps(
        {
            "model": asdict(request.model),
            "job": asdict(request.job),
            "hardware": asdict(request.hardware),
            "limit_gib": request.limit_gib,
            "options": [_option_json(option, request) for option in advice.options],
            "recommended": advice.best and {"method": advice.best.method, "family": advice.best.family},
            "why": advice.reasons,
            "launch": advice.launch,
            "would_fit": advice.remedies,
        },
        indent=1,
    )


def _option_json(option: Option, request: Request) -> dict[str, Any]:
    head = {"method": option.method, "family": option.family, "layers_per_stage": option.layers}
    if option.problem:
        return {**head, "problem": option.problem}
    return {
        **head,
        "iteration_ms": option.iteration_ms,
        "mfu": option.mfu(request),
        "tokens_per_s": option.tokens_per_s(request),
        "idle": option.idle,
        "fits": option.fits(request),
        "peak_gib": option.peak_gib,
        "stages_gib": [_gib(vars(stage)) for stage in option.stages],
    }


def _gib(parts: dict[str, float]) -> dict[str, float]:
    return {name: round(value / GIB, 4) for name, value in parts.items()}
