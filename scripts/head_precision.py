"""How accurate the output layer is with 16-bit and with 8-bit products, by the probability of the target.

    python scripts/head_precision.py [FILE]

FILE is what ``torch.save`` wrote: {"x": [n, H] hidden states, "w": [V, H] output weight, "t": [n] targets};
without it both are Gaussian. Operands are rounded to bfloat16; the reference is float64 on those.
"""

from __future__ import annotations

import sys
from itertools import pairwise

import torch
from torch import Tensor

from megatron_vocabpar.layers.fp8 import MXFP8, ROW, Fp8Recipe, Fp8Weight
from megatron_vocabpar.layers.output import input_gradient, output_forward
from megatron_vocabpar.layers.partition import VocabRange
from megatron_vocabpar.layers.softmax_stats import merge_stats

BINS = (0.0, 1e-6, 1e-4, 1e-2, 0.1, 0.5, 0.9, 0.99, 0.999, 1.0)
HEADS = {"bf16": None, "fp8": ROW, "mxfp8": MXFP8}
TOKENS, HIDDEN, VOCABULARY = 4096, 1024, 8192


def gaussian() -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states of many sizes, for flat and for certain predictions; half of them come true."""
    torch.manual_seed(0)
    weight = torch.randn(VOCABULARY, HIDDEN) / HIDDEN**0.5
    x = torch.randn(TOKENS, HIDDEN) * torch.logspace(-1, 1.3, TOKENS).unsqueeze(1)
    targets = (x @ weight.t()).argmax(1)
    drawn = torch.randint(0, VOCABULARY, (TOKENS,))
    return x, weight, torch.where(torch.arange(TOKENS) % 2 == 0, targets, drawn)


def reference(x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability [n] and dX [n, H] of the summed loss, in float64."""
    x, weight = x.double(), weight.double()
    logs = torch.log_softmax(x @ weight.t(), dim=1)
    probabilities = logs.exp()
    probabilities.scatter_(1, targets.unsqueeze(1), 0)
    rest = probabilities.sum(1, keepdim=True)  # 1 - p_target, without cancellation
    dx = probabilities @ weight - rest * weight[targets]
    return logs.gather(1, targets.unsqueeze(1)).squeeze(1), dx


def measured(x: Tensor, weight: Tensor, targets: Tensor, recipe: Fp8Recipe | None) -> tuple[Tensor, Tensor]:
    """The same by the output layer."""
    shard = VocabRange(0, len(weight), len(weight))
    quantised = None if recipe is None else Fp8Weight.of(weight, shard, recipe)
    state, stats = output_forward(x, weight, targets, shard, with_input_gradient=True, fp8=quantised)
    assert state is not None
    merged = merge_stats(stats.unsqueeze(0))
    return -merged.loss, input_gradient(state, merged, torch.ones(len(x)), weight)


def main(file: str | None) -> None:
    data = torch.load(file) if file else dict(zip("xwt", gaussian(), strict=True))
    x, weight, targets = data["x"].bfloat16(), data["w"].bfloat16(), data["t"]
    log_p, dx = reference(x, weight, targets)
    columns = []
    for recipe in HEADS.values():
        got_log_p, got_dx = measured(x, weight, targets, recipe)
        row_errors = (got_dx.double() - dx).norm(dim=1) / dx.norm(dim=1)
        columns.append(((got_log_p.double() - log_p).abs(), row_errors))
    names = [f"{what}, {head}" for what in ("log p", "dX") for head in HEADS]
    print(f"| p_target | tokens | {' | '.join(names)} |")
    print(f"| --- |{' ---: |' * (1 + len(names))}")
    for low, high in pairwise(BINS):
        here = (log_p.exp() >= low) & ((log_p.exp() < high) | (high == 1.0))
        if here.any():
            logs = [f"{float(error[here].square().mean().sqrt()):.1e}" for error, _ in columns]
            rows = [f"{float(error[here].median()):.1e}" for _, error in columns]
            print(f"| {low:g} to {high:g} | {int(here.sum())} | {' | '.join(logs + rows)} |")


if __name__ == "__main__":
    main(*sys.argv[1:2] or [None])
