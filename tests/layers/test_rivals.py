"""Whether the target is the most likely id, from all shards' stored exponentials, beside a whole argmax."""

from __future__ import annotations

import pytest
import torch

from megatron_vocabpar.layers.columns import join, likelier_ids, rival_column, with_columns
from megatron_vocabpar.layers.output import OutputState, output_forward
from megatron_vocabpar.layers.partition import even_ranges

N, H, V, SHARDS = 64, 16, 61, 4


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (torch.float64, 1.0),
        (torch.float32, 1.0),
        (torch.float32, 50.0),
        (torch.bfloat16, 1.0),
        (torch.float16, 20.0),
    ],
)
def test_the_target_wins_where_it_is_the_argmax(dtype: torch.dtype, size: float) -> None:
    random = torch.Generator().manual_seed(0)
    x, w = (torch.randn(rows, H, generator=random).mul(size**0.5).to(dtype) for rows in (N, 64))
    logits = x.double() @ w[:V].double().T
    best = logits.argmax(1)
    targets = best.clone()
    targets[1::4] = torch.randint(V, (N // 4,), generator=random)
    targets[2::4] = logits[2::4].topk(2).indices[:, 1]  # the second
    targets[3::4] = -100
    targets[7] = 62  # padding
    wins = target_wins(x, w, targets)
    assert wins.equal(targets == best)
    assert 0 < wins.sum() < N // 2


def target_wins(x: torch.Tensor, w: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Which win; those are the ones of rank 0."""
    gathered, states, columns = [], [], [rival_column(x.dtype)]
    for shard in even_ranges(64, SHARDS, V):
        rows = w[shard.start : shard.stop]
        state, statistics = output_forward(x, rows, targets, shard)
        assert isinstance(state, OutputState)
        states.append(state)
        gathered.append(with_columns(state, statistics, columns))
    merged = join(torch.stack(gathered), columns)
    rank = torch.stack([likelier_ids(state, merged) for state in states]).sum(0)
    assert merged.target_wins is not None
    assert merged.target_wins.equal((rank == 0) & merged.valid)
    return merged.target_wins


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_target_wins_of_equals(dtype: torch.dtype) -> None:
    """Every id has a twin, on another shard."""
    random = torch.Generator().manual_seed(1)
    x = (20 * torch.randn(N, H, generator=random)).to(dtype)
    twins = torch.randn(30, H, generator=random).to(dtype)
    w = torch.cat([twins, twins, torch.zeros(4, H, dtype=dtype)])
    first, second = (x.double() @ twins.double().T).topk(2).indices.T
    assert bool(target_wins(x, w, first).all())
    assert bool(target_wins(x, w, first + 30).all())
    assert not bool(target_wins(x, w, second).any())
