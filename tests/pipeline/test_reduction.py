"""Gradients reduced while W is split off: when they are complete, before the passes end, and the same bits.

A rank trains twice, with and without the overlap. Of each bucket we keep what a launch finds in it, and where
among the passes it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

from megatron_vocabpar.pipeline import compat, forward_backward
from megatron_vocabpar.schedule.make.generate import generate
from megatron_vocabpar.schedule.times.costs import PassCosts
from tests.cases import rest_is_slow
from tests.pipeline import gpt
from tests.pipeline.experts import Experts
from tests.pipeline.gpt import Case, case_of
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


@dataclass
class Heard:
    """Of each forward-backward call: passes and launches in order, and the gradients at launch."""

    events: list[list[str]] = field(default_factory=list)
    found: list[dict[str, torch.Tensor]] = field(default_factory=list)


@contextmanager
def hearing(heard: Heard) -> Iterator[None]:
    """In this context training is heard."""
    start, iterate = _ParamAndGradBucketGroup.start_grad_sync, gpt.iterate
    at_launch: dict[torch.nn.Parameter, torch.Tensor] = {}

    def start_and_keep(group: Any, *args: Any, **kwargs: Any) -> None:
        heard.events[-1].append("launch")
        at_launch.update((p, p.main_grad.clone()) for bucket in group.buckets for p in bucket.params_list)
        start(group, *args, **kwargs)

    def iterate_and_keep(
        run: Callable[..., Any], case: Case, model: list[Any], *rest: Any, **named: Any
    ) -> Any:
        heard.events.append([])
        at_launch.clear()
        result = iterate(run, case, model, *rest, **named)
        names = {p: f"{i}.{name}" for i, chunk in enumerate(model) for name, p in chunk.named_parameters()}
        heard.found.append({names[p]: grad for p, grad in at_launch.items()})
        return result

    @contextmanager
    def named_range(_: torch.device, name: str) -> Iterator[None]:
        heard.events[-1].append(name)
        yield
        heard.events[-1].append("end")

    with (
        mock.patch.object(_ParamAndGradBucketGroup, "start_grad_sync", start_and_keep),
        mock.patch.object(gpt, "iterate", iterate_and_keep),
        mock.patch.object(forward_backward, "named_range", named_range),
    ):
        yield


def _train_twice(rank: int, case: Case) -> list[list[str]]:
    """The events of the rank's trainings with overlap, which leaves the same bits as without."""
    heard, results = [Heard(), Heard()], []
    for overlap, each in zip((False, True), heard, strict=True):
        with hearing(each):
            results.append(gpt.train(rank, replace(case, overlap_grad_reduce=overlap)))
    (apart, overlapping), (expected, ours) = heard, results
    # Two numbers have one sum; four are added in another order where a bucket begins elsewhere, and Adam
    # amplifies rounding.
    rtol, atol = (0.0, 0.0) if case.dp * case.cp == 2 else (1e-4, 1e-5)
    assert len(apart.found) == len(overlapping.found) == 2 * case.steps  # a training and an evaluation each
    for there, here in zip(apart.found, overlapping.found, strict=True):
        torch.testing.assert_close(here, there, rtol=rtol, atol=atol)
    torch.testing.assert_close(ours.losses, expected.losses, rtol=rtol, atol=atol)
    torch.testing.assert_close(ours.weights, expected.weights, rtol=rtol, atol=atol)
    return overlapping.events[::2]


@pytest.mark.parametrize("name", rest_is_slow(CASES, "v-half", "zb-h1, tied, delayed"))
def test_buckets_are_reduced_when_they_are_complete(name: str) -> None:
    """Not by the calls after the passes; where there are several, not by the last pass alone."""
    for first, second in gpt.run(_case(name), body=_train_twice):
        buckets = first.count("launch")
        assert "launch" not in first[:-buckets]  # Megatron counts reports in the first iteration
        assert second.count("launch") == buckets
        assert second[-1] == "end"
        last_pass = max(i for i, event in enumerate(second) if event not in ("launch", "end"))
        assert buckets == 1 or "launch" in second[:last_pass]


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
