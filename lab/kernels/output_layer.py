"""One shard's output layer with inputs, and the distance of its results from float64.

The shard owns every target, the most work that a shard can have; there is no communication. Read
``layers/output/plain.py`` first. ``measured.py`` times it.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from lab.timing import ROTATED
from megatron_vocabpar.layers.numbers import Slopes, Softmax
from megatron_vocabpar.layers.operands import ShardOptions
from megatron_vocabpar.layers.output import invariant
from megatron_vocabpar.layers.output.invariant import BlockState
from megatron_vocabpar.layers.output.plain import (
    OutputState,
    output_forward,
)
from megatron_vocabpar.layers.partition import VocabRange
from megatron_vocabpar.layers.softmax_stats import merge_stats
from megatron_vocabpar.layers.targets import shard_targets
from megatron_vocabpar.schedule.words.methods import VOCAB_1, VOCAB_2

BUCKETS = (0.0, 0.1, 0.5, 0.9, 0.99, 0.999, 1.0)
"""Edges of the target's probability, within which errors of dX are reported."""

_CHECKED_TOKENS = 64


@dataclass(frozen=True)
class Mode:
    """How S and T run: whether S computes A, T recomputes the logits, results are the same for every p."""

    with_a: bool = False
    recompute: bool = False
    invariant: bool = False


METHODS = {
    VOCAB_1: Mode(),
    VOCAB_2: Mode(with_a=True),
    "vocab-1-recompute": Mode(recompute=True),
    "vocab-1-invariant": Mode(invariant=True),
}


class Inputs(NamedTuple):
    x: Tensor  # [n, H]
    targets: Tensor  # [n]


class Exact(NamedTuple):
    """Results of some tokens in float64."""

    tokens: Tensor  # [c]
    loss: Tensor  # [c]
    dx: Tensor  # [c, H]


def confident_inputs(
    n: int, weight: Tensor, generator: torch.Generator, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Random tokens whose targets' probabilities run from small to 1: x contains part of the target's row."""
    rows, hidden = weight.shape
    targets = torch.randint(0, rows, (n,), generator=generator, device=weight.device)
    row = weight[targets].float()
    odds = torch.linspace(-4, 14, n, device=weight.device)
    # Random rows give the other logits a variance of t^2 / |row|^2 around 0.
    size = row.square().sum(1)
    wanted = odds + torch.log(torch.tensor(float(rows)))
    x = row * ((wanted + wanted.square() / (2 * size * hidden / size.mean())) / size).unsqueeze(1)
    x = x + 0.3 * torch.randn(n, hidden, generator=generator, device=weight.device)
    return x.to(dtype), targets


class OutputLayer:
    """One shard's output layer and its inputs; every target is a true row of ``shard``."""

    def __init__(
        self, n: int, hidden: int, shard: VocabRange, device: torch.device, dtype: torch.dtype
    ) -> None:
        generator = torch.Generator(device=device).manual_seed(0)
        random = partial(torch.randn, generator=generator, device=device)
        self.shard = shard
        self.weight = (random(shard.rows, hidden) * hidden**-0.5).to(dtype)
        true_rows = self.weight[: shard.valid_rows]
        self.inputs = [Inputs(*confident_inputs(n, true_rows, generator, dtype)) for _ in range(ROTATED)]
        # As in training, they are known before S, which would wait for the device to find them.
        self.targets = [shard_targets(each.targets, shard) for each in self.inputs]
        self.g = torch.full((n,), 1 / n, device=device)
        self.main_grad = torch.zeros(shard.rows, hidden, device=device)
        # As in training, exponentials overwrite those of an earlier microbatch.
        self.exponentials = torch.empty(n, shard.rows, dtype=dtype, device=device)

    def with_share(self, p: int) -> OutputLayer:
        """The same layer with one of ``p`` targets, the share that a shard owns on average."""
        layer = copy(self)
        is_owned = torch.arange(len(self.g), device=self.g.device) % p == 0
        layer.inputs = [
            Inputs(x, torch.where(is_owned, targets, self.shard.stop)) for x, targets in self.inputs
        ]
        layer.targets = [shard_targets(each.targets, self.shard) for each in layer.inputs]
        return layer

    def s(self, i: int, method: str) -> tuple[OutputState | BlockState, Softmax]:
        """Pass S on inputs ``i``, and what C1 makes of it on one rank."""
        mode, inputs, targets = METHODS[method], self.inputs[i], self.targets[i]
        state: OutputState | BlockState | None
        if mode.invariant:
            state, stats = invariant.output_forward(inputs.x, self.weight, targets, self.shard)
        else:
            state, stats = output_forward(
                inputs.x,
                self.weight,
                targets,
                self.shard,
                ShardOptions(with_input_gradient=mode.with_a, recompute=mode.recompute),
                e=None if mode.recompute else self.exponentials,
            )
        assert state is not None
        return state, merge_stats(stats.unsqueeze(0))

    def t(self, state: OutputState | BlockState, softmax: Softmax) -> Tensor:
        """Pass T, and in vocab-1 TW: adds to ``main_grad``, returns dX [n, H]."""
        slopes = Slopes(self.g)
        if isinstance(state, BlockState):
            state.add_weight_gradient(softmax, slopes, self.main_grad)
            return state.input_gradient(softmax, slopes).value()
        grad = state.input_gradient(softmax, slopes)
        state.add_weight_gradient(softmax, slopes, self.main_grad)
        return grad

    def both(self, i: int, method: str) -> tuple[Softmax, Tensor]:
        """S, then T and TW."""
        state, softmax = self.s(i, method)
        return softmax, self.t(state, softmax)

    def exact(self, i: int) -> Exact:
        """Some tokens' losses and dX in float64."""
        n = len(self.g)
        tokens = torch.linspace(0, n - 1, min(n, _CHECKED_TOKENS), device=self.g.device).long()
        weight, x = self.weight[: self.shard.valid_rows].double(), self.inputs[i].x[tokens].double()
        targets = self.inputs[i].targets[tokens]
        logits = x @ weight.t()
        loss = torch.logsumexp(logits, 1) - logits.gather(1, targets.unsqueeze(1)).squeeze(1)
        others = torch.log_softmax(logits, 1).exp()
        others[torch.arange(len(tokens)), targets] = 0
        dx = others @ weight - others.sum(1, keepdim=True) * weight[targets]
        return Exact(tokens, loss, dx * self.g[tokens].double().unsqueeze(1))


def errors(loss: Tensor, dx: Tensor, exact: Exact) -> tuple[float, dict[str, float]]:
    """RMS error of the log-probabilities, and the median row error of dX by the target's probability."""
    rms = float((loss[exact.tokens].double() - exact.loss).square().mean().sqrt())
    rows = (dx[exact.tokens].double() - exact.dx).norm(dim=1) / exact.dx.norm(dim=1).clamp(min=1e-300)
    p_target = torch.exp(-exact.loss)
    by_p_target = {}
    for low, high in pairwise(BUCKETS):
        inside = (p_target >= low) & (p_target < high)
        if bool(inside.any()):
            by_p_target[f"{low}-{high}"] = float(rows[inside].median())
    return rms, by_p_target


def refusal(rms: float, dx: dict[str, float], most_rms: float = 1e-5) -> str | None:
    """Why a result is wrong, by the bounds of ``docs/kernels.md``; None if it is right."""
    if not rms < most_rms:
        return f"log-probability error {rms:.1e} (RMS), above {most_rms}"
    for bucket, error in dx.items():
        limit = 2e-3 if bucket == "0.999-1.0" else 5e-4
        if not error < limit:
            return f"row error of dX {error:.1e} where p_target is {bucket}, above {limit}"
    return None


def kept_mib(state: OutputState | BlockState) -> float:
    """MiB that S keeps for T beyond its inputs: exponentials and A."""
    products = state.products.values() if isinstance(state, OutputState) else ()
    tensors = [tensor for tensor in (state.e, *products, state.k) if tensor is not None]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) / 2**20
