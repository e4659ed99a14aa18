"""Building blocks of a tensor-parallel model whose loss is on sharded logits, with plain autograd.

The differentiable all-reduce has two adjoints, and a model needs both:

    all_reduce        forward sum, backward identity: the sum is used alike on every rank
    copy_to_shards    forward identity, backward sum: a replicated tensor enters sharded computation

``nll_per_token`` (one all-reduce of [n] for the targets' logits) and ``nll_mean`` (of one scalar) select the
target's logit and mask it before they subtract it. Masking finished log-probabilities instead cuts every rank
that does not own the target off from the gradient; a test keeps that version to show it. ``functions.py``
takes less memory and time.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vocabpar.layers.gemm import result_dtype
from megatron_vocabpar.layers.partition import VocabRange
from megatron_vocabpar.layers.targets import target_rows
from megatron_vocabpar.losses.exchange import OverGroup


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        result = x.clone(memory_format=torch.contiguous_format)
        if group is not None:
            dist.all_reduce(result, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _CopyToShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _AllReduce.apply(grad, ctx.group), None


def all_reduce(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sum over the group; the gradient passes unchanged. None: one rank."""
    return _AllReduce.apply(x, group)


def copy_to_shards(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The tensor itself; its gradient is summed over the group. None: one rank.

    Source: the function f of the Megatron-LM paper (arXiv 1909.08053), section 3.
    """
    return _CopyToShards.apply(x, group)


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.rank, ctx.size = dist.get_rank(group), dist.get_world_size(group)
        return OverGroup(group).gather([x]).flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.chunk(ctx.size)[ctx.rank], None


def gather_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sequence-parallel parts [s / t, ...] of all ranks in rank order: [s, ...].

    The gradient of the result must be the same on every rank, as that of ``LazyLogits`` over this group is.
    """
    return _GatherSequence.apply(x, group)


def _lse_and_target(
    logits: Tensor, targets: Tensor, shard: VocabRange, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """[...] log-sum-exp over all shards, and the target's logit if this shard owns it, else 0."""
    valid = logits[..., : shard.valid_rows].to(result_dtype(logits.dtype))
    largest = valid.detach().amax(dim=-1)
    if group is not None:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    total = all_reduce((valid - largest.unsqueeze(-1)).exp().sum(dim=-1), group)
    row = target_rows(targets, shard)
    target_logit = valid.gather(-1, row.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return largest + total.log(), torch.where(row >= 0, target_logit, 0)


def nll_per_token(
    logits: Tensor, targets: Tensor, shard: VocabRange, group: dist.ProcessGroup | None = None
) -> Tensor:
    """[...] negative log-likelihoods, by an all-reduce of one number per token.

    Args:
        logits: [..., P] with at least one true id; fp32 statistics (fp64 for fp64).
        targets: [...] ids of the whole vocabulary, all of them valid.
        shard: the ids of ``logits``.
        group: tensor-parallel group.
    """
    lse, target_logit = _lse_and_target(logits, targets, shard, group)
    return lse - all_reduce(target_logit, group)


def nll_mean(
    logits: Tensor, targets: Tensor, shard: VocabRange, group: dist.ProcessGroup | None = None
) -> Tensor:
    """The mean of ``nll_per_token``, by an all-reduce of one scalar for the targets' logits."""
    lse, target_logit = _lse_and_target(logits, targets, shard, group)
    return lse.mean() - all_reduce(target_logit.mean(), group)
