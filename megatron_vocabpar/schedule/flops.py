"""Floating-point operations of a GPT, and what a device can do: all that MFU needs.

Counts are those of the paper's Table 4, after Narayanan et al. (2021): a training step, forward and backward,
nothing recomputed, attention not halved for its causal mask, multiplication and addition counted as two.
"""

from __future__ import annotations

PEAK_FLOPS = {
    "A100": 312e12,
    "A800": 312e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "GH200": 989e12,
    "H200": 989e12,
    "H20": 148e12,
    "B200": 2250e12,
}
"""Dense bf16 operations a second (data sheets), by a part of what ``torch.cuda.get_device_name`` gives."""


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


def peak_flops(device: str) -> float:
    """Operations a second of a device with this name.

    Raises:
        ValueError: if the table has none.
    """
    for name in sorted(PEAK_FLOPS, key=len, reverse=True):
        if name in device:
            return PEAK_FLOPS[name]
    raise ValueError(f"no peak FLOP/s are known for the device {device!r}: give --peak-tflops")
