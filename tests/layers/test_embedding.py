"""IF and IB on shards against one unsharded embedding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_vocabpar.layers.embedding import (
    InputPlan,
    assemble,
    embedding_backward,
    embedding_forward,
    plan_input,
    split_gradient,
)
from megatron_vocabpar.layers.partition import VocabRange, even_ranges, padded_vocab_size, ranges_from_sizes

from .shards import split

V, H = 37, 6
SPLITS = {
    **{f"{r} even": even_ranges(padded_vocab_size(V, r), r, V) for r in (1, 2, 3, 4, 5, 8)},
    "uneven": ranges_from_sizes([1, 20, 3, 16], V),
    "empty and all padding": ranges_from_sizes([0, 20, 0, 17, 0, 5], V),
}


def planned(tokens: Tensor, ranges: Sequence[VocabRange]) -> InputPlan[Tensor]:
    plan = plan_input(tokens.numpy(), np.array([shard.stop for shard in ranges]))
    return InputPlan(torch.from_numpy(plan.order), plan.counts)


def tokens_and_weight(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.cat(
        (torch.arange(V), torch.randint(0, V, (40,), generator=generator), torch.full((30,), 5))
    )
    return tokens[torch.randperm(len(tokens), generator=generator)], torch.randn(
        V, H, generator=generator
    ).to(dtype)


@pytest.mark.parametrize("ranges", SPLITS.values(), ids=SPLITS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lookup_equals_the_unsharded_embedding(ranges: tuple[VocabRange, ...], dtype: torch.dtype) -> None:
    tokens, weight = tokens_and_weight(dtype)
    plan = planned(tokens, ranges)
    sent = [
        embedding_forward(tokens[plan.positions(rank)] - shard.start, rows)
        for rank, (rows, shard) in enumerate(zip(split(weight, ranges), ranges, strict=True))
    ]
    assert tuple(len(rows) for rows in sent) == plan.counts
    assert torch.equal(assemble(plan, torch.cat(sent)), weight[tokens])


@pytest.mark.parametrize("ranges", SPLITS.values(), ids=SPLITS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradient_equals_the_unsharded_embedding(ranges: tuple[VocabRange, ...], dtype: torch.dtype) -> None:
    tokens, _ = tokens_and_weight(dtype)
    grad = torch.randn(len(tokens), H, generator=torch.Generator().manual_seed(1)).to(dtype)
    exact = torch.zeros(V, H, dtype=torch.float64).index_add_(0, tokens, grad.double())
    plan = planned(tokens, ranges)
    pieces = split_gradient(plan, grad).split(plan.counts)
    main_grads = [torch.full((shard.rows, H), 0.25) for shard in ranges]
    for rank, (shard, main_grad) in enumerate(zip(ranges, main_grads, strict=True)):
        rows = tokens[plan.positions(rank)] - shard.start
        order = rows.argsort(stable=True) if rank % 2 else None
        embedding_backward(pieces[rank], rows, main_grad, order=order)
    got = torch.cat(main_grads) - 0.25
    torch.testing.assert_close(got[:V].double(), exact, rtol=1e-5, atol=2e-6)
    assert (got[V:] == 0).all()


@given(st.lists(st.integers(0, V - 1), max_size=50), st.lists(st.integers(0, 15), min_size=1, max_size=6))
def test_the_plan_groups_tokens_by_owner(ids: list[int], sizes: list[int]) -> None:
    ranges = ranges_from_sizes([*sizes, max(0, V - sum(sizes))], V)
    tokens = torch.tensor(ids, dtype=torch.int64)
    plan = planned(tokens, ranges)
    assert sum(plan.counts) == len(ids)
    assert sorted(plan.order.tolist()) == list(range(len(ids)))
    for rank, shard in enumerate(ranges):
        expected = [position for position, id_ in enumerate(ids) if shard.start <= id_ < shard.stop]
        assert plan.positions(rank).tolist() == expected


def test_gradients_of_the_same_id_are_summed_in_token_order() -> None:
    """Three fp32 terms whose sum depends on the order, twice the same bits."""
    rows = torch.tensor([[2.0**-24], [2.0**-24], [1.0]])
    for order, expected in (([0, 1, 2], 1 + 2.0**-23), ([2, 0, 1], 1.0)):
        main_grad = torch.zeros(2, 1)
        embedding_backward(rows[order], torch.zeros(3, dtype=torch.int64), main_grad)
        assert main_grad[0].item() == expected


def test_many_gradients_of_one_id_in_a_16_bit_gradient() -> None:
    main_grad = torch.zeros(2, 1, dtype=torch.bfloat16)
    embedding_backward(torch.ones(1000, 1).bfloat16(), torch.ones(1000, dtype=torch.int64), main_grad)
    assert main_grad.flatten().tolist() == [0.0, 1000.0]  # one by one, bf16 stops at 256
