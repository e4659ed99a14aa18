"""Real processes over gloo, zigzag order, and the tensor-parallel cases."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lab.runs import numbers, record
from megatron_vocabpar.layers.partition import VocabRange, even_ranges, ranges_from_sizes
from megatron_vocabpar.losses import LazyLogits, vocab_argmax, vocab_kl, vocab_logprobs
from megatron_vocabpar.losses.tensor_parallel import all_reduce, copy_to_shards, nll_mean, nll_per_token
from megatron_vocabpar.losses.zigzag import zigzag_gather, zigzag_order, zigzag_split
from tests.losses import reference
from tests.losses.reference import error
from tests.spawn import run_ranks

SIZES = (11, 0, 29)


def _ranks(rank: int) -> None:
    group = dist.group.WORLD
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(6, 5, generator=draw, dtype=torch.float64)
    weight = torch.randn(40, 5, generator=draw, dtype=torch.float64)
    targets = torch.tensor([0, 10, 11, 39, -100, 25])
    ranges = ranges_from_sizes(SIZES, 40)
    mine = ranges[rank]
    full_x, full_w = x.clone().requires_grad_(), weight.clone().requires_grad_()
    whole = full_x @ full_w.t()
    whole.retain_grad()
    expected = reference.logprobs(whole, targets)
    expected.square().sum().backward()
    shard = whole.detach()[:, mine.start : mine.stop].clone().requires_grad_()
    found = vocab_logprobs(shard, targets, group=group, ranges=ranges)
    calls = []
    original = dist.all_reduce
    dist.all_reduce = lambda *a, **k: calls.append(a) or original(*a, **k)
    found.square().sum().backward()
    dist.all_reduce = original
    assert not calls  # backward for logits makes no communication
    assert error(found, expected) < 1e-14
    assert error(shard.grad, whole.grad[:, mine.start : mine.stop]) < 1e-13
    for invariant in (False, True):
        lx, lw = x.clone().requires_grad_(), weight[mine.start : mine.stop].clone().requires_grad_()
        lazy = vocab_logprobs(LazyLogits(lx, lw), targets, group=group, ranges=mine, invariant=invariant)
        lazy.square().sum().backward()
        assert error(lazy, expected) < 1e-12
        assert error(lx.grad, full_x.grad) < 1e-12
        assert error(lw.grad, full_w.grad[mine.start : mine.stop]) < 1e-12
    moved = VocabRange(mine.start - (rank == 2), mine.stop - (rank == 2), 40)
    with pytest.raises(ValueError, match="several shards hold id 10"):
        vocab_argmax(shard, group=group, ranges=moved)
    lazy = LazyLogits(x, weight[mine.start : mine.stop])
    recorded = record("gloo", lazy, targets, group=group, ranges=mine)
    one = record("one process", list(whole.detach().split(SIZES, dim=1)), targets)
    assert (recorded.backend, recorded.tp_size, recorded.ranges) == ("gloo", 3, one.ranges)
    for name in ("logprobs", "shard_lse", "shard_max", "shard_logits"):
        torch.testing.assert_close(numbers(getattr(recorded, name)), numbers(getattr(one, name)))
    assert torch.equal(vocab_argmax(shard, group=group, ranges=ranges), whole.argmax(dim=-1))
    assert float(vocab_kl(shard, shard.detach(), group=group, ranges=ranges).abs().max()) < 1e-14


def test_processes() -> None:
    run_ranks(3, _ranks)


def _two_ranks(rank: int) -> None:
    group = dist.group.WORLD
    draw = torch.Generator().manual_seed(1)
    whole = torch.randn(2, 8, 10, generator=draw, dtype=torch.float64)
    targets = torch.randint(0, 10, (2, 8), generator=draw)
    mine = even_ranges(10, 2, 10)[rank]
    shard = whole[..., mine.start : mine.stop].clone().requires_grad_()
    full = whole.clone().requires_grad_()
    expected = -reference.logprobs(full, targets)
    expected.mean().backward()
    for loss in (nll_per_token(shard, targets, mine, group).mean(), nll_mean(shard, targets, mine, group)):
        shard.grad = None
        loss.backward()
        assert error(loss, expected.mean()) < 1e-14
        assert error(shard.grad, full.grad[..., mine.start : mine.stop]) < 1e-13
    # Case A: masking the finished log-probabilities gives the right loss and a wrong gradient.
    lse = all_reduce(shard.exp().sum(dim=-1), group).log()
    owned = (targets >= mine.start) & (targets < mine.stop)
    picked = (
        (shard - lse.unsqueeze(-1)).gather(-1, (targets - mine.start).clamp(0, 4).unsqueeze(-1)).squeeze(-1)
    )
    shard.grad = None
    case_a = -all_reduce(picked * owned, group).mean()
    case_a.backward()
    assert error(case_a, expected.mean()) < 1e-14
    assert torch.equal(shard.grad[~owned], torch.zeros_like(shard.grad[~owned]))
    assert error(shard.grad, full.grad[..., mine.start : mine.stop]) > 0.1
    entering = torch.ones(3, requires_grad=True)
    copy_to_shards(entering, group).mul(rank + 1).sum().backward()
    assert torch.equal(entering.grad, torch.full((3,), 3.0))
    # zigzag over real ranks
    x = torch.arange(16.0).view(2, 8).requires_grad_()
    part = zigzag_split(x, rank, 2, dim=1)
    back = zigzag_gather(part, group, dim=1)
    assert torch.equal(back, x)
    back.square().sum().backward()
    held = zigzag_order(8, 2)[rank]
    assert torch.equal(x.grad[:, held], 2 * x.detach()[:, held])


def test_two_processes() -> None:
    run_ranks(2, _two_ranks)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("cu_seqlens", [None, [0, 24, 72, 72, 96]], ids=str)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_zigzag(size: int, cu_seqlens: list[int] | None, dim: int) -> None:
    x = torch.randn(96, 96, requires_grad=True)
    parts = [zigzag_split(x, rank, size, dim, cu_seqlens) for rank in range(size)]
    whole = zigzag_gather(parts, dim=dim, cu_seqlens=cu_seqlens)
    assert torch.equal(whole, x)
    for rank, part in enumerate(parts):
        assert torch.equal(zigzag_split(whole, rank, size, dim, cu_seqlens), part)
    upstream = torch.randn(96, 96)
    assert torch.equal(torch.autograd.grad(whole, x, upstream)[0], upstream)


def test_zigzag_order() -> None:
    assert zigzag_order(8, 2).tolist() == [[0, 1, 6, 7], [2, 3, 4, 5]]
    with pytest.raises(ValueError, match="multiple of 4"):
        zigzag_order(10, 2)
