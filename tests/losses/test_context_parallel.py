"""Zigzag parts over real ranks, with the vocabulary split too: against the unsharded float64 sequence."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vocabpar.layers.partition import ranges_from_sizes
from megatron_vocabpar.losses.reductions import joined, masked_sum, token_mean
from megatron_vocabpar.losses.zigzag import context_parallel_logprobs, zigzag_gather, zigzag_order
from tests.losses import reference
from tests.losses.reference import error
from tests.spawn import run_ranks

SIZES = (3, 7)
LENGTH = 24
PACKED = [0, 8, 8, 24]


def _grid(rank: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup, int, int]:
    """Four ranks as 2 x 2: (tensor group, context group, rank in each)."""
    tensor = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    context = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return tensor[rank // 2], context[rank % 2], rank % 2, rank // 2


def _whole(batch: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(5)
    logits = torch.randn(batch, LENGTH, sum(SIZES), generator=draw, dtype=torch.float64)
    targets = torch.randint(0, sum(SIZES), (batch, LENGTH), generator=draw)
    targets[0, 3] = -100
    return logits, targets


def _context_parallel(rank: int, cu_seqlens: list[int] | None, sum_gradients: bool) -> None:
    tensor_group, context_group, tensor_rank, context_rank = _grid(rank)
    whole, targets = _whole(2)
    shard = ranges_from_sizes(SIZES, sum(SIZES))[tensor_rank]
    held = zigzag_order(LENGTH, 2, cu_seqlens)[context_rank]
    mine = whole[:, held, shard.start : shard.stop].clone().requires_grad_()
    found = context_parallel_logprobs(
        mine,
        targets,
        cp_group=context_group,
        cu_seqlens=cu_seqlens,
        sum_gradients=sum_gradients,
        group=tensor_group,
        ranges=shard,
        temperature=0.8,
    )
    # With sum_gradients each context rank has a loss of its own; the gradient is that of their sum.
    weights = torch.linspace(-1, 1, LENGTH, dtype=torch.float64).expand(2, LENGTH)
    losses = [weights * (1 + r if sum_gradients else 1) for r in range(2)]
    (found * losses[context_rank]).sum().backward()
    full = whole.clone().requires_grad_()
    expected = reference.logprobs(full, targets, 0.8)
    (expected * (sum(losses) if sum_gradients else losses[0])).sum().backward()
    assert error(found, expected) < 1e-14
    assert error(mine.grad, full.grad[:, held, shard.start : shard.stop]) < 1e-13


@pytest.mark.parametrize("sum_gradients", [False, True])
@pytest.mark.parametrize("cu_seqlens", [None, PACKED], ids=str)
def test_log_probabilities_of_a_sequence_in_parts(cu_seqlens: list[int] | None, sum_gradients: bool) -> None:
    run_ranks(4, _context_parallel, cu_seqlens, sum_gradients)


def _gather_and_reduce(rank: int) -> None:
    group = dist.group.WORLD
    size = dist.get_world_size(group)
    # ranks that use the gathered sequence differently
    whole = torch.randn(5, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    held = zigzag_order(12, size)[rank]
    part = whole[:, held].clone().requires_grad_()
    back = zigzag_gather(part, group, 1, sum_gradients=True)
    assert torch.equal(back, whole)
    (back.square() * (rank + 1)).sum().backward()
    assert error(part.grad, 2 * whole[:, held] * sum(range(1, size + 1))) < 1e-14
    # tokens dealt out over the ranks, in two microbatches of different sizes each
    draw = torch.Generator().manual_seed(2)
    values = torch.randn(size, 10, generator=draw, dtype=torch.float64)
    mask = torch.rand(size, 10, generator=draw) < 0.6
    full = values.clone().requires_grad_()
    expected = full[mask].mean()
    expected.backward()
    for reduce in (
        lambda x: token_mean(x, mask[rank], group),
        lambda x: joined([masked_sum(x[:3], mask[rank, :3]), masked_sum(x[3:], mask[rank, 3:])], group),
    ):
        mine = values[rank].clone().requires_grad_()
        found = reduce(mine)
        found.backward()
        assert error(found, expected) < 1e-14
        assert error(mine.grad, full.grad[rank]) < 1e-14
    nothing = token_mean(values[rank], torch.zeros(10), group)
    assert float(nothing) == 0


def test_differing_losses_and_shared_denominators() -> None:
    run_ranks(3, _gather_and_reduce)
