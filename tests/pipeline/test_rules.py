"""The rules of options: one sentence each, as every door spells it; and the names that options had before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_vocabpar.layers.terms import Distillation
from megatron_vocabpar.megatron_lm.flags import spell
from megatron_vocabpar.option import options_of
from megatron_vocabpar.pipeline.options import VocabOptions
from megatron_vocabpar.pipeline.rules.facts import Facts
from megatron_vocabpar.pipeline.rules.option_rules import INCOMPATIBLE, OPTIONS, conflicts
from megatron_vocabpar.pipeline.rules.rule import IMPOSSIBLE, UNTESTED, Rule, ask, require
from megatron_vocabpar.schedule.words.methods import METHODS

NUMBERS: dict[str, Any] = {"metrics": ("entropy", "accuracy"), "target_rank": True}
SMOOTH: dict[str, Any] = {"label_smoothing": 0.1}
GRADIENT: dict[str, Any] = {"metrics": ("entropy-gradient",)}


@pytest.mark.parametrize(
    ("method", "options", "sentence"),
    [
        ("baseline", {"invariant": True}, "invariant=True: not with method baseline, which does not part"),
        ("redis", {"rows_per_chunk": 8}, "rows_per_chunk=8: not with method redis, which does not partition"),
        ("naive", {"recompute": True}, "recompute=True: not with method naive, which keeps its logits"),
        ("naive", {"invariant": True}, "invariant=True: not with method naive"),
        ("naive", SMOOTH, "label_smoothing=0.1: not with method naive"),
        ("naive", {"fp8_head": True}, "fp8_head=True: not with method naive"),
        *(
            ("naive", {name: value}, f"{name}={value}: not with method naive")
            for name, value in NUMBERS.items()
        ),
        ("vocab-2", {"invariant": True, "recompute": True}, "recompute=True: not with invariant=True, which"),
        ("vocab-2", {"invariant": True, "rows_per_chunk": 4}, "rows_per_chunk=4: not with invariant=True"),
        ("vocab-2", {"invariant": True, "fp8_head": True}, "fp8_head=True: not with invariant=True"),
        ("vocab-2", {"invariant": True, **SMOOTH}, "label_smoothing=0.1: not with invariant=True"),
        ("vocab-2", {"fp8_head": True, "fp32_head": True}, "fp8_head=True: not with fp32_head=True"),
        (
            "vocab-2",
            {**GRADIENT, "invariant": True},
            "metrics=('entropy-gradient',): not with invariant=True, which",
        ),
        (
            "vocab-2",
            {"metrics": ("accuracy",), "recompute": True},
            "metrics=('accuracy',): not with recompute=True",
        ),
        ("vocab-2", {"target_rank": True, "softcap": 30.0}, "target_rank=True: not with softcap=30.0"),
        (
            "vocab-2",
            {"metrics": ("entropy",), "fp8_head": True},
            "metrics=('entropy',): not with fp8_head=True",
        ),
        (
            "vocab-2",
            {"metrics": ("accuracy", "correct")},
            "metrics=('accuracy', 'correct'): choose one of entropy",
        ),
        ("naive", {"top_logprobs": 4}, "top_logprobs=4: not with method naive, whose output layer"),
        ("vocab-2", {"top_logprobs": 4, "recompute": True}, "top_logprobs=4: not with recompute=True"),
        ("vocab-1", {"top_logprobs": 4, "drop_masked": True}, "top_logprobs=4: not with drop_masked=True"),
        ("vocab-2", {"top_logprobs": -1}, "top_logprobs=-1: give 0 or more"),
        ("vocab-2", {"rows_per_chunk": 0}, "rows_per_chunk=0: give 1 or more"),
        ("vocab-2", {"softcap": -1.0}, "softcap=-1.0: softcap -1.0: give a positive"),
        ("vocab-2", {"softcap": 30.0, **SMOOTH}, "softcap=30.0 and label_smoothing=0.1: .* one of the two"),
    ],
)
def test_what_cannot_be_combined_is_one_sentence(method: str, options: dict[str, Any], sentence: str) -> None:
    [problem] = conflicts(VocabOptions(**options), METHODS[method])
    assert problem.startswith(sentence.partition(".*")[0])
    assert problem.endswith(sentence.rpartition(".*")[2] if ".*" in sentence else problem)


@pytest.mark.parametrize("method", ["vocab-1", "vocab-2", "interlaced"])
def test_every_option_goes_alone_with_methods_that_partition(method: str) -> None:
    values: dict[str, Any] = {"rows_per_chunk": 4, "softcap": 30.0, **SMOOTH}
    values |= {"distillation": Distillation(), **NUMBERS}
    refused = {"distillation", "top_logprobs"} if method == "interlaced" else set()
    for name in options_of(VocabOptions):
        options = VocabOptions(**{name: values.get(name, True)})
        assert name in refused or conflicts(options, METHODS[method]) == []


def test_rules_name_options() -> None:
    names = {name for rule in INCOMPATIBLE for name in (*rule.options, *rule.others)}
    assert names == {*options_of(VocabOptions), "gradients"}


def test_a_door_spells_the_names() -> None:
    options = VocabOptions(metrics=("accuracy",), softcap=30.0, recompute=True)
    [problem] = conflicts(options, METHODS["vocab-2"], spell=spell)
    assert problem.startswith(
        "--vocab-parallel-metrics accuracy: not with --vocab-parallel-recompute-logits and "
        "--vocab-parallel-logit-softcap 30.0, "
    )


@pytest.mark.parametrize("more", [GRADIENT, {"distillation": Distillation()}])
def test_what_has_not_been_run_together_is_a_warning(more: dict[str, Any]) -> None:
    facts = Facts(options=VocabOptions(top_logprobs=4, **more), method=METHODS["vocab-2"])
    said = ask(facts, OPTIONS)
    assert said[IMPOSSIBLE] == []
    assert said[UNTESTED][0].endswith("with which they have not been run; leave out the one or the other")
    with pytest.warns(UserWarning, match=r"not run with partitioned.*\n  top_logprobs=4: not with"):
        require(facts, OPTIONS)


def test_a_text_is_filled_in_from_facts_and_from_what_was_found() -> None:
    settings = SimpleNamespace(num_layers=6, hidden_size=None)
    facts = Facts(settings=settings, p=4)
    rule = Rule(
        lambda f, _: f"--num-layers {f.num_layers}",
        lambda f: f.num_layers % f.p,
        lambda _, found: f"{found} are left",
        "give 8",
    )
    assert rule.sentence(facts) == "--num-layers 6: 2 are left; give 8"
    settings.num_layers = 8
    assert rule.sentence(facts) == ""
    assert (facts.hidden_size, facts.overlap_p2p_comm, facts.num_experts) == (0, True, 0)
    settings.num_moe_experts = 4  # a TransformerConfig's name
    assert facts.num_experts == 4
