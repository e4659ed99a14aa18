"""How many variants of the Triton kernels one rank compiles in a training, found without a GPU."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from megatron_vocabpar.layers.embedding import embedding_backward
from megatron_vocabpar.layers.extras.extra import join
from megatron_vocabpar.layers.kernels import dispatch
from megatron_vocabpar.layers.operands import ShardOptions
from megatron_vocabpar.layers.output import plain
from megatron_vocabpar.layers.output.plain import output_forward
from megatron_vocabpar.layers.output.warm_up import warm_up
from megatron_vocabpar.layers.partition import even_ranges
from megatron_vocabpar.layers.targets import ShardTargets, shard_targets
from megatron_vocabpar.layers.terms import PLAIN
from megatron_vocabpar.layers.token_loss import loss_slopes

from .compiled import pretended_driver

MICROBATCHES, RANKS, MOST = 200, 8, 8


def staged(*pieces: Tensor) -> tuple[Tensor, ...]:
    """The pieces at the offsets at which a GPU gets them: one copy of all."""
    return torch.cat(pieces).split([len(piece) for piece in pieces])


def microbatches(
    n: int, hidden: int, rows: int, ignored: float, with_a: bool, dtype: torch.dtype = torch.bfloat16
) -> Iterator[int]:
    """The warm-up (-1), then S, C1, T, TW and IB of one rank; of other lengths if tokens are ignored."""
    generator = torch.Generator().manual_seed(0)
    ranges = even_ranges(rows * RANKS, RANKS, rows * RANKS)
    shard = ranges[RANKS // 2]
    weight, main_grad = torch.randn(rows, hidden).to(dtype), torch.zeros(rows, hidden)
    options = ShardOptions(with_input_gradient=with_a)
    warm_up(weight, (main_grad, main_grad), shard, options, RANKS, n)
    yield -1
    for i in range(MICROBATCHES):
        ids, labels = torch.randint(shard.vocab_size, (2, n), generator=generator)
        counted = (torch.rand(n, generator=generator) >= ignored).nonzero().flatten()
        targets, mine = labels[counted], ids[(ids >= shard.start) & (ids < shard.stop)] - shard.start
        pieces = *shard_targets(targets, shard), mine, mine.argsort(stable=True)
        rows, owned, mine, order = staged(*pieces)
        x = torch.randn(len(targets), hidden).to(dtype)
        state, stats = output_forward(x, weight, ShardTargets(rows, owned), shard, options)
        assert state is not None
        softmax = join(stats.new_zeros(RANKS, *stats.shape))
        slopes = loss_slopes(softmax, PLAIN, torch.ones(len(targets)))
        state.input_gradient(softmax, slopes)
        state.add_weight_gradient(softmax, slopes, main_grad)
        embedding_backward(torch.zeros(len(mine), hidden).to(dtype), mine, main_grad, order)
        yield i


@pytest.mark.parametrize("hidden", [64, 1024], ids=["P > 2 H", "P < H"])
@pytest.mark.parametrize("with_a", [False, True], ids=["vocab-1", "vocab-2"])
@pytest.mark.parametrize("ignored", [0.0, 0.3])
def test_nothing_is_compiled_after_the_warm_up(
    monkeypatch: pytest.MonkeyPatch, ignored: float, with_a: bool, hidden: int
) -> None:
    """Also where some microbatches have so many tokens that E is scaled in place of dX."""
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
