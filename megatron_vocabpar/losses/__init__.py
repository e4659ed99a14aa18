"""Losses on a vocabulary that is split over ranks: values and gradients without full logits.

    from megatron_vocabpar.losses import LazyLogits, vocab_logprobs
    logprobs = vocab_logprobs(logits_shard, targets, group=tp_group)                  # logits exist
    logprobs = vocab_logprobs(LazyLogits(hidden, weight_shard), targets, group=tp_group)  # never made whole

Start with ``functions.py``; then ``summary.py`` (the mathematics), ``exchange.py`` (one process or many),
``kl.py`` (divergences), ``reductions.py`` (masks and denominators), ``zigzag.py`` (context parallelism),
``compat/roll.py`` (the signatures of ROLL).
"""

from megatron_vocabpar.layers.bins import TopLogprobs
from megatron_vocabpar.losses.functions import (
    vocab_argmax,
    vocab_cross_entropy,
    vocab_entropy,
    vocab_logprobs,
    vocab_logprobs_and_entropy,
    vocab_target_rank,
    vocab_top,
)
from megatron_vocabpar.losses.kl import vocab_kl
from megatron_vocabpar.losses.sources import LazyLogits

__all__ = [
    "LazyLogits",
    "TopLogprobs",
    "vocab_argmax",
    "vocab_cross_entropy",
    "vocab_entropy",
    "vocab_kl",
    "vocab_logprobs",
    "vocab_logprobs_and_entropy",
    "vocab_target_rank",
    "vocab_top",
]
