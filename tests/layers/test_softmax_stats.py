"""Statistics of any split of a row merge to the softmax of the whole row."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_vocabpar.layers.kernels.reference import exponentials
from megatron_vocabpar.layers.numbers import Slopes, Softmax, row_factor, target_factor
from megatron_vocabpar.layers.softmax_stats import merge_stats, softmax_place


def merge(logits: Tensor, target: int, cuts: list[int]) -> Softmax:
    """The row [V], cut at ``cuts``, through the row kernel and the merge."""
    edges = [0, *sorted(cuts), len(logits)]
    stats = []
    for start, stop in pairwise(edges):
        row = target - start if start <= target < stop else -1
        part = exponentials(logits[start:stop].clone().unsqueeze(0), torch.tensor([row]), stop - start)
        stats.append(part.stats)
    return merge_stats(torch.stack(stats))


finite = st.floats(-1e4, 1e4, width=32)
logit = st.one_of(finite, st.floats(-5, 5, width=32), st.just(-math.inf))


@st.composite
def split_rows(draw) -> tuple[list[float], int, list[int]]:
    """A row with a finite target, and where to cut it: anywhere, empty shards included."""
    row = draw(st.lists(logit, min_size=1, max_size=24))
    target = draw(st.integers(0, len(row) - 1))
    row[target] = draw(finite)
    return row, target, draw(st.lists(st.integers(0, len(row)), max_size=6))


@given(split_rows())
def test_any_split_gives_the_loss_of_the_whole_row(case: tuple[list[float], int, list[int]]) -> None:
    row, target, cuts = case
    logits = torch.tensor(row)
    exact = logits.double()
    loss = torch.logsumexp(exact, 0) - exact[target]
    others = exact[torch.arange(len(row)) != target]
    deficit = (
        -torch.exp(torch.logsumexp(others, 0) - torch.logsumexp(exact, 0))
        if len(others)
        else torch.zeros((), dtype=torch.float64)
    )
    merged = merge(logits, target, cuts)
    assert merged.valid.all()
    assert merged.nll.item() >= 0
    assert 0.7 < merged.total.item() < 1.42 * len(row)  # K is the largest exponent, the target's included
    # p_target this close to 1 is below the range of fp32: the loss is 0
    torch.testing.assert_close(merged.nll[0].double(), loss, rtol=1e-6, atol=1e-30 if loss > 1e-8 else 1e-8)
    torch.testing.assert_close(merged.target_deficit[0].double(), deficit, rtol=2e-6, atol=1e-35)


@given(split_rows())
def test_float64_statistics_are_tight(case: tuple[list[float], int, list[int]]) -> None:
    row, target, cuts = case
    logits = torch.tensor(row, dtype=torch.float64)
    loss = torch.logsumexp(logits, 0) - logits[target]
    merged = merge(logits, target, cuts)
    assert merged.nll.dtype == torch.float64
    torch.testing.assert_close(
        merged.nll[0], loss, rtol=1e-13, atol=1e-15 * max(1.0, float(logits[target].abs()))
    )


@given(split_rows())
def test_stored_exponentials_do_not_depend_on_the_split(case: tuple[list[float], int, list[int]]) -> None:
    row, target, cuts = case
    logits = torch.tensor(row)

    def stored(edges: list[int]) -> list[tuple[float, float]]:
        values = []
        for start, stop in pairwise(edges):
            local = target - start if start <= target < stop else -1
            out = torch.full((1, stop - start), torch.nan, dtype=torch.bfloat16)
            part = exponentials(
                logits[start:stop].clone().unsqueeze(0),
                torch.tensor([local]),
                stop - start,
                dtype=torch.bfloat16,
                out=out,
            )
            values += [(value, part.k.item()) for value in out[0].tolist()]
        return values

    whole, cut = stored([0, len(row)]), stored([0, *sorted(cuts), len(row)])
    for (value, k), (other, other_k) in zip(whole, cut, strict=True):
        if min(value, other) > 2.0**-120:  # above the end of the exponent range
            assert math.frexp(value)[0] == math.frexp(other)[0]
            assert math.frexp(value)[1] + k == math.frexp(other)[1] + other_k


def test_the_order_of_addition_is_the_rank_order() -> None:
    """Three terms whose fp32 sum depends on the order."""
    one, tiny = 1.0, 2.0**-24
    for terms, total in (([one, tiny, tiny], 1.0), ([tiny, tiny, one], 1.0 + 2.0**-23)):
        gathered = torch.tensor([[[0.0, term, 0.0, 0.0]] for term in terms])
        assert merge_stats(gathered).total.item() == total


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_target_that_nobody_owns_is_ignored(dtype: torch.dtype) -> None:
    merged = merge_stats(torch.tensor([[[3.0, 1.5, 0.0, 0.0]], [[-2.0, 1.0, 0.0, 0.0]]], dtype=dtype))
    slopes = Slopes(torch.tensor([7.0]))
    assert not merged.valid.any()
    assert merged.nll.item() == 0
    assert merged.target_deficit.item() == 0
    assert row_factor(merged, slopes, torch.tensor([3.0], dtype=dtype)).item() == 0
    assert target_factor(merged, slopes).item() == 0


def test_rows_without_any_probability_are_not_undefined() -> None:
    nothing = torch.full((6,), -torch.inf)
    merged = merge(nothing, 2, [1, 4])
    assert merged.nll.item() == math.inf
    assert target_factor(merged, Slopes(torch.ones(1))).item() == 0
    assert row_factor(merged, Slopes(torch.ones(1)), merged.offset).item() == 0
    # a logit that has overflowed gives NaN, the target's as well as another, as in torch
    for target in range(3):
        for cuts in ([], [1], [2]):
            assert merge(torch.tensor([0.0, torch.inf, 1.0]), target, cuts).nll.isnan().all()
    # an impossible target among possible ids: its gradient is -W_target, as always
    some = torch.tensor([0.0, -torch.inf, 1.0])
    merged = merge(some, 1, [1])
    assert merged.nll.item() == math.inf
    assert merged.target_deficit.item() == -1


def test_undefined_logits_are_not_hidden() -> None:
    for where in (0, 2):
        logits = torch.tensor([0.0, 1.0, 2.0])
        logits[where] = torch.nan
        assert merge(logits, 0, [1]).nll.isnan().all()


@pytest.mark.parametrize(
    ("gathered", "named"),
    [
        (torch.zeros(5, 4), r"shape \(5, 4\)"),
        (torch.zeros(0, 5, 4), r"shape \(0, 5, 4\)"),
        (torch.zeros(2, 5, 3), r"shape \(2, 5, 3\)"),
        (torch.zeros(2, 5, 4, dtype=torch.bfloat16), "statistics in torch.bfloat16"),
    ],
)
def test_what_is_not_gathered_statistics_is_named(gathered: Tensor, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        merge_stats(gathered)


def test_results_go_where_they_are_told() -> None:
    gathered = torch.tensor([[[3.0, 1.5, 0.5, 1.0]], [[-2.0, 1.0, 0.0, 0.0]]])
    place, expected = softmax_place(gathered[0]), merge_stats(gathered)
    got = merge_stats(gathered, out=place)
    for name in ("nll", "offset", "total", "target_deficit", "valid"):
        assert getattr(got, name) is getattr(place, name)
        assert torch.equal(getattr(got, name), getattr(expected, name))
    with pytest.raises(ValueError, match=r"place for \(1,\) torch.float32 of the statistics of 2 tokens"):
        merge_stats(torch.zeros(2, 2, 4), out=place)
