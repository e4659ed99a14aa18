"""Distillation through the pipeline equals a stock model whose loss is the definition on all logits."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from megatron.core.models.gpt import GPTModel

from megatron_vocabpar.layers.extras.distillation import check_teacher
from megatron_vocabpar.layers.partition import VocabRange
from megatron_vocabpar.layers.terms import Distillation, LossTerms
from megatron_vocabpar.pipeline.options import VocabOptions
from megatron_vocabpar.pipeline.rules.facts import Facts
from megatron_vocabpar.pipeline.rules.model_rules import TEACHERS, TRAINING
from megatron_vocabpar.pipeline.rules.option_rules import conflicts
from megatron_vocabpar.pipeline.rules.rule import require
from megatron_vocabpar.schedule.make.generate import generate
from megatron_vocabpar.schedule.words.methods import METHODS
from tests.cases import covering
from tests.pipeline.gpt import Case, Result, case_of, run, train
from tests.pipeline.teachers import unsharded_loss
from tests.spawn import run_ranks
from tests.support.equality import layers


def _unsharded(_: int, case: Case) -> Result:
    how = case.output_options.distillation
    assert how is not None
    with patch.object(GPTModel, "compute_language_model_loss", unsharded_loss(case, how)):
        return train(0, case.unsharded())


def check(case: Case, tolerance: float = 1e-5) -> None:
    (expected,) = run_ranks(1, _unsharded, case)
    results = run(case, expected)
    reporting = [result for result in results if result.reports_loss]
    np.testing.assert_allclose(
        np.mean([result.losses for result in reporting], axis=0), expected.losses, rtol=tolerance
    )
    np.testing.assert_allclose(
        np.mean([result.evaluation for result in reporting], axis=0), expected.evaluation, rtol=tolerance
    )
    for rank, result in enumerate(results):
        for name, difference in result.first_gradients.items():
            assert difference <= tolerance, f"{case}: rank {rank}, gradient of {name}: {difference}"
        for name, difference in result.weights.items():
            assert difference <= 3 * tolerance, f"{case}: rank {rank}, weight {name}: {difference}"


def options_of(kind: str, **more: Any) -> VocabOptions:
    values = {"weight": 0.7, "temperature": 1.5, "mixture": 0.3} | more
    return VocabOptions(distillation=Distillation(kind, **values))


@covering(
    ("kind", ["forward", "reverse", "js"]),
    ("teacher", ["logits", "states", "stored"]),
    ("method", ["vocab-1", "vocab-2"]),
    ("pp", [1, 2, 3, 4]),
    ("tied", [False, True]),
    further={"pp": [4]},
)
def test_trains_as_unsharded(kind: str, teacher: str, method: str, pp: int, tied: bool) -> None:
    check(
        Case(
            method,
            pp=pp,
            m=pp + 1,
            layers=layers(pp),
            steps=1,
            tied=tied,
            vocab_size=97,
            teacher=teacher,
            output_options=options_of(kind),
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "teacher", "options"),
    [
        ("js", "stored", {"method": "vocab-1", "labels": "ignored"}),
        ("reverse", "logits", {"tp": 2, "loss_scale": 65536.0}),
        ("forward", "stored", {"tp": 2, "dp": 2, "overlap_grad_reduce": True}),
        ("js", "states", {"dp": 2}),
        ("forward", "logits", {"labels": "one masked microbatch", "vocab_size": 33, "pp": 4}),
    ],
)
def test_with_other_options(kind: str, teacher: str, options: dict[str, Any]) -> None:
    check(
        Case(
            **{"pp": 2, "m": 3, "teacher": teacher, "output_options": options_of(kind, weight=1.0)} | options
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize(("family", "method"), [("v-half", "vocab-2"), ("zb-h1", "vocab-1")])
def test_in_other_families(family: str, method: str) -> None:
    schedule = generate(METHODS[method], 2, 4, family=family)
    check(case_of(schedule, teacher="logits", output_options=options_of("js", temperature=1.0)))


@pytest.mark.parametrize(
    ("method", "more", "says"),
    [
        ("naive", {}, "not with method naive"),
        ("interlaced", {}, "not with method interlaced"),
        ("vocab-1", {"recompute": True}, "not with recompute=True"),
        ("vocab-2", {"softcap": 30.0}, "not with softcap=30.0"),
    ],
)
def test_what_cannot_be_combined_is_named(method: str, more: dict[str, Any], says: str) -> None:
    options = VocabOptions(distillation=Distillation(), **more)
    assert any(says in problem for problem in conflicts(options, METHODS[method]))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"kind": "both"}, "'both': choose one of forward, reverse, js"),
        ({"weight": 1.5}, "weight 1.5: give 0 to 1"),
        ({"temperature": 0.0}, "temperature 0.0: give a positive number"),
        ({"mixture": 1.0}, "mixture 1.0: give more than 0"),
    ],
)
def test_values_that_no_distillation_has(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        LossTerms(distillation=Distillation(**values))


def test_a_teacher_and_a_distillation_need_each_other() -> None:
    config = SimpleNamespace(mtp_num_layers=None, params_dtype=torch.bfloat16)
    facts = Facts(settings=config, options=options_of("js"))
    with pytest.raises(ValueError, match="the call's teacher: they need each other"):
        require(facts, TRAINING)
    with pytest.raises(ValueError, match=r"^distillation=None and the call's teacher: they need each other"):
        require(Facts(given=frozenset({"teacher"})), TRAINING)
    require(replace(facts, given=frozenset({"teacher"})), TRAINING, TEACHERS)
    config.mtp_num_layers = 1
    with pytest.raises(ValueError, match="multi-token prediction"):
        require(facts, TEACHERS)


def test_fp16_needs_a_head_in_float32() -> None:
    facts = Facts(settings=SimpleNamespace(params_dtype=torch.float16), options=options_of("js"))
    with pytest.raises(ValueError, match=r"in float16: .* unlikely ids"):
        require(facts, TEACHERS)
    require(replace(facts, options=replace(facts.options, fp32_head=True)), TEACHERS)


def test_a_teacher_of_another_shape_is_named() -> None:
    shard = VocabRange(0, 8, 15)
    check_teacher(torch.empty(4, 2, 8), (4, 2), shard)
    with pytest.raises(ValueError, match=r"tokens \(2, 4\), the microbatch \(s, b\) = \(4, 2\)"):
        check_teacher(torch.empty(2, 4, 8), (4, 2), shard)
    with pytest.raises(ValueError, match="7 ids on this rank, the student's shard 8, from 0 to 8"):
        check_teacher(torch.empty(4, 2, 7), (4, 2), shard)


def test_a_training_asks_for_its_teacher() -> None:
    with pytest.raises(AssertionError, match="the call's teacher: they need each other"):
        run(Case(pp=2, m=3, output_options=options_of("js")))
