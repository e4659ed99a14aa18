"""Compares results with the paper's (``published.py``) and with each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from lab.paper.experiments import Experiment
from lab.paper.published import Cell, cells
from lab.paper.results import Result
from megatron_vocabpar.schedule.make.families import family_named
from megatron_vocabpar.schedule.words.methods import METHODS

SPEED_TOLERANCE = 0.10
"""Relative: versions of Megatron-LM, cuDNN and NCCL differ from the authors'."""
MEMORY_TOLERANCE = 0.15
"""Relative: Megatron-LM keeps gradients of bf16 weights in float32 today, 18 bytes a weight, not 16."""
LOSS_TOLERANCE = {"cpu": 1e-4, "gpu": 2e-2}
"""Relative: the CPU computes in float32, a GPU in bf16, to which stock Megatron rounds its logits."""
_DEVICE = "A100"


@dataclass(frozen=True)
class Check:
    """A claim, whether it holds, and the figures."""

    what: str
    holds: bool
    figures: str


def published(e: Experiment) -> Cell | None:
    """The paper's result for this experiment; None if it has none, or one with other sizes."""
    cell = _cells().get((e.family, e.gpus, e.method, e.vocab_k, e.seq_length))
    if cell is None or (e.tp, e.micro_batch, e.microbatches) != (1, 1, cell.job.m):
        return None
    model = cell.model
    same = (model.layers, model.hidden, model.heads) == (e.layers, e.hidden, e.heads)
    return cell if same else None


@cache
def _cells() -> dict[tuple[str | int, ...], Cell]:
    return {
        (cell.family.name, cell.gpus, cell.method, cell.vocab_k, cell.seq_length): cell
        for table in ("table5", "table6")
        for cell in cells(table)
    }


def checks(results: Sequence[Result]) -> list[Check]:
    """All checks that these results allow."""
    done = [r for r in results if r.outcome == "done"]
    groups: dict[Experiment, list[Result]] = {}
    for result in done:
        groups.setdefault(result.experiment.setting, []).append(result)
    return [
        *(check for result in results for check in _against_the_paper(result)),
        *(check for group in groups.values() for check in (*_losses(group), *_claims(group))),
    ]


def _against_the_paper(result: Result) -> Iterable[Check]:
    cell = published(result.experiment)
    if cell is None or _DEVICE not in result.environment.get("device", "") or result.outcome == "failed":
        return
    name = result.experiment.name
    if cell.tflops is None or result.outcome == "out of memory":
        alike = cell.tflops is None and result.outcome == "out of memory"
        yield Check(f"{name}: fits as in the paper", alike, f"here: {result.outcome}")
        return
    measured = (result.flops_per_gpu or 0.0) / 1e12
    yield _near(f"{name}: TFLOP/s per GPU", measured, cell.tflops, SPEED_TOLERANCE)
    if cell.peak_memory_gb is not None and result.peak_allocated_gib is not None:
        yield _near(
            f"{name}: peak memory, GiB", result.peak_allocated_gib, cell.peak_memory_gb, MEMORY_TOLERANCE
        )


def _near(what: str, measured: float, expected: float, tolerance: float) -> Check:
    error = measured / expected - 1
    figures = f"{measured:.2f}, published {expected:.2f}: {error:+.1%} of at most {tolerance:.0%}"
    return Check(what, abs(error) <= tolerance, figures)


def _losses(group: Sequence[Result]) -> Iterable[Check]:
    """Methods that start from the same weights have equal losses: each is compared with the first."""
    firsts: dict[str, Result] = {}
    for result in group:
        first = firsts.setdefault(_start(result.experiment), result)
        if result is first:
            continue
        tolerance = LOSS_TOLERANCE["cpu" if _on_cpu(first) else "gpu"]
        pairs = list(zip(first.losses, result.losses, strict=False))
        worst = max((abs(a - b) / abs(a) for a, b in pairs), default=float("inf"))
        what = f"{result.experiment.name}: losses equal those of {first.experiment.name}"
        yield Check(what, worst <= tolerance, f"{len(pairs)} losses, {worst:.1e} at most of {tolerance:.0e}")


def _start(e: Experiment) -> str:
    """A word that two experiments share if they start from equal weights.

    Megatron draws weights stage by stage, so they depend on where layers are.
    """
    if family_named(e.family).chunks > 1:
        return "partitioned" if METHODS[e.method].vocabulary_parallel else "whole"
    return "redis" if e.method == "redis" else "stock"


def _claims(group: Sequence[Result]) -> Iterable[Check]:
    """Appendix G.6: at 256k ids, on any GPU, our methods are faster and smaller than baseline and redis."""
    if group[0].experiment.vocab_k < 256 or _on_cpu(group[0]):
        return
    by_method = {result.experiment.method: result for result in group}
    for ours in ("vocab-1", "vocab-2"):
        for theirs in ("baseline", "redis"):
            a, b = by_method.get(ours), by_method.get(theirs)
            if a is None or b is None or a.median_ms is None or b.median_ms is None:
                continue
            smaller = (a.peak_allocated_gib or 0) < (b.peak_allocated_gib or 0)
            figures = (
                f"{a.median_ms:.0f} and {b.median_ms:.0f} ms, "
                f"{a.peak_allocated_gib or 0:.1f} and {b.peak_allocated_gib or 0:.1f} GiB"
            )
            what = f"{a.experiment.name}: faster and smaller than {b.experiment.name}"
            yield Check(what, a.median_ms < b.median_ms and smaller, figures)


def _on_cpu(result: Result) -> bool:
    return result.environment.get("processes") == "cpu"
