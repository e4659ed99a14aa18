"""Floating-point operations of a model, per token: the one place that counts them.

A multiplication and an addition count as two; attention is not halved for its causal mask; nothing is
recomputed. For a GPT this is the paper's Table 4, after Narayanan et al., Efficient Large-Scale Language
Model Training (2021). Other models are made of the same products: ``plan/model.py``.
"""

from __future__ import annotations

STEP = 3  # a training step over its forward pass: backward has two products for each of forward's


def product_flops(weights: float) -> float:
    """Operations of a product with so many weights, forward."""
    return 2 * weights


def attention_flops(keys: float, width: float) -> float:
    """Operations of the scores and of their use, forward; ``width``: of queries and output together."""
    return 2 * keys * width


def layer_flops(hidden: int, seq_length: int) -> float:
    """Operations of one transformer layer of a GPT, forward and backward (Table 4, over ``b s``)."""
    return STEP * (product_flops(12 * hidden**2) + attention_flops(seq_length, 2 * hidden))


def output_flops(hidden: int, vocab_size: int) -> float:
    """Operations of the output layer, forward and backward (Table 4)."""
    return STEP * product_flops(hidden * vocab_size)


def input_flops(hidden: int) -> float:
    """Operations of the input layer, forward and backward (Table 4)."""
    return 3 * hidden


def model_flops(layers: int, hidden: int, seq_length: int, vocab_size: int) -> float:
    """Operations of a GPT's training step without the input layer: what MFU counts (appendix F)."""
    return layers * layer_flops(hidden, seq_length) + output_flops(hidden, vocab_size)
