"""From the arguments of a public loss to one checked call: shapes, dtypes, shards, targets.

Wrong arguments are refused here, before any communication. Next: ``functions.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vocabpar.layers.extras.entropy import Entropy
from megatron_vocabpar.layers.extras.mean import Mean
from megatron_vocabpar.layers.gemm import result_dtype
from megatron_vocabpar.layers.numbers import Summary
from megatron_vocabpar.layers.partition import VocabRange
from megatron_vocabpar.layers.terms import LossTerms
from megatron_vocabpar.losses.exchange import local_ranges, make_exchange
from megatron_vocabpar.losses.realign import Realign, aligned_ranges
from megatron_vocabpar.losses.sources import LazyLogits, Logits
from megatron_vocabpar.losses.summary import LossCall, SoftmaxSummary


class Layout(TypedDict, total=False):
    """The keyword arguments that every loss shares.

    Attributes:
        group: process group whose ranks hold the shards; None if all shards are in this process.
        ranges: rows of each shard: all ranks' ranges, or this rank's alone; None for even shards.
        vocab_size: true ids if ``ranges`` is None; None counts every row.
        temperature: divides the logits.
        softcap: c bounds the logits as in Gemma 2, c tanh(y / c), before the temperature divides them; a
            logit of -inf becomes -c.
        inference_only: keep nothing for a backward pass; results carry no gradient.
        invariant: results do not depend on the sharding, nor on the batch around a token, bit for bit;
            slower.
        keep_exponentials: keep them from the forward to the backward pass, in the memory of the gradient:
            faster, and for one backward pass alone. Has an effect on fp32 and fp64 logits that exist, without
            padding, ``softcap`` or ``invariant``.
        rows_per_chunk: tokens worked on at one time; None bounds a chunk to 32 MiB, on the CPU to 256 KiB
            of logits that exist (4 MiB with ``softcap``, ``invariant``, label smoothing, in ``vocab_kl``) and
            8 MiB of others. Triton's kernels take logits that exist whole, but in ``vocab_kl``.
    """

    group: dist.ProcessGroup | None
    ranges: Sequence[VocabRange] | VocabRange | None
    vocab_size: int | None
    temperature: float
    softcap: float | None
    inference_only: bool
    invariant: bool
    keep_exponentials: bool
    rows_per_chunk: int | None


def leading_shape(logits: Logits) -> torch.Size:
    """The tokens' shape: the logits', or the hidden states', without the last dimension."""
    return _tensors(logits)[0].shape[:-1]


def summarise(
    logits: Logits,
    targets: Tensor | None,
    layout: Layout,
    *,
    ignore_index: int = -100,
    entropy: bool = False,
    mean: bool = False,
) -> tuple[Summary, Tensor | None]:
    """Run ``SoftmaxSummary`` on checked arguments.

    Returns:
        The summary in the tokens' shape, and which tokens count (targets other than ``ignore_index``).

    Raises:
        ValueError: naming the argument that does not fit.
    """
    call, tensors = prepare(logits, layout, entropy=entropy, mean=mean)
    shape = leading_shape(logits)
    if targets is None:
        flat, counted = tensors[0].new_full((shape.numel(),), -1, dtype=torch.int64), None
    else:
        flat, counted = check_targets(targets, shape, ignore_index, call.ranges[0].vocab_size)
    logprob, lse, *extras = (result.view(shape) for result in SoftmaxSummary.apply(call, flat, *tensors))
    names = (extra.name for extra in call.extras)
    return Summary(logprob, lse, dict(zip(names, extras, strict=True))), counted


def prepare(
    logits: Logits, layout: Layout, *, entropy: bool = False, mean: bool = False
) -> tuple[LossCall, tuple[Tensor, ...]]:
    """The call and its tensors: hidden states then weight shards, or shards of logits."""
    tensors = _tensors(logits)
    lazy = isinstance(logits, LazyLogits)
    shards = tensors[1:] if lazy else tensors
    _check_shards(tensors, lazy)
    temperature = float(layout.get("temperature", 1.0))
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature {temperature}: give a positive number")
    softcap = layout.get("softcap")
    LossTerms(softcap=softcap)  # raises unless it is a bound
    # The temperature divides what the cap gives: c tanh(y / c) / T.
    terms = LossTerms(logit_scale=1 / temperature, softcap=None if softcap is None else softcap / temperature)
    invariant = layout.get("invariant", False)
    exchange = make_exchange(layout.get("group"), len(shards))
    widths = [shard.shape[0] if lazy else shard.shape[-1] for shard in shards]
    ranges = local_ranges(exchange, widths, layout.get("ranges"), layout.get("vocab_size"), tensors[0].device)
    keep = not layout.get("inference_only", False) and torch.is_grad_enabled()
    if not keep:
        tensors = tuple(tensor.detach() for tensor in tensors)
    if lazy and invariant:
        homes = aligned_ranges(exchange, ranges, tensors[1:])
        tensors = (tensors[0], *Realign.apply(exchange, ranges, homes, *tensors[1:]))
        ranges = homes
    wide = result_dtype(tensors[0].dtype) == tensors[0].dtype and not lazy and not invariant
    plain = wide and softcap is None and all(shard.valid_rows == shard.rows for shard in ranges)
    call = LossCall(
        exchange=exchange,
        ranges=ranges,
        lazy=lazy,
        terms=terms,
        extras=(*([Entropy()] if entropy else []), *([Mean(ranges[0].vocab_size)] if mean else [])),
        invariant=invariant,
        rows_per_chunk=layout.get("rows_per_chunk"),
        keep=keep,
        keep_exponentials=keep and plain and layout.get("keep_exponentials", False),
    )
    return call, tensors


def check_targets(
    targets: Tensor, shape: torch.Size, ignore_index: int, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """[n] ids with -1 for ignored tokens, and which tokens count, in the targets' shape.

    For an id outside the vocabulary on a GPU the host would wait for the device; there it is an assertion of
    the device, as in PyTorch's cross entropy: the next call that waits for the device raises RuntimeError.

    Raises:
        ValueError: for another shape, a dtype that is no integer, or (CPU) an id outside the vocabulary.
    """
    if targets.shape != shape:
        raise ValueError(f"targets of shape {tuple(targets.shape)}: the tokens have {tuple(shape)}")
    if targets.dtype.is_floating_point or targets.dtype == torch.bool:
        raise ValueError(f"targets in {targets.dtype}: give integer ids")
    counted = targets != ignore_index
    ids = torch.where(counted, targets.long(), -1)
    outside = counted & ((targets < 0) | (targets >= vocab_size))
    remedy = (
        f"outside the vocabulary of {vocab_size} ids; mark tokens to skip with ignore_index ({ignore_index})"
    )
    if targets.is_cuda:
        torch._assert_async(~outside.any(), f"a target id is {remedy}")
    elif outside.any():
        raise ValueError(f"target id {int(targets[outside][0])} is {remedy}")
    return ids.reshape(-1), counted


def _tensors(logits: Logits) -> tuple[Tensor, ...]:
    if isinstance(logits, LazyLogits):
        return (logits.hidden, *logits.weights)
    return (logits,) if isinstance(logits, Tensor) else tuple(logits)


def _check_shards(tensors: Sequence[Tensor], lazy: bool) -> None:
    if not tensors or (lazy and len(tensors) < 2):
        raise ValueError("no shards: give the logits (or weight rows) of at least one rank")
    first = tensors[0]
    result_dtype(first.dtype)
    for tensor in tensors:
        if tensor.dim() < 2:
            raise ValueError(f"a shard of shape {tuple(tensor.shape)}: need tokens and a last dimension")
        if tensor.dtype != first.dtype or tensor.device != first.device:
            raise ValueError(
                f"{tensor.dtype} on {tensor.device} beside {first.dtype} on {first.device}: use one dtype "
                "and one device"
            )
        if lazy and (tensor.shape[-1] != first.shape[-1] or (tensor is not first and tensor.dim() != 2)):
            raise ValueError(
                f"hidden {tuple(first.shape)} and weight {tuple(tensor.shape)}: need [..., H], [P, H]"
            )
        if not lazy and tensor.shape[:-1] != first.shape[:-1]:
            raise ValueError(
                f"shards of shapes {tuple(first.shape)} and {tuple(tensor.shape)}: give the same tokens"
            )
