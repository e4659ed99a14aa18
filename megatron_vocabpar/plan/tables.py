"""Prints a plan on the terminal, and writes it as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_vocabpar.plan.advice import flags_of, reasons, redistribution, remedies
from megatron_vocabpar.plan.choice import STOCK, Choice, Request, costs_of
from megatron_vocabpar.plan.choices import all_choices, best_of
from megatron_vocabpar.plan.job import Job, refused
from megatron_vocabpar.plan.memory import GIB
from megatron_vocabpar.plan.model import Model
from megatron_vocabpar.plan.stock_choices import stock_choices
from megatron_vocabpar.plan.verdict import verdict
from megatron_vocabpar.schedule.times.costs import PassCosts
from megatron_vocabpar.text_tables import text_table

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
"""Names of the parts of a stage's memory, by the field of ``StageMemory``."""
_HEADS = {
    "gradients": "grad.",
    "optimizer": "optim.",
    "activations": "activat.",
    "output": "S to T",
    "inputs": "inputs",
    "workspaces": "work",
    "outside": "CUDA",
}


@dataclass(frozen=True)
class Advice:
    """A request and its answer; if nothing fits, ``best`` is None and ``remedies`` has lines.

    ``notes`` are the arguments and properties of the model that the answer leaves out.
    """

    request: Request
    choices: tuple[Choice, ...]
    best: Choice | None
    flags: tuple[str, ...]
    reasons: tuple[str, ...]
    remedies: tuple[str, ...]
    notes: tuple[str, ...] = ()


def advise(request: Request, notes: Sequence[str] = (), *, workers: int = 1) -> Advice:
    """Try every choice, in ``workers`` processes; the best of them, or what would make one fit.

    Raises:
        ValueError: if Megatron would refuse the model with these sizes; the message has a remedy.
    """
    for problem in refused(request.model, request.job):
        raise ValueError(problem)
    choices = (*all_choices(request, workers=workers), *stock_choices(request))
    best, all_notes = best_of(choices), (*notes, *model_notes(request.model))
    if best is None:
        why, changes = redistribution(choices), remedies(request)
        return Advice(request, choices, None, (), tuple(why), tuple(changes), all_notes)
    judged = verdict([one for one in choices if one.exact and one.fits])
    why = [*reasons(choices, best), *([str(judged)] if judged else [])]
    return Advice(request, choices, best, tuple(flags_of(best)), tuple(why), (), all_notes)


def model_notes(model: Model) -> list[str]:
    """What has to be known of the model's flags, in sentences."""
    if not model.softcap:
        return []
    return [
        f"Its softcap of logits, {model.softcap:g}, is a flag of methods that partition the vocabulary alone."
    ]


def folded(flags: Sequence[str], width: int = 96) -> str:
    """Flags as lines to copy into a launch script."""
    lines = [""]
    for flag in flags:
        if lines[-1] and len(lines[-1]) + len(flag) > width:
            lines.append("   ")
        lines[-1] += f" {flag}" if lines[-1] else flag
    return " \\\n".join(lines)


def summary(request: Request) -> list[str]:
    """Two lines: the model, then the job, its GPUs and the source of its times."""
    model, job, gpu = request.model, request.job, request.hardware
    shape = f"V {model.vocab:,}, H {model.hidden:,}, L {model.layers}, s {model.seq_length:,}"
    times = "measured costs" if request.measured else "estimated from its data sheet"
    return [
        f"{model.name}: {model.parameters / 1e9:.1f} B parameters, {shape}",
        f"{sizes_of(job)}: {job.gpus} {gpu.name}, {request.limit_gib:.1f} GiB each; {job.m} microbatches of "
        f"{job.micro_batch}; times {times}",
    ]


def sizes_of(job: Job) -> str:
    """A job's sizes and its unusual settings: ``p 8, t 1, d 1, recompute full``."""
    sizes = [f"p {job.p}", f"t {job.t}", f"d {job.d}"]
    sizes += [f"c {job.c}"] if job.c > 1 else []
    sizes += [f"e {job.e}"] if job.e > 1 else []
    sizes += [f"recompute {job.recompute}"] if job.recompute != "none" else []
    sizes += ["distributed optimizer"] if job.distributed_optimizer else []
    sizes += ["optimizer on the host"] if job.offload else []
    return ", ".join(sizes + (["fp8"] if job.fp8 else []))


def print_advice(advice: Advice, console: Console) -> None:
    """Print the table, the memory of each rank, the reasons and the flags."""
    request, best = advice.request, advice.best
    for line in summary(request):
        console.print(Text(line))
    console.print(_choices_table(advice))
    for choice in advice.choices:
        if choice.problem:
            console.print(Text(f"{choice.name}: {choice.problem}"))
    for choice in dict.fromkeys(filter(None, (best, advice.choices[0]))):
        if not choice.problem:
            console.print(Text(f"{choice.name}: GiB of each rank at its peak"))
            console.print(_memory_table(choice))
    if best is None:
        console.print(Text("Nothing fits. What would:"))
        for line in advice.remedies or ("nothing that was tried; use more GPUs or a smaller model",):
            console.print(Text(f"- {line}"))
        for line in (*advice.reasons, *advice.notes):
            console.print(Text(f"- {line}"))
        return
    console.print(Text(f"Recommended: {best.name}"))
    for line in (*advice.reasons, *advice.notes):
        console.print(Text(f"- {line}"))
    console.print()
    print(folded(advice.flags))  # as it is, for copying


def _choices_table(advice: Advice) -> Table:
    headings = ("family", "method", "ms", "MFU %", "tokens/s", "idle %", "GiB a rank", "fits")
    rows = [_cells(choice, advice.best) for choice in advice.choices if not choice.problem]
    return text_table([headings, *rows], ("family", "method", "fits"))


def _cells(choice: Choice, best: Choice | None) -> list[str]:
    totals = [stage.total / GIB for stage in choice.stages]
    mark = "best" if choice == best else "yes" if choice.fits else "no"
    return [
        choice.family,
        choice.method,
        f"{choice.iteration_ms:,.0f}",
        f"{100 * choice.mfu:.1f}",
        f"{choice.tokens_per_s:,.0f}",
        f"{100 * choice.idle:.1f}",
        f"{min(totals):.1f}–{max(totals):.1f}",
        mark,
    ]


def _memory_table(choice: Choice) -> Table:
    """A row for each rank, so that any number of them can be read."""
    used = [name for name in PARTS if any(getattr(stage, name) / GIB >= 0.05 for stage in choice.stages)]
    rows = [["rank", *(_HEADS.get(name, name) for name in used), "sum"]]
    for rank, stage in enumerate(choice.stages):
        values = (*(getattr(stage, name) for name in used), stage.total)
        rows.append([str(rank), *(f"{value / GIB:.1f}" for value in values)])
    return text_table(rows, ())


def advice_json(advice: Advice) -> str:
    """The whole answer as one JSON object; memory in GiB."""
    request = advice.request
    return json.dumps(
        {
            "model": asdict(request.model),
            "job": asdict(request.job),
            "hardware": asdict(request.hardware),
            "limit_gib": request.limit_gib,
            "choices": [_choice_json(choice) for choice in advice.choices],
            "recommended": advice.best and {"method": advice.best.method, "family": advice.best.family},
            "costs": advice.best and passes_of(advice.best).to_dict(),
            "why": advice.reasons,
            "flags": advice.flags,
            "would_fit": advice.remedies,
            "notes": advice.notes,
        },
        indent=1,
    )


def passes_of(choice: Choice) -> PassCosts:
    """The times of the choice's passes, as ``vocabpar schedule --costs`` reads them."""
    request = choice.request
    factor = request.factors(choice.use)[0]
    if choice.method == STOCK:
        return request.costs(factor)
    return costs_of(request, choice.layers, factor)


def _choice_json(choice: Choice) -> dict[str, Any]:
    head = {"method": choice.method, "family": choice.family, "layers_per_stage": choice.layers}
    if choice.problem:
        return {**head, "problem": choice.problem}
    return {
        **head,
        "iteration_ms": choice.iteration_ms,
        "mfu": choice.mfu,
        "tokens_per_s": choice.tokens_per_s,
        "idle": choice.idle,
        "fits": choice.fits,
        "peak_gib": choice.peak_gib,
        "stages_gib": [_gib(vars(stage)) for stage in choice.stages],
    }


def _gib(parts: dict[str, float]) -> dict[str, float]:
    return {name: round(value / GIB, 4) for name, value in parts.items()}
