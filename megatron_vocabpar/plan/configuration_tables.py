"""Prints the best parallel configurations: a table that says what limits each, and JSON.

``lab/published_runs.py`` has the errors of such numbers against published runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_vocabpar.plan.advice import channels, flags_of
from megatron_vocabpar.plan.choice import Choice
from megatron_vocabpar.plan.configurations import BEST, MOST, Question
from megatron_vocabpar.plan.hardware import Hardware
from megatron_vocabpar.plan.tables import folded, model_notes, sizes_of
from megatron_vocabpar.plan.times import layer_ms
from megatron_vocabpar.plan.verdict import Verdict, verdict
from megatron_vocabpar.text_tables import text_table

_BINDS, _WIDE = "what binds it", 110  # columns of a terminal where each row says so
_SAYS = 0.02  # parts of the time that are at least this share of it are named


def shares(choice: Choice) -> dict[str, float]:
    """The losses of time in an iteration of the mean rank, as shares of it."""
    request = choice.request
    model, job = request.model, request.job
    layer = layer_ms(model, job, request.hardware)
    of_all = job.m * model.layers / job.p / choice.iteration_ms
    return {
        "idle ranks": choice.idle,
        "tensor parallelism": 2 * layer.tensor * of_all,
        "context parallelism": 3 * layer.context * of_all,
        "the exchange of experts": (2 * layer.exchange - (layer.hidden if choice.pairs else 0.0)) * of_all,
        "recomputation": layer.repeated * of_all,
        "gradients and the step": choice.after_ms / choice.iteration_ms,
    }


def binds(choice: Choice) -> str:
    """In words, the largest losses of time, and the memory that faster settings would need."""
    parts = sorted(shares(choice).items(), key=lambda one: -one[1])
    causes = [f"{name} {100 * share:.0f} %" for name, share in parts[:2] if share >= _SAYS]
    if choice.needed_gib:
        causes.append(f"memory: more than {choice.request.limit_gib:.0f} GiB without what is saved")
    return ", ".join(causes) or "operations"


def stock_best(found: Sequence[Choice]) -> Choice | None:
    """The fastest that Megatron can run without this package."""
    return next((choice for choice in found if choice.stock), None)


def shown(found: Sequence[Choice]) -> list[Choice]:
    """The best entries, and Megatron's best behind them if it is not among them."""
    best, stock = list(found[:BEST]), stock_best(found)
    return best if stock is None or stock in best else [*best, stock]


def sources(hardware: Hardware) -> Iterator[str]:
    """A line for every number about the GPU, with its source."""
    for name, source in hardware.sources.items():
        yield f"{name} {getattr(hardware, name):,g}: {source}"
    for name, source in hardware.rates.sources.items():
        yield f"share {name} {getattr(hardware.rates, name):g}: {source}"


def print_configurations(
    question: Question, found: Sequence[Choice], notes: Sequence[str], console: Console
) -> None:
    """The table, the flags of the best, and of Megatron's best."""
    console.print(Text(headline(question)))
    if not found:
        console.print(Text(nothing_fits(question)))
        return
    wide = console.width >= _WIDE
    console.print(_table(shown(found), wide))
    best, stock = found[0], stock_best(found)
    console.print(Text(f"Recommended: {best.name} with {sizes_of(best.request.job)}"))
    if not wide:
        console.print(Text(f"- {_BINDS.capitalize()}: {binds(best)}"))
    if gain(found):
        console.print(Text(f"- {gain(found)}"))
    if judged := verdict_of(found):
        console.print(Text(f"- {judged}"))
    for line in channels(best):
        console.print(Text(f"- {line}"))
    console.print(
        Text(
            f"- Times are estimates; --sources says where each number is from; {MOST} configurations at most"
        )
    )
    for line in (*notes, *model_notes(question.model)):
        console.print(Text(f"- {line}"))
    console.print()
    print(folded(flags_of(best)))  # as it is, for copying
    if stock is not None and stock is not best:
        console.print(Text("\nMegatron by itself:"))
        print(folded(flags_of(stock)))


def headline(question: Question) -> str:
    """The question in a line."""
    model, gpu = question.model, question.hardware
    return (
        f"{model.name}: {model.parameters / 1e9:.1f} B parameters on {question.gpus} {gpu.name}, "
        f"{question.limit_gib:.1f} GiB each; {question.batch} sequences of {model.seq_length:,} tokens"
    )


def gain(found: Sequence[Choice]) -> str:
    """How much faster the best is than the best of Megatron by itself; empty if it is that, or none fits."""
    stock = stock_best(found)
    if stock is None or stock is found[0]:
        return ""
    times = stock.iteration_ms / found[0].iteration_ms
    return (
        f"{times:.2f} times as fast as the best that Megatron does by itself: {stock.name} "
        f"with {sizes_of(stock.request.job)}"
    )


def verdict_of(found: Sequence[Choice]) -> Verdict | None:
    """Ours beside Megatron's own, by both readings of what collectives take."""
    return verdict(found)


def nothing_fits(question: Question) -> str:
    """The advice if no configuration fits."""
    least = question.model.parameters * 6 * 1.12 / question.gpus / 2**30
    fixed = (
        f" with {', '.join(f'{name} {value}' for name, value in question.fixed.items())}"
        if question.fixed
        else ""
    )
    return (
        f"Nothing fits{fixed}. Weights and gradients alone take {least:.0f} GiB a GPU where they are divided "
        "over all of them; use more GPUs (--gpus), larger ones (--hardware), shorter sequences (--seq-length)"
        + (", or leave sizes open." if question.fixed else ".")
    )


def _table(found: Sequence[Choice], wide: bool) -> Table:
    headings = (*("t", "p", "d", "c", "e", "b", "m", "schedule", "memory", "ms", "MFU %", "GiB"), _BINDS)
    rows = [headings, *map(cells, found)]
    return text_table([row if wide else row[:-1] for row in rows], ("schedule", "memory", _BINDS))


def cells(choice: Choice) -> list[str]:
    """A row of the table: seven sizes, the schedule, what saves memory, ms, MFU, GiB, what binds it."""
    job = choice.request.job
    saved = [job.recompute] if job.recompute != "none" else []
    saved += ["host step"] if job.offload else []
    return [
        *map(str, (job.t, job.p, job.d, job.c, job.e, job.micro_batch, job.m)),
        choice.name,
        ", ".join(saved) or "-",
        f"{choice.iteration_ms:,.0f}",
        f"{100 * choice.mfu:.1f}",
        f"{choice.peak_gib:.0f}",
        binds(choice),
    ]


def configurations_json(question: Question, found: Sequence[Choice], notes: Sequence[str]) -> str:
    """Everything that was found, as one JSON object."""
    return json.dumps(
        {
            "model": asdict(question.model),
            "gpus": question.gpus,
            "global_batch_size": question.batch,
            "limit_gib": question.limit_gib,
            "fixed": dict(question.fixed),
            "hardware": asdict(question.hardware),
            "verdict": verdict_json(verdict_of(found)),
            "found": [_found_json(one) for one in shown(found)],
            "notes": [*notes, *model_notes(question.model)],
        },
        indent=1,
    )


def verdict_json(judged: Verdict | None) -> dict[str, Any] | None:
    """Ours over Megatron's best, by both readings, and why that decides nothing, if so."""
    return {"gains": judged.gains, "undecided": judged.reason} if judged else None


def _found_json(choice: Choice) -> dict[str, Any]:
    return {
        "job": asdict(choice.request.job),
        "method": choice.method,
        "family": choice.family,
        "stock": choice.stock,
        "layers_per_stage": choice.layers,
        "iteration_ms": choice.iteration_ms,
        "other_ms": choice.other_ms,
        "mfu": choice.mfu,
        "tokens_per_s": choice.tokens_per_s,
        "peak_gib": choice.peak_gib,
        "shares": shares(choice),
        "binds": binds(choice),
        "exact": choice.exact,
        "flags": flags_of(choice),
    }
