"""The answer of ``vocabpar plan``: which choice, for a job that is given or for GPUs, printed or as JSON.

``lab/published_runs.py`` has the errors of such numbers against published runs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_vocabpar.plan.advice import (
    Verdict,
    binds,
    channels,
    headline,
    megatrons_best,
    model_notes,
    nothing_fits,
    reasons,
    recomputation,
    redistribution,
    remedies,
    shares,
    shown,
    sizes_of,
    stock_best,
    summary,
    verdict,
)
from megatron_vocabpar.plan.choice import Choice, Request, costs_of_choice
from megatron_vocabpar.plan.choice_flags import flags_of
from megatron_vocabpar.plan.choices import all_choices, best_of
from megatron_vocabpar.plan.configurations import MOST
from megatron_vocabpar.plan.job import refused
from megatron_vocabpar.plan.layer_counts import StockLayout
from megatron_vocabpar.plan.plays import play_stock, stock_choice, stock_choices
from megatron_vocabpar.plan.stage_memory import GIB
from megatron_vocabpar.plan.variants import Question
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
_OF_A_JOB = ("family", "method", "ms", "MFU %", "tokens/s", "idle %", "GiB a rank", "fits")
_BINDS, _WIDE = "what binds it", 110  # columns of a terminal where each row says so
_OF_GPUS = (*("t", "p", "d", "c", "e", "b", "m", "schedule", "memory", "ms", "MFU %", "GiB"), _BINDS)
LEGEND = (
    "t, p, d, c, e: tensor, pipeline, data, context and expert parallel size; b: sequences of a microbatch; "
    "m: microbatches"
)
"""What the columns of a search's table are."""
ESTIMATED = "~: estimated from a few microbatches, not simulated whole"
"""What the sign before some times says."""
_WORDS = ("family", "method", "fits", "schedule", "memory", _BINDS)  # columns that are no numbers


@dataclass(frozen=True)
class PlanAnswer:
    """What was asked, and what is recommended.

    Attributes:
        heading: the question, in lines.
        asked: the question, for JSON.
        choices: the rows of the table.
        best: the recommended one; None if nothing fits.
        of_gpus: rows differ in how the model is spread, and not only in the schedule of one job.
        verdict: whose fastest choice that fits is faster; None unless there are ours and Megatron's.
        reasons, remedies, notes: sentences; remedies are what would fit where nothing does, and notes are the
            arguments and properties of the model that the answer leaves out.
    """

    heading: Sequence[str]
    asked: dict[str, Any]
    choices: Sequence[Choice]
    best: Choice | None
    of_gpus: bool = False
    verdict: Verdict | None = None
    reasons: Sequence[str] = ()
    remedies: Sequence[str] = ()
    notes: Sequence[str] = field(default=())


def answer_for_job(
    request: Request, notes: Sequence[str] = (), own: StockLayout | None = None, *, workers: int = 1
) -> PlanAnswer:
    """Try every choice, in ``workers`` processes; the best of them, or what would make one fit.

    ``own`` is the layout that the user has by now, with which Megatron's schedule is a row, too.

    Raises:
        ValueError: if Megatron would refuse the model with these sizes; the message has a remedy.
    """
    for problem in refused(request.model, request.job):
        raise ValueError(problem)
    given = [] if own is None else [play_stock(stock_choice(request, own))]
    choices = (*all_choices(request, workers=workers), *stock_choices(request), *given)
    best = best_of(choices)
    judged = verdict([choice for choice in choices if choice.exact and choice.fits])
    why = reasons(choices, best) if best else redistribution(choices)
    return PlanAnswer(
        summary(request),
        {name: asdict(getattr(request, name)) for name in ("model", "job", "hardware")}
        | {"limit_gib": request.limit_gib},
        choices,
        best,
        verdict=verdict([choice for choice in choices if choice.fits]),
        reasons=[*why, *([str(judged)] if best and judged else [])],
        remedies=() if best else remedies(request),
        notes=[*notes, *model_notes(request.model)],
    )


def answer_for_gpus(question: Question, choices: Sequence[Choice], notes: Sequence[str] = ()) -> PlanAnswer:
    """The best configurations and Megatron's best, with the reasons for the first."""
    judged, rows = verdict(choices), shown(choices)
    lines = [megatrons_best(choices), str(judged or ""), *(channels(choices[0]) if choices else ())]
    return PlanAnswer(
        [headline(question)],
        {name: asdict(getattr(question, name)) for name in ("model", "hardware")}
        | {"gpus": question.gpus, "global_batch_size": question.batch, "limit_gib": question.limit_gib}
        | {"fixed": dict(question.fixed)},
        rows,
        choices[0] if choices else None,
        of_gpus=True,
        verdict=verdict([choice for choice in rows if choice.fits]),
        reasons=[
            *filter(None, lines),
            f"Times are estimates; --sources says where each number is from; {MOST} configurations at most",
        ],
        remedies=() if choices else [nothing_fits(question)],
        notes=[*notes, *model_notes(question.model)],
    )


def print_answer(answer: PlanAnswer, console: Console) -> None:
    """Print the table, for one job the memory of each rank, the reasons and the flags."""
    best, wide = answer.best, console.width >= _WIDE
    lines = list(answer.heading)
    if answer.of_gpus and best is None:
        lines += answer.remedies
    for line in lines:
        console.print(Text(line))
    if answer.of_gpus and best is None:
        return
    console.print(_table(answer, wide))
    legend = [LEGEND] if answer.of_gpus else []
    legend += [ESTIMATED] if not all(choice.exact or choice.problem for choice in answer.choices) else []
    if legend:
        console.print(Text("; ".join(legend)))
    if not answer.of_gpus:
        for choice in answer.choices:
            if choice.problem:
                console.print(Text(f"{choice.name}: {choice.problem}"))
        for choice in dict.fromkeys(filter(None, (best, answer.choices[0]))):
            if not choice.problem:
                console.print(Text(f"{choice.name}: GiB of each rank at its peak"))
                console.print(_memory_table(choice))
    sizes = f" with {sizes_of(best.request.job)}" if best and answer.of_gpus else ""
    console.print(Text(f"Recommended: {best.name}{sizes}" if best else "Nothing fits. What would:"))
    why = [f"{_BINDS.capitalize()}: {binds(best)}"] if best and answer.of_gpus and not wide else []
    if best is None:
        why += answer.remedies or ("nothing that was tried; use more GPUs or a smaller model",)
    for line in (*why, *answer.reasons, *answer.notes):
        console.print(Text(f"- {line}"))
    if best is None:
        return
    own = "" if best.stock else "; start your script with -m megatron_vocabpar.launch"
    console.print(Text(f"\nFlags, beside those of the model{own}:"))
    print(folded(flags_of(best)))  # as they are, for copying
    stock = stock_best(answer.choices) if answer.of_gpus else None
    if stock is not None and stock is not best:
        console.print(Text("\nMegatron by itself:"))
        print(folded(flags_of(stock)))


def folded(flags: Sequence[str], width: int = 96) -> str:
    """Flags as lines to copy into a launch script."""
    lines = [""]
    for flag in flags:
        if lines[-1] and len(lines[-1]) + len(flag) > width:
            lines.append("   ")
        lines[-1] += f" {flag}" if lines[-1] else flag
    return " \\\n".join(lines)


def _table(answer: PlanAnswer, wide: bool) -> Table:
    possible = [choice for choice in answer.choices if not choice.problem]
    if not answer.of_gpus:
        return text_table([_OF_A_JOB, *(_cells_of_job(choice, answer.best) for choice in possible)], _WORDS)
    rows = [_OF_GPUS, *map(cells, possible)]
    return text_table([row if wide else row[:-1] for row in rows], _WORDS)


def _cells_of_job(choice: Choice, best: Choice | None) -> list[str]:
    totals = [stage.total / GIB for stage in choice.stages]
    return [
        choice.family,
        choice.method,
        f"{'' if choice.exact else '~'}{choice.iteration_ms:,.0f}",
        f"{100 * choice.mfu:.1f}",
        f"{choice.tokens_per_s:,.0f}",
        f"{100 * choice.idle:.1f}",
        f"{min(totals):.1f}–{max(totals):.1f}",
        "best" if choice == best else "yes" if choice.fits else "no",
    ]


def cells(choice: Choice) -> list[str]:
    """A row of the table: seven sizes, the schedule, what saves memory, ms, MFU, GiB, what binds it."""
    job = choice.request.job
    saved = [recomputation(job)] if job.recompute != "none" else []
    saved += ["16-bit moments"] if job.precision_aware else []
    saved += [f"{job.offload:.0%} host step"] if job.offload else []
    return [
        *map(str, (job.t, job.p, job.d, job.c, job.e, job.micro_batch, job.m)),
        choice.name,
        ", ".join(saved) or "-",
        f"{'' if choice.exact else '~'}{choice.iteration_ms:,.0f}",
        f"{100 * choice.mfu:.1f}",
        f"{choice.peak_gib:.0f}",
        binds(choice),
    ]


def _memory_table(choice: Choice) -> Table:
    """A row for each rank, so that any number of them can be read."""
    used = [name for name in PARTS if any(getattr(stage, name) / GIB >= 0.05 for stage in choice.stages)]
    rows = [["rank", *(_HEADS.get(name, name) for name in used), "sum"]]
    for rank, stage in enumerate(choice.stages):
        values = (*(getattr(stage, name) for name in used), stage.total)
        rows.append([str(rank), *(f"{value / GIB:.1f}" for value in values)])
    return text_table(rows, ())


def answer_json(answer: PlanAnswer) -> str:
    """The whole answer as one JSON object; memory in GiB."""
    best = answer.best
    judged = answer.verdict
    return json.dumps(
        {
            **answer.asked,
            "verdict": {"is": judged.word, "gain": judged.gain, "error": judged.error} if judged else None,
            "choices": [choice_json(choice) for choice in answer.choices],
            "recommended": best and {"method": best.method, "family": best.family},
            "costs": best and costs_of_choice(best).to_dict(),
            "why": answer.reasons,
            "flags": flags_of(best) if best else [],
            "would_fit": answer.remedies,
            "notes": answer.notes,
        },
        indent=1,
    )


def choice_json(choice: Choice) -> dict[str, Any]:
    """A choice for JSON; times in ms, memory in GiB."""
    head = {"method": choice.method, "family": choice.family, "layers_per_stage": choice.layers}
    if choice.problem:
        return {**head, "problem": choice.problem}
    return {
        **head,
        "job": asdict(choice.request.job),
        "stock": choice.stock,
        "iteration_ms": choice.iteration_ms,
        "exact": choice.exact,
        "mfu": choice.mfu,
        "tokens_per_s": choice.tokens_per_s,
        "idle": choice.idle,
        "fits": choice.fits,
        "peak_gib": choice.peak_gib,
        "stages_gib": [_gib(vars(stage)) for stage in choice.stages],
        "shares": shares(choice),
        "binds": binds(choice),
        "flags": flags_of(choice),
    }


def _gib(parts: dict[str, float]) -> dict[str, float]:
    return {name: round(value / GIB, 4) for name, value in parts.items()}
