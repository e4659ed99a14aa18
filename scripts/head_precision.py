"""How accurate the output layer is with 16-bit and with 8-bit products, by the probability of the target.

    python scripts/head_precision.py [FILE | gaussian | heavy-tailed]

FILE is what ``torch.save`` wrote: {"x": [n, H] hidden states, "w": [V, H] output weight, "t": [n] targets};
without it they are drawn. Operands are rounded to bfloat16; the reference is float64 on those.
"""

from __future__ import annotations

import sys
from itertools import pairwise

import torch
from torch import Tensor

from megatron_vocabpar.layers.fp8 import Fp8Weight
from megatron_vocabpar.layers.numbers import Slopes, Softmax
from megatron_vocabpar.layers.operands import ShardOptions
from megatron_vocabpar.layers.output.plain import OutputState, output_forward
from megatron_vocabpar.layers.partition import VocabRange
from megatron_vocabpar.layers.softmax_stats import merge_stats

BINS = (0.0, 1e-6, 1e-4, 1e-2, 0.1, 0.5, 0.9, 0.99, 0.999, 1.0)
HEADS = {"bf16": False, "fp8": True}
TOKENS, HIDDEN, VOCABULARY = 4096, 1024, 8192
LAST = 512


def drawn(heavy_tailed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states of many sizes, for flat and for certain predictions; half of them come true.

    Heavy-tailed weights and hidden states have Student's distribution with 3 degrees of freedom: a few
    features are dozens of times as large as the others, as in trained models.
    """
    torch.manual_seed(0)

    def draw(*shape: int) -> Tensor:
        normal = torch.randn(shape)
        return normal * (3 / torch.randn(3, *shape).square().sum(0)).sqrt() if heavy_tailed else normal

    weight = draw(VOCABULARY, HIDDEN) / HIDDEN**0.5
    x = draw(TOKENS, HIDDEN) * torch.logspace(-1, 0.7 if heavy_tailed else 1.3, TOKENS).unsqueeze(1)
    targets = (x @ weight.t()).argmax(1)
    others = torch.randint(0, VOCABULARY, (TOKENS,))
    return x, weight, torch.where(torch.arange(TOKENS) % 2 == 0, targets, others)


def reference(x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability [n] and dX [n, H] of the summed loss, in float64."""
    x, weight = x.double(), weight.double()
    logs = torch.log_softmax(x @ weight.t(), dim=1)
    probabilities = logs.exp()
    probabilities.scatter_(1, targets.unsqueeze(1), 0)
    rest = probabilities.sum(1, keepdim=True)  # 1 - p_target, without cancellation
    dx = probabilities @ weight - rest * weight[targets]
    return logs.gather(1, targets.unsqueeze(1)).squeeze(1), dx


def computed(x: Tensor, weight: Tensor, targets: Tensor, in_8_bits: bool) -> tuple[OutputState, Softmax]:
    """What S leaves, and the softmax, on one shard."""
    shard = VocabRange(0, len(weight), len(weight))
    quantised = Fp8Weight.of(weight, shard) if in_8_bits else None
    options = ShardOptions(with_input_gradient=True, fp8_weight=quantised)
    state, stats = output_forward(x, weight, targets, shard, options)
    assert state is not None
    return state, merge_stats(stats.unsqueeze(0))


def unlikely(x: Tensor, weight: Tensor, targets: Tensor) -> None:
    """Print how far dW of the ids is off that are no target."""
    others = torch.ones(len(weight), dtype=torch.bool)
    others[targets] = False
    expected = (torch.softmax(x.double() @ weight.double().t(), 1).t() @ x.double())[others]
    print(f"\ndW of the last {len(x)} tokens, rows of the {len(expected)} ids that are no target:")
    for name, in_8_bits in HEADS.items():
        got = torch.zeros(weight.shape)
        state, softmax = computed(x, weight, targets, in_8_bits)
        state.add_weight_gradient(softmax, Slopes(torch.ones(len(x))), got)
        errors = (got[others].double() - expected).norm(dim=1) / expected.norm(dim=1)
        zero = (got[others] == 0).all(1).float().mean()
        print(f"{name}: median error {float(errors.median()):.1e}, {100 * float(zero):.1f} % are zero")


def main(source: str = "gaussian") -> None:
    if source in ("gaussian", "heavy-tailed"):
        data = dict(zip("xwt", drawn(source == "heavy-tailed"), strict=True))
    else:
        data = torch.load(source)
    x, weight, targets = data["x"].bfloat16(), data["w"].bfloat16(), data["t"]
    log_p, dx = reference(x, weight, targets)
    print(f"largest logit: {float((x.float() @ weight.float().t()).abs().max()):.0f}\n")
    columns = []
    for in_8_bits in HEADS.values():
        state, softmax = computed(x, weight, targets, in_8_bits)
        got_dx = state.input_gradient(softmax, Slopes(torch.ones(len(x))))
        row_errors = (got_dx.double() - dx).norm(dim=1) / dx.norm(dim=1)
        columns.append(((-softmax.nll.double() - log_p).abs(), row_errors))
    names = [f"{what}, {head}" for what in ("log p", "dX") for head in HEADS]
    print(f"| p_target | tokens | {' | '.join(names)} |")
    print(f"| --- |{' ---: |' * (1 + len(names))}")
    for low, high in pairwise(BINS):
        here = (log_p.exp() >= low) & ((log_p.exp() < high) | (high == 1.0))
        if here.any():
            logs = [f"{float(error[here].square().mean().sqrt()):.1e}" for error, _ in columns]
            rows = [f"{float(error[here].median()):.1e}" for _, error in columns]
            print(f"| {low:g} to {high:g} | {int(here.sum())} | {' | '.join(logs + rows)} |")
    unlikely(x[-LAST:], weight, targets[-LAST:])


if __name__ == "__main__":
    main(*sys.argv[1:2])
