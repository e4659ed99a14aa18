"""The statistics of a softmax: one packed tensor that ranks exchange, and one merge.

Each rank sends four numbers per token; every rank combines all of them in rank order, so all ranks have
bitwise the same loss and scales. Three dependent all-reduces (maximum, sum, target logit) become one gather.

Per shard r and token i, with the target's own term left out of the sum:

    k       integer offset of the shard, a power of two
    S_rest  sum over the shard's ids, but for the target, of exp(Y_ij) / 2^k
    target  the target's logit where the shard owns the target, else 0
    owner   1 where the shard owns the target, else 0

With K the largest exponent of all, ``S = sum_r 2^(k_r - K) S_rest_r + exp(Y_target) / 2^K`` and

    loss = log(S) + (K ln 2 - Y_target)        p_target - 1 = -S_rest / S

The second has no cancellation: it keeps all digits even if p_target is 1 - 1e-30.

Source: section 4.3 (equations 1 to 6) of the paper, with powers of two in place of maxima.
Next: ``extras/extra.py``, further numbers; ``output/plain.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_vocabpar.layers.fixed_point import WHOLE_WIDTH, join_whole
from megatron_vocabpar.layers.kernels.dispatch import merge
from megatron_vocabpar.layers.numbers import STATS_WIDTH, Softmax, empty_softmax


def softmax_place(stats: Tensor) -> Softmax:
    """Uninitialised memory for the result of ``merge_stats``, such as that of another stream.

    Args:
        stats: one shard's statistics.
    """
    n, width = stats.shape
    if stats.dtype != torch.int64:
        return empty_softmax(n, stats.dtype, stats.device)
    dtype = torch.float32 if width == WHOLE_WIDTH else torch.float64
    return empty_softmax(n, dtype, stats.device, whole=True)


def merge_stats(gathered: Tensor, *, out: Softmax | None = None) -> Softmax:
    """Combine the statistics of all shards, in rank order.

    Args:
        gathered: [R, n, 4] packed statistics of R shards, fp32 or fp64; or those of ``output/invariant.py``,
            [R, n, 7] int64 ([R, n, 8] for fp64). Empty and all-padding shards may be among them.
        out: from ``softmax_place``, for the result; None allocates.

    Returns:
        The softmax of all shards. A token whose every logit is -inf, or whose target's logit is -inf, has
        nll inf; a logit of NaN or +inf, the target's or another, gives NaN.

    Raises:
        ValueError: if the shape or the dtype is another.
    """
    whole = gathered.dtype == torch.int64
    widths = (WHOLE_WIDTH, WHOLE_WIDTH + 1) if whole else (STATS_WIDTH,)
    if gathered.dim() != 3 or gathered.shape[0] < 1 or gathered.shape[2] not in widths:
        raise ValueError(
            f"gathered statistics of shape {tuple(gathered.shape)}: "
            f"stack the [n, {widths[0]}] statistics of every rank to [ranks, n, {widths[0]}]"
        )
    weight_peak = None
    if whole:
        dtype = torch.float32 if gathered.shape[2] == WHOLE_WIDTH else torch.float64
        gathered, weight_peak, _ = join_whole(gathered[..., :WHOLE_WIDTH], dtype)
    if gathered.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"statistics in {gathered.dtype}: exchange them as float32 (float64 for float64)")
    if out is not None and (out.nll.shape != gathered.shape[1:2] or out.nll.dtype != gathered.dtype):
        raise ValueError(
            f"place for {tuple(out.nll.shape)} {out.nll.dtype} of the statistics of {gathered.shape[1]} "
            f"tokens in {gathered.dtype}: take it from softmax_place()"
        )
    if weight_peak is not None and out is not None and out.weight_peak is not None:
        weight_peak = out.weight_peak.copy_(weight_peak)
    softmax = merge(gathered, out)
    return softmax if weight_peak is None else softmax._replace(weight_peak=weight_peak)
