"""The warm-up before the first microbatch: it launches every kernel of S, C1, T, TW and IB once.

A launch compiles its variant, 0.3 to 1.4 s each. In a pipeline all ranks would wait for each of them in turn;
here all ranks compile at the same time. Next: ``../kernels/launcher.py``, what a variant depends on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_vocabpar.layers.embedding import embedding_backward
from megatron_vocabpar.layers.extras.extra import join
from megatron_vocabpar.layers.gemm import result_dtype
from megatron_vocabpar.layers.kernels.dispatch import row_kernels
from megatron_vocabpar.layers.operands import ShardOptions, Tokens
from megatron_vocabpar.layers.output.plain import passes_of
from megatron_vocabpar.layers.partition import VocabRange
from megatron_vocabpar.layers.targets import ShardTargets
from megatron_vocabpar.layers.token_loss import loss_slopes


class _WithoutProducts(Tokens):
    """Tokens whose logits and products are 0: the weight may hold anything."""

    __slots__ = ()

    def logits(self, weight: Tensor, rows: slice, out: Tensor | None = None) -> Tensor:
        shape = rows.stop - rows.start, self.shard.rows
        return torch.zeros(shape, dtype=result_dtype(weight.dtype), device=weight.device, out=out)

    def input_gradient(self, e: Tensor, weight: Tensor, out: Tensor) -> None:
        out.zero_()

    def add_weight_gradient_(self, main_grad: Tensor, e: Tensor, x: Tensor, factor: Tensor | None) -> None:
        pass


def warm_up(
    weight: Tensor,
    main_grads: tuple[Tensor, Tensor],
    shard: VocabRange,
    options: ShardOptions,
    ranks: int,
    n: int,
) -> None:
    """Launch what a training with these sizes launches, but for what extras need.

    Args:
        weight: [P, H] of the output layer; its numbers do not matter.
        main_grads: [P, H] of the output and the input layer, to which 0 is added.
        shard, options: of S and T.
        ranks: how many shards there are.
        n: tokens of a microbatch, as many choose other kernels than few.
    """
    kernels = row_kernels(weight.device, result_dtype(weight.dtype))
    for tokens in {min(n, 2), n}:
        x = weight.new_zeros((tokens, weight.shape[1]))
        rows = torch.full((tokens,), -1, device=x.device)
        rows[:1] = 0 if shard.valid_rows else -1
        targets = ShardTargets(rows, rows[: 1 if shard.valid_rows else 0])
        state, stats = passes_of(_WithoutProducts(x, shard, targets, options, kernels), weight)
        assert state is not None
        softmax = join(torch.stack([stats] * ranks))
        slopes = loss_slopes(softmax, options.terms, torch.ones_like(softmax.total))
        state.input_gradient(softmax, slopes)
        state.add_weight_gradient(softmax, slopes, main_grads[0])
        if shard.rows:
            first = torch.zeros(tokens, dtype=torch.int64, device=x.device)
            embedding_backward(x, first, main_grads[1], torch.arange(tokens, device=x.device))
