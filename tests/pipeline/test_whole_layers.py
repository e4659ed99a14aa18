"""A partitioned model that shows stock's parameters: read, written to, and as it was afterwards."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_vocabpar.layers.partition import even_ranges
from megatron_vocabpar.pipeline.model.gpt import VocabParallelGPTModel
from megatron_vocabpar.pipeline.model.whole_layers import whole_layers
from megatron_vocabpar.pipeline.model.whole_rows import WholeRows
from megatron_vocabpar.train.core_on_cpu import megatron_on_cpu
from tests.pipeline.gpt import Case, build_chunks, parallel_groups
from tests.spawn import run_ranks

VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
_LAYOUT = ("tensor_model_parallel", "partition_dim", "partition_stride")


def _check_same(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    """Names in stock's order, bits, and what converters ask of a parameter and of its module's class."""
    expected = dict(theirs.named_parameters())
    assert [name for name, _ in ours.named_parameters()] == list(expected)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for name, mine in ours.named_parameters():
        assert torch.equal(mine, expected[name]), name
        assert [getattr(mine, a, None) for a in _LAYOUT] == [
            getattr(expected[name], a, None) for a in _LAYOUT
        ], name
        owner, _, attribute = name.rpartition(".")
        assert getattr(ours.get_submodule(owner), attribute) is mine, name
        assert type(ours.get_submodule(owner)) is type(theirs.get_submodule(owner)), name


def _round_trip(_: int, case: Case) -> None:
    """Write other weights to what is shown; the vocabulary layers take them if that is asked for."""
    other = replace(case, seed=8)
    with megatron_on_cpu(), parallel_groups(case):
        stock, others = (build_chunks(replace(c, method="stock")) for c in (case, other))
        before, after = build_chunks(case), build_chunks(other)
        for keep in (False, True):
            ours = build_chunks(case)
            with whole_layers(ours, keep), whole_layers(ours, not keep):  # the second changes nothing
                for mine, theirs, written in zip(ours, stock, others, strict=True):
                    _check_same(mine, theirs)
                    mine.load_state_dict(written.state_dict())
            for mine, old, new in zip(ours, before, after, strict=True):
                wanted = dict(new.named_parameters())
                wanted |= {} if keep else {n: p for n, p in old.named_parameters() if n in VOCABULARY}
                assert [name for name, _ in mine.named_parameters()] == list(wanted)
                for name, value in mine.named_parameters():
                    assert torch.equal(value, wanted[name]), name


@pytest.mark.parametrize(
    "case",
    [
        Case(pp=2, tp=2, layers=2, vocab_size=90),
        Case(pp=2, tp=2, chunks=2, vocab_size=90, tied=True),
        pytest.param(Case(tp=2, vocab_size=90, tied=True), marks=pytest.mark.slow),
    ],
    ids=["", "tied and interleaved", "tied on one stage"],
)
def test_it_shows_stocks_parameters_and_takes_what_is_written(case: Case) -> None:
    run_ranks(case.ranks, _round_trip, case)


def test_a_vocabulary_that_stock_cannot_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="91 rows on 2 tensor-parallel ranks"):
        WholeRows(even_ranges(96, 4, 91), member=0, stage=0, size=91, tensor=2)


def test_a_critic_is_refused() -> None:
    critic = VocabParallelGPTModel.__new__(VocabParallelGPTModel)
    torch.nn.Module.__init__(critic)
    critic.output_layer = torch.nn.Linear(1, 1)
    with (
        pytest.raises(ValueError, match="output layer is a Linear: a critic has no"),
        whole_layers([critic], True),
    ):
        pass
