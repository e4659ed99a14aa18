"""The warm-up before the first microbatch: it launches every kernel of S, C1, T, TW and IB once.

So it does with those of extras, and of an evaluation. A launch compiles its variant, 0.3 to 1.4 s each. In a
pipeline all ranks would wait for each of them in turn; here all ranks compile at the same time. Next:
``../kernels/launcher.py``, what a variant depends on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron_vocabpar.layers.embedding import embedding_backward
from megatron_vocabpar.layers.extras.extra import Extra, join
from megatron_vocabpar.layers.gemm import result_dtype
from megatron_vocabpar.layers.kernels.dispatch import row_kernels
from megatron_vocabpar.layers.numbers import Softmax
from megatron_vocabpar.layers.operands import ShardOptions, Tokens
from megatron_vocabpar.layers.output.naive import NaiveState, naive_sum
from megatron_vocabpar.layers.output.plain import passes_of
from megatron_vocabpar.layers.partition import VocabRange
from megatron_vocabpar.layers.stored import StoredExponentials
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


class _Curve(Extra):
    """In the place of a divergence, which needs a teacher: the slope of its number adds 0 to dY."""

    name = "divergence"
    has_curve = True

    def curve(self, stored: StoredExponentials, softmax: Softmax, slope: Tensor, rows: slice) -> Tensor:
        return slope.new_zeros((rows.stop - rows.start, stored.shard.valid_rows))


def warm_up(
    weight: Tensor,
    main_grads: tuple[Tensor, Tensor],
    shard: VocabRange,
    options: ShardOptions,
    ranks: int,
    n: int,
    extras: Sequence[Extra] = (),
    *,
    naive: bool = False,
) -> None:
    """Launch what a training with these sizes launches, and its evaluations.

    Args:
        weight: [P, H] of the output layer; its numbers do not matter.
        main_grads: [P, H] of the output and the input layer, to which 0 is added.
        shard, options: of S and T.
        ranks: how many shards there are.
        n: tokens of a microbatch, as many choose other kernels than few.
        extras: the further numbers, of which only the row kernel's matter.
        naive: S and S2 are those of ``naive.py``.
    """
    asked = [extra for extra in extras if extra.row_column is not None]
    asked += [_Curve()] if options.terms.distillation is not None else []
    kernels = row_kernels(weight.device, result_dtype(weight.dtype))
    for tokens in {min(n, 2), n}:
        x = weight.new_zeros((tokens, weight.shape[1]))
        rows = torch.full((tokens,), -1, device=x.device)
        rows[:1] = 0 if shard.valid_rows else -1
        targets = ShardTargets(rows, rows[: 1 if shard.valid_rows else 0])
        trained = _WithoutProducts(x, shard, targets, options, kernels)
        evaluated = trained._replace(options=replace(options, keep_state=False))
        state, stats = passes_of(evaluated, weight, asked)  # naive's S, too
        if naive:
            logits, k = trained.logits(weight, slice(0, tokens)), stats[:, 0].contiguous()
            naive_sum(NaiveState(evaluated, weight, logits), k)
            state, stats = naive_sum(NaiveState(trained, weight, logits), k)
        else:
            state, stats = passes_of(trained, weight, asked)
        assert state is not None
        softmax = join(torch.stack([stats] * ranks), asked)
        ones, nothing, terms = torch.ones_like(softmax.total), torch.zeros_like(softmax.total), options.terms
        state.input_gradient(softmax, loss_slopes(softmax, terms, ones))
        for name in options.gradients:
            state.input_gradient(softmax, loss_slopes(softmax, terms, nothing, {name: ones}))
        slopes = loss_slopes(softmax, terms, ones, dict.fromkeys(options.gradients, ones))
        state.add_weight_gradient(softmax, slopes, main_grads[0])
        if shard.rows:
            first = torch.zeros(tokens, dtype=torch.int64, device=x.device)
            embedding_backward(x, first, main_grads[1], torch.arange(tokens, device=x.device))
