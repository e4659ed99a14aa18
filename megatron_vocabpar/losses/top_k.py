"""The k most likely ids of sharded logits. Next: ``kl.py``, which compares with them."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from megatron_vocabpar.layers.bins import TopLogprobs
from megatron_vocabpar.layers.exponents import subtract_power_log_
from megatron_vocabpar.layers.extras.top import joined_top, shard_top
from megatron_vocabpar.layers.partition import VocabRange
from megatron_vocabpar.losses.arguments import Layout, leading_shape, prepare
from megatron_vocabpar.losses.sources import Logits
from megatron_vocabpar.losses.summary import normaliser_of, of_chunks


def vocab_top(logits: Logits, k: int, **layout: Unpack[Layout]) -> TopLogprobs:
    """The k most likely ids of every token and their log-probabilities, most likely first; no gradient.

    Args:
        logits, layout: as in ``vocab_logprobs``; ``softcap`` and ``temperature`` are applied.
        k: 1 up to the size of the vocabulary.

    Returns:
        logprobs [..., k] fp32 (fp64 for fp64) and ids [..., k] int64, the same on every rank.

    Raises:
        ValueError: naming the argument that does not fit.
    """
    call, tensors = prepare(logits, {**layout, "inference_only": True, "invariant": False})
    if not 1 <= k <= call.vocab_size:
        raise ValueError(f"the {k} most likely ids of {call.vocab_size}: give 1 up to {call.vocab_size}")
    source = call.source(tensors)
    softmax = normaliser_of(call, source)

    def largest(y: Tensor, shard: VocabRange, rows: slice) -> Tensor:
        return shard_top(y, k, shard)

    top, ids = joined_top(call.exchange.gather(of_chunks(call, source, largest)))
    logs = subtract_power_log_(top.to(softmax.total.dtype), softmax.offset.unsqueeze(1))
    logs = logs.sub_(softmax.total.log().unsqueeze(1))
    shape = (*leading_shape(logits), k)
    return TopLogprobs(logs.view(shape), ids.long().view(shape))
