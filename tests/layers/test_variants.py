"""How many variants of the Triton kernels one rank compiles in a training, found without a GPU."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from megatron_vocabpar.layers.embedding import embedding_backward
from megatron_vocabpar.layers.extras.distillation import Comparison
from megatron_vocabpar.layers.extras.entropy import Entropy
from megatron_vocabpar.layers.extras.extra import Extra, join, place_of
from megatron_vocabpar.layers.extras.target_rank import TargetRank
from megatron_vocabpar.layers.fp8 import Fp8Weight
from megatron_vocabpar.layers.kernels import dispatch
from megatron_vocabpar.layers.operands import ShardOptions
from megatron_vocabpar.layers.output import plain
from megatron_vocabpar.layers.output.naive import naive_maximum, naive_sum
from megatron_vocabpar.layers.output.plain import OutputState, output_forward
from megatron_vocabpar.layers.output.warm_up import warm_up
from megatron_vocabpar.layers.partition import VocabRange, even_ranges
from megatron_vocabpar.layers.targets import ShardTargets, shard_targets
from megatron_vocabpar.layers.terms import PLAIN, Distillation, LossTerms
from megatron_vocabpar.layers.token_loss import loss_slopes
from tests.cases import covering

from .compiled import pretended_driver

MICROBATCHES, RANKS, MOST = 200, 8, 8


def staged(*pieces: Tensor) -> tuple[Tensor, ...]:
    """The pieces at the offsets at which a GPU gets them: one copy of all."""
    return torch.cat(pieces).split([len(piece) for piece in pieces])


def microbatches(
    n: int,
    hidden: int,
    rows: int,
    ignored: float,
    with_a: bool,
    dtype: torch.dtype = torch.bfloat16,
    kind: str = "cross-entropy",
) -> Iterator[int]:
    """The warm-up (-1), then S, C1, T, TW and IB of one rank; of other lengths if tokens are ignored.

    Args:
        kind: one of ``KINDS``: what is asked of the output layer beside the losses.
    """
    generator = torch.Generator().manual_seed(0)
    ranges = even_ranges(rows * RANKS, RANKS, rows * RANKS)
    shard = ranges[RANKS // 2]
    weight, main_grad = torch.randn(rows, hidden).to(dtype), torch.zeros(rows, hidden)
    extras = [Entropy(), TargetRank()] if kind == "entropy" else []
    options = ShardOptions(
        with_input_gradient=with_a,
        gradients=("entropy",) if extras else (),
        terms=LossTerms(distillation=Distillation()) if kind == "distillation" else PLAIN,
        fp8_weight=Fp8Weight.of(weight, shard) if kind == "8 bits" else None,
    )
    warm_up(weight, (main_grad, main_grad), shard, options, RANKS, n, extras, naive=kind == "naive")
    yield -1
    evaluation = replace(options, keep_state=False)
    for i in range(MICROBATCHES if kind == "cross-entropy" else 3):
        ids, labels = torch.randint(shard.vocab_size, (2, n), generator=generator)
        counted = (torch.rand(n, generator=generator) >= ignored).nonzero().flatten()
        targets, mine = labels[counted], ids[(ids >= shard.start) & (ids < shard.stop)] - shard.start
        pieces = *shard_targets(targets, shard), mine, mine.argsort(stable=True)
        rows, owned, mine, order = staged(*pieces)
        x = torch.randn(len(targets), hidden).to(dtype)
        if kind == "distillation":
            teacher = torch.randn(len(targets), 1, shard.rows)
            extras = [Comparison(Distillation(), teacher, None, shard.vocab_size)]
        given = x, weight, ShardTargets(rows, owned), shard
        state, stats = _statistics(given, options, extras, naive=kind == "naive")
        assert state is not None
        place = place_of(stats, extras)
        softmax = join(stats.new_zeros(RANKS, *stats.shape), extras, place)
        ones = torch.ones(len(targets))
        by_extras = dict.fromkeys(options.gradients, ones)
        slopes = loss_slopes(softmax, options.terms, ones, by_extras)
        state.input_gradient(softmax, loss_slopes(softmax, options.terms, ones))
        state.input_gradient(softmax, slopes)
        state.add_weight_gradient(softmax, slopes, main_grad)
        embedding_backward(torch.zeros(len(mine), hidden).to(dtype), mine, main_grad, order)
        _statistics(given, evaluation, extras, naive=kind == "naive")
        yield i


def _statistics(
    given: tuple[Tensor, Tensor, ShardTargets, VocabRange],
    options: ShardOptions,
    extras: Sequence[Extra],
    *,
    naive: bool,
) -> tuple[OutputState | None, Tensor]:
    """S, in naive S and S2, of a microbatch."""
    if not naive:
        return output_forward(*given, options, extras=extras)
    begun, offsets = naive_maximum(*given, options)
    return naive_sum(begun, offsets)


@covering(("hidden", [64, 1024]), ("with_a", [False, True]), ("ignored", [0.0, 0.3]))
def test_nothing_is_compiled_after_the_warm_up(
    monkeypatch: pytest.MonkeyPatch, ignored: float, with_a: bool, hidden: int
) -> None:
    """P > 2 H and P < H; also where some microbatches have so many tokens that E is scaled in place of dX."""
    monkeypatch.setattr(plain, "_WORTH_BYTES", 2 * 45 * (1024 * 4 - 256 * 2))
    launched: list[Any] = []
    found: set[int] = set()
    with dispatch.use_kernels(dispatch.triton_kernels()), pretended_driver(90, launched):
        for i in microbatches(64, hidden, 256, ignored, with_a):
            names = Counter(name for name, kernel in launched if id(kernel) not in found)
            assert i < 0 or not names, (i, names)
            found |= {id(kernel) for _, kernel in launched}
    assert 0 < len(found) <= MOST
    assert len(launched) >= 5 * MICROBATCHES


@pytest.mark.parametrize(
    ("kind", "with_a", "variants"),
    [
        ("entropy", False, 10),
        pytest.param("entropy", True, 10, marks=pytest.mark.slow),
        ("distillation", False, 8),
        ("naive", False, 7),
        ("8 bits", True, 6),
    ],
)
def test_the_warm_up_compiles_what_extras_need_too(kind: str, with_a: bool, variants: int) -> None:
    launched: list[Any] = []
    with dispatch.use_kernels(dispatch.triton_kernels()), pretended_driver(90, launched):
        for i in microbatches(64, 64, 256, 0.3, with_a, kind=kind):
            found = {id(kernel): name for name, kernel in launched}
            assert len(found) == variants, (i, Counter(found.values()))
