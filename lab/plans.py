"""The table of searches in ``plan_table.md``: ``python -m lab page plans`` prints it.

Each row is what ``vocabpar plan --preset MODEL --hardware GPU --gpus N`` recommends. The seconds of one
processor that a search took go to stderr.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from statistics import mean

from lab.published_runs import errors, published_runs
from megatron_vocabpar.plan.hardware import hardware_named
from megatron_vocabpar.plan.read_config import model_preset
from megatron_vocabpar.plan.search import Question, search, usual_batch
from megatron_vocabpar.plan.search_tables import binds, verdict_of
from megatron_vocabpar.plan.tables import sizes_of

MODELS = {
    "llama-3.2-3b": "H100", "llama-3.1-8b": "H100", "gemma-2-9b": "H100", "nemotron-4-15b": "H100",
    "gemma-3-27b": "H100", "qwen3-32b": "H100", "qwen3-30b-a3b": "H100", "llama-3.1-70b": "H100",
    "qwen2.5-72b": "H100", "gpt-oss-120b": "H100", "llama-3.1-405b": "H100", "qwen3-235b-a22b": "GB300",
    "glm-4.5": "GB300", "deepseek-v3": "GB300", "kimi-k2": "GB300",
}  # fmt: skip
GPUS = (8, 64, 512)


def rows(models: list[str]) -> Iterator[str]:
    """The table, a row for each model and number of GPUs."""
    yield "| model | GPUs | recommended | s | MFU % | GiB | what binds it | ours / stock | decided | error |"
    yield "| --- | --- | --- | ---: | ---: | ---: | --- | ---: | --- | ---: |"
    for name in models:
        for gpus in GPUS:
            started = time.process_time()
            yield f"| {name} | {gpus} {MODELS[name]} | {row(name, gpus)} | {error(name)} |"
            print(f"{name} on {gpus}: {time.process_time() - started:.1f} s", file=sys.stderr, flush=True)


def row(name: str, gpus: int) -> str:
    """The cells of a search's recommendation."""
    model, gpu = model_preset(name), hardware_named(MODELS[name])
    question = Question(model, gpu, gpus, usual_batch(model, gpus), gpu.memory_gib)
    found = search(question)
    if not found:
        return "nothing fits | – | – | – | – | – | –"
    best, judged = found[0], verdict_of(found)
    gains = " / ".join(f"{gain:.2f}" for gain in judged.gains) if judged else "–"
    decided = "no" if judged and judged.reason else "yes"
    numbers = f"{100 * best.choice.mfu(best.request):.1f} | {best.choice.peak_gib:.0f}"
    return (
        f"{best.choice.name}: {sizes_of(best.request.job)} | {best.choice.iteration_ms / 1e3:,.2f} | "
        f"{numbers} | {binds(best)} | {gains} | {decided}"
    )


def error(name: str) -> str:
    """The planner's mean error beside the published runs of this model on this GPU."""
    runs = [run for run in published_runs() if (run.model, run.hardware) == (name, MODELS[name])]
    return f"{100 * mean(abs(one) for _, one in errors(runs)):.0f} % of {len(runs)}" if runs else "–"


def in_short(table: list[str]) -> Iterator[str]:
    """The table of ``docs/when.md``, from all rows of this one: a row for each model."""
    yield "| model, GPU | on 8 | on 64 | on 512 | error |"
    yield "| --- | --- | --- | --- | --- |"
    cells = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in table[2:]]
    for first in range(0, len(cells), len(GPUS)):
        of_model = cells[first : first + len(GPUS)]
        name, gpu = of_model[0][0], of_model[0][1].split()[1]
        found = " | ".join(_in_short(each[2], each[7], each[8]) for each in of_model)
        yield f"| {name}, {gpu} | {found} | {of_model[0][9]} |"


def _in_short(recommended: str, gains: str, decided: str) -> str:
    choice, _, sizes = recommended.partition(": ")
    if not sizes:
        return "–"
    pipeline = sizes.split(",")[0]
    if decided == "no":
        return f"undecided: {gains}"
    if choice.startswith("stock"):
        return "stock, no pipeline" if pipeline == "p 1" else f"stock, {pipeline}"
    return f"**{choice}**, {pipeline}: {gains}"
