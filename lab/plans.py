"""The table of searches in ``plan_table.md``: ``python -m lab page plans`` prints it.

Each row is what ``vocabpar plan --preset MODEL --hardware GPU --gpus N`` recommends. The seconds of one
processor that a search took go to stderr. ``python -m lab page when`` prints the tables of ``docs/when.md``,
which say in short what this table says.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import mean

from lab.published_runs import errors, published_runs
from megatron_vocabpar.plan.advice import binds, sizes_of, stock_best, verdict
from megatron_vocabpar.plan.configurations import best_configurations, usual_batch
from megatron_vocabpar.plan.hardware import hardware_named
from megatron_vocabpar.plan.read_config import model_preset
from megatron_vocabpar.plan.variants import Question
from megatron_vocabpar.schedule.words.methods import METHODS

MODELS = {
    "llama-3.2-3b": "H100", "llama-3.1-8b": "H100", "gemma-2-9b": "H100", "nemotron-4-15b": "H100",
    "gemma-3-27b": "H100", "qwen3-32b": "H100", "qwen3-30b-a3b": "H100", "llama-3.1-70b": "H100",
    "qwen2.5-72b": "H100", "gpt-oss-120b": "H100", "llama-3.1-405b": "H100", "qwen3-235b-a22b": "GB300",
    "glm-4.5": "GB300", "deepseek-v3": "GB300", "kimi-k2": "GB300",
}  # fmt: skip
GPUS = (8, 64, 512)
FURTHER = (
    ("llama-3.1-8b", 8, "L40S"),
    ("gemma-2-9b", 8, "L40S"),
    ("nemotron-4-15b", 8, "L40S"),
    ("gemma-2-9b", 8, "A100-PCIE-40GB"),
    ("llama-3.1-8b", 8, "RTX-4090"),
    ("gemma-3-27b", 8, "RTX-4090"),
    ("gemma-3-27b", 8, "RTX-PRO-6000"),
    ("qwen3-32b", 16, "H100"),
)
Case = tuple[str, int, str]
"""A model on so many GPUs of a name."""

CASES: tuple[Case, ...] = (
    *((model, gpus, gpu) for model, gpu in MODELS.items() for gpus in GPUS),
    *FURTHER,
)
NOTHING = "nothing fits"
_TABLE = Path(__file__).with_name("plan_table.md")


HEADING = (
    "| model | GPUs | recommended | s | MFU % | GiB | what binds it | Megatron's best | ours / Megatron's | "
    "verdict | error |"
)


def rows(cases: Iterable[Case]) -> Iterator[str]:
    """The table, a row for each case."""
    yield HEADING
    yield "| --- | --- | --- | ---: | ---: | ---: | --- | --- | ---: | --- | ---: |"
    for case in cases:
        name, gpus, gpu = case
        started = time.process_time()
        yield f"| {name} | {gpus} {gpu} | {row(case)} |"
        print(f"{name} on {gpus}: {time.process_time() - started:.1f} s", file=sys.stderr, flush=True)


def row(case: Case) -> str:
    """The cells of a search's recommendation, its best opponent, the verdict and the error for its model."""
    name, gpus, hardware = case
    model, gpu = model_preset(name), hardware_named(hardware)
    question = Question(model, gpu, gpus, usual_batch(model, gpus), gpu.memory_gib)
    found = best_configurations(question)
    if not found:
        return f"{NOTHING} | – | – | – | – | – | – | – | –"
    best, stock, judged = found[0], stock_best(found), verdict(found)
    opponent = f"{stock.family}: {sizes_of(stock.request.job)}" if stock else "–"
    gain = f"{judged.gain:.2f} ± {judged.error:.2f}" if judged else "–"
    return (
        f"{best.name}: {sizes_of(best.request.job)} | {best.iteration_ms / 1e3:,.2f} | "
        f"{100 * best.mfu:.1f} | {best.peak_gib:.0f} | {binds(best)} | {opponent} | {gain} | "
        f"{judged.word if judged else '–'} | {error(case, judged.gain if judged else 1.0)}"
    )


def error(case: Case, gain: float) -> str:
    """The planner's mean error beside the published runs of this model on this GPU.

    If it is larger than the gain, this says so.
    """
    name, _, gpu = case
    runs = [run for run in published_runs() if (run.model, run.hardware) == (name, gpu)]
    sizes = [abs(error) for _, error in errors(runs)]
    if not sizes:
        return "–"
    beyond = ", more than the gain" if mean(sizes) > abs(gain - 1.0) else ""
    return f"{100 * mean(sizes):.0f} % of {len(sizes)}{beyond}"


def in_short() -> Iterator[str]:
    """The tables of ``docs/when.md``: what is decided, a row for each model, and the further cases."""
    lines = [line for line in _TABLE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines[2:]]
    yield from _verdicts(cells)
    yield ""
    yield "| model, GPU | on 8 | on 64 | on 512 | error |"
    yield "| --- | --- | --- | --- | --- |"
    for first in range(0, len(MODELS) * len(GPUS), len(GPUS)):
        of_model = cells[first : first + len(GPUS)]
        name, gpu = of_model[0][0], of_model[0][1].split()[1]
        found = " | ".join(map(_in_short, of_model))
        error_of_runs = next((each[10] for each in of_model if each[10] != "–"), "–")
        yield f"| {name}, {gpu} | {found} | {error_of_runs.partition(',')[0]} |"
    yield ""
    yield "| model | GPUs | ours / Megatron's best | error |"
    yield "| --- | --- | --- | --- |"
    for each in cells[-len(FURTHER) :]:
        yield f"| {each[0]} | {each[1]} | {_in_short(each)} | {each[10]} |"


def _verdicts(cells: list[list[str]]) -> Iterator[str]:
    """How many cases have which verdict, and a table of those with one, each with the planner's error."""
    fit = [each for each in cells if each[2] != NOTHING]
    decided = [each for each in fit if each[9] in ("ours", "stock's")]
    ours = Counter(_vocabulary(each[2]) for each in decided if each[9] == "ours")
    yield (
        f"**Of {len(fit)} cases in which something fits ours is faster in {sum(ours.values())}**: "
        f"{ours['partitioned']} with a partitioned vocabulary, {ours['whole']} with our schedules around "
        f"whole vocabulary layers (`baseline`). Megatron's own is faster in "
        f"{len(decided) - sum(ours.values())}, and {len(fit) - len(decided)} are within the error."
    )
    yield ""
    yield "| model | GPUs | faster | vocabulary layers | Megatron's best | ours / Megatron's best | error |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for each in decided:
        name, gpus, recommended, opponent, gain, error_of_runs = (each[k] for k in (0, 1, 2, 7, 8, 10))
        faster, stock = map(_with_pipeline, (recommended, opponent))
        vocabulary = _vocabulary(recommended)
        yield f"| {name} | {gpus} | {faster} | {vocabulary} | {stock} | {gain} | {error_of_runs} |"


def _vocabulary(recommended: str) -> str:
    method = recommended.partition(" ")[0]
    if method == "stock":
        return "stock"
    return "partitioned" if METHODS[method].vocabulary_parallel else "whole"


def _with_pipeline(choice: str) -> str:
    """A schedule and its pipeline size: the first of the sizes."""
    name, _, sizes = choice.partition(": ")
    return f"{name}, {sizes.split(',')[0]}"


def _in_short(cells: list[str]) -> str:
    recommended, opponent, gain, word = (cells[k] for k in (2, 7, 8, 9))
    if recommended == NOTHING:
        return NOTHING
    beside = f"{gain} of {_with_pipeline(opponent)}"
    return beside if word == "within the error" else f"**{beside}**"
