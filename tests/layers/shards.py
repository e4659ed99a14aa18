"""All ranks of one output layer in one process: the shards are looped over, reductions are sums here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_vocabpar.layers.extras.extra import Extra, join
from megatron_vocabpar.layers.extras.mean import Mean
from megatron_vocabpar.layers.numbers import Slopes, Softmax
from megatron_vocabpar.layers.operands import ShardOptions
from megatron_vocabpar.layers.output.naive import naive_maximum, naive_sum
from megatron_vocabpar.layers.output.plain import OutputState, output_forward
from megatron_vocabpar.layers.partition import VocabRange
from megatron_vocabpar.layers.terms import PLAIN, LossTerms
from megatron_vocabpar.layers.token_loss import loss_slopes

METHODS = ("naive", "vocab-1", "vocab-2")


@dataclass(frozen=True)
class Result:
    """The whole layer's result, shards joined; dw holds padding rows too."""

    loss: Tensor
    dx: Tensor
    dw: Tensor


def split(weight: Tensor, ranges: Sequence[VocabRange]) -> list[Tensor]:
    """Each rank's rows; padding rows that ``weight`` lacks are NaN, since nothing may read them."""
    padding = weight.new_full((ranges[-1].stop - len(weight), weight.shape[1]), torch.nan)
    padded = torch.cat((weight, padding))
    return [padded[shard.start : shard.stop].clone() for shard in ranges]


def extras_of(terms: LossTerms, weight: Tensor, shard: VocabRange) -> list[Extra]:
    """What the terms of a loss need on a shard."""
    return [Mean(shard.vocab_size, weight, shard, terms.logit_scale)] if terms.needs_mean else []


def forward(
    method: str,
    x: Tensor,
    weights: Sequence[Tensor],
    targets: Tensor,
    ranges: Sequence[VocabRange],
    rows_per_chunk: int | None = None,
    terms: LossTerms = PLAIN,
    recompute: bool = False,
) -> tuple[list[OutputState], Softmax]:
    """S (and S2) of every rank and the merge of their statistics."""
    pairs = list(zip(weights, ranges, strict=True))
    options = ShardOptions(
        with_input_gradient=method == "vocab-2",
        rows_per_chunk=rows_per_chunk,
        recompute=recompute,
        terms=terms,
    )
    if method == "naive":
        begun = [naive_maximum(x, w, targets, shard, options) for w, shard in pairs]
        largest = torch.stack([k for _, k in begun]).amax(dim=0)
        done = [naive_sum(state, largest) for state, _ in begun]
    else:
        done = [
            output_forward(x, w, targets, shard, options, extras=extras_of(terms, w, shard))
            for w, shard in pairs
        ]
    states = [state for state, _ in done if state is not None]
    assert len(states) == len(ranges)
    return states, join(torch.stack([stats for _, stats in done]), extras_of(terms, *pairs[0]))


def backward(
    states: Sequence[OutputState],
    softmax: Softmax,
    slopes: Slopes,
    weights: Sequence[Tensor],
    main_grad_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """dX summed over the ranks, in their order, and dW of all rows."""
    dx = torch.stack([state.input_gradient(softmax, slopes) for state in states])
    main_grads = [torch.zeros_like(w, dtype=main_grad_dtype or dx.dtype) for w in weights]
    for state, main_grad in zip(states, main_grads, strict=True):
        state.add_weight_gradient(softmax, slopes, main_grad)
    return dx.sum(dim=0), torch.cat(main_grads)


def both_gradients(
    state: OutputState, softmax: Softmax, slopes: Slopes, weight: Tensor, main_grad: Tensor
) -> Tensor:
    """This shard's part of dX; dW is added to ``main_grad``."""
    state.add_weight_gradient(softmax, slopes, main_grad)
    return state.input_gradient(softmax, slopes)


def run(
    method: str,
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    g: Tensor,
    ranges: Sequence[VocabRange],
    rows_per_chunk: int | None = None,
) -> Result:
    """Forward and backward of every rank."""
    weights = split(weight, ranges)
    states, softmax = forward(method, x, weights, targets, ranges, rows_per_chunk)
    return Result(softmax.nll, *backward(states, softmax, loss_slopes(softmax, PLAIN, g), weights))
