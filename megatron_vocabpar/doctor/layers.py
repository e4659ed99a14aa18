"""Checks one shard's output layer, with the vendor's 16-bit products and fp32 results, against float64."""

from __future__ import annotations

import torch

from megatron_vocabpar.doctor.result import Finding
from megatron_vocabpar.layers.partition import VocabRange
from megatron_vocabpar.measure.output_layer import METHODS, OutputLayer, errors, refusal

LIMIT_OF_DW = {torch.float32: 1e-5, torch.bfloat16: 1e-3, torch.float16: 2e-4}
"""Norm of the error over the norm of dW; at least ten times what it is on the CPU."""


def output_layer(
    device: str, dtype: str, n: int = 512, hidden: int = 512, rows: int = 8192, padding: int = 0
) -> Finding:
    """Whether losses, dX and dW's norm of every method are within the documented bounds; padding has no dW.

    Args:
        rows: of the weight shard, with ``padding`` rows at its end.
    """
    kind = getattr(torch, dtype)
    shard = VocabRange(0, rows, rows - padding)
    layer = OutputLayer(n, hidden, shard, torch.device(device), kind)
    exact, exact_dw = layer.exact(0), _exact_dw(layer)
    worst = {"log-probability": 0.0, "dX": 0.0, "dW": 0.0}
    for method in METHODS:
        layer.main_grad.zero_()
        softmax, dx = layer.both(0, method)
        rms, by_p_target = errors(softmax.nll, dx, exact)
        dw_of_rows = layer.main_grad[: shard.valid_rows].double()
        dw = float((dw_of_rows - exact_dw).norm() / exact_dw.norm())
        sizes = {"log-probability": rms, "dX": max(by_p_target.values()), "dW": dw}
        worst = {name: max(value, sizes[name]) for name, value in worst.items()}
        reason = refusal(rms, by_p_target)
        if reason is None and not dw < LIMIT_OF_DW[kind]:
            reason = f"the error of dW is {dw:.1e}, above {LIMIT_OF_DW[kind]:.0e}"
        if reason is None and bool(layer.main_grad[shard.valid_rows :].any()):
            reason = "padding rows have a gradient"
        if reason is not None:
            return Finding("failed", "", f"{method}: {reason}")
    return Finding("ok", "errors " + ", ".join(f"{name} {value:.0e}" for name, value in worst.items()))


def _exact_dw(layer: OutputLayer) -> torch.Tensor:
    """dW of the true rows in float64, of all tokens."""
    x, weight = layer.inputs[0].x.double(), layer.weight[: layer.shard.valid_rows].double()
    difference = torch.softmax(x @ weight.t(), 1)
    difference[torch.arange(len(x)), layer.inputs[0].targets] -= 1
    return (difference * layer.g.double().unsqueeze(1)).t() @ x
