"""Masked means do not change when tokens move between microbatches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_vocabpar.losses.reductions import (
    by_group,
    group_statistics,
    joined,
    masked_sum,
    mean_of_counted,
    sentence_means,
)
from tests.spawn import run_ranks


@given(
    lengths=st.lists(st.integers(0, 9), min_size=2, max_size=7),
    cut=st.integers(1, 6),
    seed=st.integers(0, 999),
)
def test_microbatch_layout(lengths: list[int], cut: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    values = torch.randn(len(lengths), 9, generator=draw, dtype=torch.float64)
    mask = torch.arange(9) < torch.tensor(lengths)[:, None]
    values = torch.where(mask, values, torch.nan)  # padding must not be read
    sentence = torch.arange(len(lengths))[:, None].expand_as(values)
    group = torch.arange(len(lengths)) % 2
    rows = [values[row, :length] for row, length in enumerate(lengths)]
    batches = [slice(start, start + cut) for start in range(0, len(lengths), cut)]
    token = joined([masked_sum(values[part], mask[part]) for part in batches])
    every = torch.cat(rows)
    assert torch.allclose(token, every.mean() if len(every) else torch.zeros((), dtype=torch.float64))
    per = [sentence_means(values[part], mask[part], sentence[part], len(lengths)) for part in batches]
    whole = per[0]
    for part in per[1:]:
        whole = whole + part
    zero = torch.zeros(1, dtype=torch.float64)
    means = torch.stack([row.mean() for row in rows if len(row)] or [zero[0]])
    assert torch.allclose(mean_of_counted(whole), means.mean())
    joined_rows = [torch.cat([rows[i] for i in range(len(rows)) if i % 2 == g]) for g in (0, 1)]
    groups = torch.stack([row.mean() for row in joined_rows if len(row)] or [zero[0]])
    assert torch.allclose(mean_of_counted(by_group(whole, group, 2)), groups.mean())


def test_masks_may_be_fractions() -> None:
    """Weighted sums over the sum of the weights, also where that is below 1."""
    values = torch.tensor([4.0, 8.0, torch.nan])
    mask = torch.tensor([0.25, 0.125, 0.0])
    one = masked_sum(values, mask)
    assert (float(one.total), float(one.count)) == (2.0, 0.375)
    assert float(one.mean()) == pytest.approx(2.0 / 0.375)
    assert float(masked_sum(values[None], mask[None], dim=1).count) == 0.375


def _statistics(rank: int) -> None:
    """Rank 0 holds three answers, rank 1 the other nine; and all of them at once, in another order."""
    draw = torch.Generator().manual_seed(0)
    rewards = 1e3 + torch.randn(12, generator=draw)
    rewards[11] = torch.inf
    group_of = torch.tensor([0, 1, 1, 0, 0, 2, 1, 1, 0, 0, 0, 3])
    mine = slice(0, 3) if rank == 0 else slice(3, 12)
    found = group_statistics(rewards[mine], group_of[mine], 5, torch.distributed.group.WORLD)
    for order in (torch.arange(12), torch.randperm(12, generator=draw)):
        one = group_statistics(rewards[order], group_of[order], 5)
        assert torch.equal(found.count, one.count)
        assert torch.equal(found.mean[[0, 1, 2, 4]], one.mean[[0, 1, 2, 4]])
        assert torch.equal(found.squares[[0, 1, 2, 4]], one.squares[[0, 1, 2, 4]])
        assert bool(one.mean[3].isnan())
    advantages = found.advantages(rewards, group_of)
    for group in (0, 1):
        answers = rewards[group_of == group].double()
        torch.testing.assert_close(found.mean[group], answers.mean())
        torch.testing.assert_close(found.variance()[group], answers.var())
        torch.testing.assert_close(found.variance(0)[group], answers.var(correction=0))
        expected = (answers - answers.mean()) / (answers.std() + 1e-6)
        torch.testing.assert_close(advantages[group_of == group].double(), expected, rtol=1e-5, atol=1e-5)
    assert (float(found.variance()[2]), float(advantages[5]), float(found.mean[4])) == (0.0, 0.0, 0.0)


def test_statistics_of_groups() -> None:
    run_ranks(2, _statistics)
