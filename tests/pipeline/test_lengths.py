"""Context-parallel slices, packed sequences and microbatches of different lengths train as whole rows do.

Stock has whole rows on one rank, and the same sequences; nothing of it depends on their lengths there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron_vocabpar.pipeline.options import VocabOptions
from megatron_vocabpar.pipeline.output.collectives import HiddenStates
from megatron_vocabpar.pipeline.output.loss import Losses
from megatron_vocabpar.pipeline.rules.facts import Facts
from megatron_vocabpar.pipeline.rules.model_rules import WHOLE
from megatron_vocabpar.pipeline.rules.rule import require
from megatron_vocabpar.schedule.make.generate import generate
from megatron_vocabpar.schedule.words.methods import METHODS
from megatron_vocabpar.schedule.words.passes import Pass
from tests.cases import rest_is_slow
from tests.gathered_attention import GatheredAttention
from tests.pipeline import gpt
from tests.pipeline.gpt import BENT, Case, Result, case_of, run, train, transformer_config
from tests.support.equality import check

TOKENS: dict[str, Any] = {"loss": "tokens", "calculate_per_token_loss": True}
VARIABLE = ((8,), (3,), (6,), (4,), (7,))
PACKED = ((4, 8), (8,), (4, 4, 8))


@pytest.mark.parametrize("method", rest_is_slow(["vocab-1", "vocab-2", "naive", "interlaced"], "vocab-2"))
def test_context_parallel(method: str) -> None:
    check(Case(method, pp=2, cp=2, m=3, steps=1, position="rope", **TOKENS))


@pytest.mark.parametrize("method", rest_is_slow(["vocab-1", "vocab-2", "naive", "interlaced"], "vocab-1"))
def test_variable_lengths(method: str) -> None:
    check(Case(method, pp=2, m=5, lengths=VARIABLE, steps=1))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["interleaved", "v-half", "zb-h1"])
def test_variable_lengths_in_every_family(family: str) -> None:
    check(case_of(generate("vocab-2", 2, 5, family=family), lengths=VARIABLE))


@pytest.mark.parametrize("sizes", [{"cp": 2}, *rest_is_slow([{}, {"tp": 2}])])
@pytest.mark.parametrize("method", rest_is_slow(["vocab-1", "vocab-2"], "vocab-1"))
def test_packed_sequences(method: str, sizes: dict[str, int]) -> None:
    options = {"micro_batch_size": 1, "position": "rope", "steps": 1, **TOKENS}
    check(Case(method, pp=2, m=3, lengths=PACKED, **options, **sizes))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["vocab-2", "baseline"])
def test_packed_sequences_in_a_v(method: str) -> None:
    """The model's first and last stages know where sequences end, as in stock on as many stages."""
    plan = generate(method, 2, 3, family="v-half")
    options = {"seq_length": 16, "micro_batch_size": 1, "steps": 1, **TOKENS}
    case = case_of(plan, lengths=((4, 12), (6, 10), (8, 8)), **options)
    (expected,) = run(case.unsharded(), body=_with_ends_on_the_outer_layers)
    check(case, expected=expected)


class _OuterLayers(GatheredAttention):
    """Only the first layer and the last know where packed sequences end."""

    def __init__(self, config: Any, layer_number: int, *args: Any, **options: Any) -> None:
        super().__init__(config, layer_number, *args, **options)
        self.knows = layer_number in (1, config.num_layers)

    def forward(self, *args: Any, packed_seq_params: Any = None, **options: Any) -> torch.Tensor:
        return super().forward(*args, packed_seq_params=packed_seq_params if self.knows else None, **options)


def _with_ends_on_the_outer_layers(rank: int, case: Case) -> Result:
    with patch.object(gpt, "GatheredAttention", _OuterLayers):
        return train(rank, case)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("naive", {"tied": True}),
        *rest_is_slow(
            [
                ("vocab-2", {"tp": 2, **TOKENS}),
                ("vocab-1", {"lengths": PACKED, "micro_batch_size": 1, "position": "rope", **TOKENS}),
                ("naive", {"tp": 2, "lengths": ((8,), (6,))}),
                ("vocab-2", {"output_options": VocabOptions(recompute=True)}),
                ("vocab-1", {"output_options": VocabOptions(invariant=True)}),
            ]
        ),
    ],
)
def test_tokens_that_do_not_count(method: str, options: dict[str, Any]) -> None:
    """Nine tenths of the labels are ignored, and all of the last microbatch's; S sees the others alone."""
    case = Case(method, pp=2, m=3, labels="mostly ignored", steps=1, **options)
    check(case)
    rows = run(case, body=_rows)[0]
    assert set(rows[2::3]) == {1}  # of no such token
    assert max(rows) <= case.seq_length


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("vocab-2", {"steps": 1}),
        *rest_is_slow(
            [
                ("vocab-1", {"tp": 2, "mtp": 1, "position": "rope", "steps": 1, **TOKENS}),
                ("interlaced", {"lengths": PACKED, "micro_batch_size": 1, "position": "rope"}),
                ("naive", {"tied": True}),
            ]
        ),
    ],
)
def test_masked_tokens_are_dropped(method: str, options: dict[str, Any]) -> None:
    """Nine tenths are masked, and all of the last microbatch: S sees the others alone in training."""
    drops = VocabOptions(drop_masked=True)
    case = Case(method, pp=2, m=3, labels="mostly masked", output_options=drops, **options)
    check(case)
    training, evaluation = torch.tensor(run(case, body=_rows)[0]).view(-1, 2, 3).unbind(1)
    assert evaluation.min() >= case.micro_batch_size * case.seq_length * (1 + case.mtp)
    assert training.sum() < evaluation.sum() / 4
    assert set(training[:, 2].tolist()) == {1}


@pytest.mark.parametrize("loss", BENT)
def test_tokens_without_a_gradient_are_not_taken_for_masked(loss: str) -> None:
    """Those alone are dropped whose mask is 0 in the batch."""
    drops = VocabOptions(drop_masked=True)
    check(Case("vocab-2", pp=1, m=1, layers=1, steps=1, loss=loss, output_options=drops))


def test_a_loss_of_dropped_tokens_is_refused() -> None:
    case = Case("vocab-1", pp=1, m=1, layers=1, loss="unmasked", labels="mostly masked")
    with pytest.raises(Exception, match="microbatch 0: the loss depends on tokens that the batch"):
        run(replace(case, output_options=VocabOptions(drop_masked=True)))


def _rows(rank: int, case: Case) -> list[int]:
    """How many tokens S had, one microbatch after the other, in training and evaluation."""
    rows: list[int] = []
    hidden_states = HiddenStates.of

    def noted(layer: HiddenStates, instruction: Pass) -> torch.Tensor:
        x = hidden_states(layer, instruction)
        rows.append(len(x))
        return x

    with patch.object(HiddenStates, "of", noted):
        train(rank, case)
    return rows


def _exponentials(rank: int, case: Case) -> int:
    """How many tensors of the size tokens x vocabulary an iteration keeps to its end."""
    kept: list[int] = []
    finish = Losses.finish

    def counted(layer: Losses) -> None:
        kept.append(len(layer.chain.spare))
        finish(layer)

    with patch.object(Losses, "finish", counted):
        train(rank, case)
    return max(kept)


@pytest.mark.slow
def test_variable_lengths_keep_no_more_exponentials() -> None:
    case = Case(pp=2, m=5, steps=1)
    fixed = run(case, body=_exponentials)
    assert run(replace(case, lengths=VARIABLE), body=_exponentials) == fixed


def test_methods_without_shared_shapes_refuse_variable_lengths() -> None:
    config = transformer_config(Case(lengths=VARIABLE))
    with pytest.raises(ValueError, match=r"variable_seq_lengths: .* partitions the vocabulary"):
        require(Facts(settings=config, method=METHODS["baseline"]), WHOLE)
    require(Facts(settings=config, method=METHODS["vocab-2"]), WHOLE)
