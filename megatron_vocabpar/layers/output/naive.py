"""The passes S and S2 of naive (section 4.1): maximum and sum are reduced one by one. T is ``plain.py``'s.

naive_maximum | max k | naive_sum | stats | input_gradient, add_weight_gradient | dX |
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megatron_vocabpar.layers.gemm import exact, product
from megatron_vocabpar.layers.numbers import STATS_WIDTH
from megatron_vocabpar.layers.operands import (
    DEFAULT,
    ShardOptions,
    Targets,
    Tokens,
    exponentials_place,
    joined_slopes,
    tokens_of,
)
from megatron_vocabpar.layers.output.plain import OutputState
from megatron_vocabpar.layers.partition import VocabRange


@dataclass(frozen=True, slots=True)
class NaiveState:
    """What naive's S keeps for S2: the weight, and the logits themselves, [n, P] fp32 (fp64 for fp64)."""

    tokens: Tokens
    weight: Tensor
    logits: Tensor


@exact
def naive_maximum(
    x: Tensor,
    weight: Tensor,
    targets: Targets,
    shard: VocabRange,
    options: ShardOptions = DEFAULT,
) -> tuple[NaiveState, Tensor]:
    """Pass S of naive: logits and this shard's offsets; the arguments are ``output_forward``'s.

    Returns:
        ``(state, k)``: k is [n] fp32 (fp64 for fp64); the barrier takes its maximum over the ranks.

    Raises:
        ValueError: if shapes or dtypes do not fit one another; for smoothed labels.
    """
    if options.terms.needs_mean:
        raise ValueError(
            f"label smoothing {options.terms.label_smoothing}: naive has none; use vocab-1 or vocab-2"
        )
    tokens = tokens_of(x, weight, targets, shard, options)
    logits = product(x, weight.t())
    k = logits.new_empty(len(x))
    for rows in tokens.chunks:
        k[rows] = tokens.exponentials(logits[rows].clone(), rows).k
    return NaiveState(tokens, weight, logits), k


@exact
def naive_sum(
    state: NaiveState, global_k: Tensor, *, e: Tensor | None = None
) -> tuple[OutputState | None, Tensor]:
    """Pass S2 of naive: exponentials relative to the offsets of the whole vocabulary.

    Args:
        state: of ``naive_maximum``; not written to.
        global_k: [n] the largest offset of all shards.
        e: memory for the exponentials, as in ``output_forward``.

    Returns:
        As ``output_forward`` without A.
    """
    tokens, logits = state.tokens, state.logits
    e = exponentials_place(e, tokens.x, tokens.shard, tokens.storage) if tokens.options.keep_state else None
    stats = logits.new_empty((len(logits), STATS_WIDTH))
    slopes = []
    for rows in tokens.chunks:
        place = None if e is None else e[rows]
        part = tokens.exponentials(logits[rows].clone(), rows, place, offset=global_k, stats=stats)
        slopes.append(part.target_slope)
    if e is None:
        return None, stats
    return OutputState(tokens, state.weight, stats, e, joined_slopes(slopes), {}), stats
