"""Gradients reduced while W is split off: when they are complete, before the passes end, and the same bits.

A rank trains twice, with and without the overlap. Of each bucket we keep what a launch finds in it, and where
among the passes it is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_vocabpar.pipeline import compat
from megatron_vocabpar.schedule.make.generate import generate
from megatron_vocabpar.schedule.times.costs import PassCosts
from tests.cases import rest_is_slow
from tests.pipeline import gpt
from tests.pipeline.experts import Experts
from tests.pipeline.gpt import Case, case_of
from tests.support.launches import LAUNCH, hearing
from tests.support.paired_cases import case as paired_case

CASES: dict[str, tuple[str, str, int, int, dict[str, Any]]] = {
    "v-half": ("v-half", "vocab-2", 2, 3, {}),
    "zb-h1, tied, delayed": ("zb-h1", "vocab-1", 2, 3, {"tied": True, "delayed": True}),
    "zb-h1": ("zb-h1", "vocab-2", 2, 4, {}),
    "v-zb, tied": ("v-zb", "vocab-1", 2, 4, {"tied": True}),
    "v-min, delayed": ("v-min", "vocab-2", 2, 4, {"delayed": True}),
    "whole layers": ("v-zb", "baseline", 2, 3, {}),
    "whole layers, tied": ("zb-h1", "baseline", 2, 3, {"tied": True, "delayed": True}),
    "interlaced": ("v-half", "interlaced", 2, 3, {"delayed": True}),
    "one microbatch": ("zb-h1", "vocab-2", 2, 1, {"delayed": True}),
    "fewer microbatches than stages": ("v-half", "vocab-1", 4, 2, {}),
    "frozen": ("v-half", "vocab-2", 2, 3, {"frozen": True}),
    "a further head": ("zb-h1", "vocab-2", 2, 3, {"mtp": 1, "position": "rope"}),
    "context parallel": ("v-half", "vocab-2", 2, 3, {"cp": 2}),
    "tensor parallel": ("v-zb", "vocab-2", 2, 3, {"tp": 2, "tied": True}),
    "tokens counted": ("v-half", "vocab-2", 2, 3, {"loss": "tokens", "calculate_per_token_loss": True}),
    "experts": ("v-half", "vocab-2", 2, 3, {"experts": Experts(), "position": "rope"}),
    "pairs": ("dualpipev", "vocab-2", 2, 6, {}),
}
"""Family, method, stages, microbatches, and options of ``Case``; all on two replicas."""


def _case(name: str) -> Case:
    family, method, p, m, options = CASES[name]
    if family == "dualpipev":
        return paired_case(family, method, p, m)
    costs = PassCosts.default(p, options.get("mtp", 0))
    return case_of(generate(method, p, m, family=family, costs=costs), dp=2, **options)


@dataclass(frozen=True)
class Training:
    """One forward-backward call of a training: its launches, and what they found by name."""

    launches: int
    in_passes: int
    early: int
    found: dict[str, torch.Tensor]


def _heard(rank: int, case: Case) -> tuple[list[Training], gpt.Result]:
    trainings: list[Training] = []
    iterate = gpt.iterate
    with hearing() as heard:

        def iterate_and_keep(run: Any, case: Case, model: list[Any], *rest: Any, **named: Any) -> Any:
            heard.clear()
            result = iterate(run, case, model, *rest, **named)
            if not named["forward_only"]:
                chunks = enumerate(model)
                names = {p: f"{i}.{name}" for i, chunk in chunks for name, p in chunk.named_parameters()}
                found = {names[p]: grad for p, grad in heard.at_launch.items()}
                counts = (heard.events.count(LAUNCH), heard.in_passes, heard.early)
                trainings.append(Training(*counts, found))
            return result

        with mock.patch.object(gpt, "iterate", iterate_and_keep):
            return trainings, gpt.train(rank, case)


def _train_twice(rank: int, case: Case) -> list[tuple[int, int, int]]:
    """The launches of the rank's iterations with overlap, which leaves the same bits as without."""
    apart, expected = _heard(rank, case)
    overlapping, ours = _heard(rank, replace(case, overlap_grad_reduce=True))
    # Two numbers have one sum; four are added in another order where a bucket begins elsewhere, and Adam
    # amplifies rounding.
    rtol, atol = (0.0, 0.0) if case.dp * case.cp == 2 else (1e-4, 1e-5)
    for there, here in zip(apart, overlapping, strict=True):
        assert there.in_passes == 0
        torch.testing.assert_close(here.found, there.found, rtol=rtol, atol=atol)
    torch.testing.assert_close(ours.losses, expected.losses, rtol=rtol, atol=atol)
    torch.testing.assert_close(ours.weights, expected.weights, rtol=rtol, atol=atol)
    return [(each.launches, each.in_passes, each.early) for each in overlapping]


@pytest.mark.parametrize("name", rest_is_slow(CASES, "zb-h1, tied, delayed"))
def test_buckets_are_reduced_when_they_are_complete(name: str) -> None:
    """On every rank, while passes run and before the last gradient is complete."""
    for first, second in gpt.run(_case(name), body=_train_twice):
        assert first[1] == 0  # Megatron counts reports in the first iteration
        assert second[0] == second[1] == first[0] > 1
        assert second[2] > 0


def _train_without_a_report(rank: int, case: Case) -> None:
    reported: list[torch.nn.Parameter] = []
    report = compat.report_gradient

    def report_once(chunk: Any, parameter: torch.nn.Parameter) -> None:
        if not any(parameter is each for each in reported):
            reported.append(parameter)
            report(chunk, parameter)

    with mock.patch.object(compat, "report_gradient", report_once):
        gpt.train(rank, replace(case, overlap_grad_reduce=True))


def test_what_is_never_complete_is_megatrons_error() -> None:
    with pytest.raises(
        AssertionError, match=r"has not been issued for this bucket \(\d+/\d+ params have grad"
    ):
        gpt.run(_case("v-half"), body=_train_without_a_report)
