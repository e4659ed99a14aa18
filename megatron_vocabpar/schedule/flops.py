"""Floating-point operations of a GPT.

Counts are those of the paper's Table 4, after Narayanan et al. (2021): a training step, forward and backward,
nothing recomputed, attention not halved for its causal mask, multiplication and addition counted as two.
"""

from __future__ import annotations


def layer_flops(hidden: int, seq_length: int) -> int:
    """Operations of one transformer layer, forward and backward, per token (Table 4, over ``b s``)."""
    return hidden * (72 * hidden + 12 * seq_length)


def output_flops(hidden: int, vocab_size: int) -> int:
    """Operations of the output layer, forward and backward, per token (Table 4)."""
    return 6 * hidden * vocab_size


def input_flops(hidden: int) -> int:
    """Operations of the input layer, forward and backward, per token (Table 4)."""
    return 3 * hidden


def model_flops(layers: int, hidden: int, seq_length: int, vocab_size: int) -> int:
    """Operations of a training step per token: what MFU counts (appendix F), without the input layer."""
    return layers * layer_flops(hidden, seq_length) + output_flops(hidden, vocab_size)
