"""Which cases of a product of parameters the default run takes; the others are marked slow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations, product
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion

wants_fake_tensors = pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.11",
    reason="fake tensors of torch 2.8 take no out= of another dtype and no collectives; 2.11's do",
)

Names = str | tuple[str, ...]


def chosen_of(rows: Sequence[tuple[int, ...]], pairs: bool) -> set[tuple[int, ...]]:
    """Rows in which every value of every column occurs; with ``pairs``, every pair of values of two columns.

    Greedy: the next row is the one with the most values, then the most pairs, that were not there yet, then
    with the values that were taken least.
    """

    def values(row: tuple[int, ...]) -> set[Any]:
        return set(enumerate(row))

    def both(row: tuple[int, ...]) -> set[Any]:
        return set(combinations(enumerate(row), 2))

    new_values = set().union(*map(values, rows))
    new_pairs = set().union(*map(both, rows))
    chosen: set[tuple[int, ...]] = set()
    taken: Counter[Any] = Counter()

    def gain(row: tuple[int, ...]) -> tuple[int, int, int]:
        often = sum(taken[value] for value in values(row))
        return len(values(row) & new_values), len(both(row) & new_pairs), -often

    while new_values or (pairs and new_pairs):
        best = max(rows, key=gain)
        chosen.add(best)
        taken.update(values(best))
        new_values -= values(best)
        new_pairs -= both(best)
    return chosen


def covering(
    *columns: tuple[Names, Iterable[Any]],
    pairs: bool = False,
    only: bool = False,
    further: Mapping[Names, Sequence[Any]] = MappingProxyType({}),
) -> Callable[..., Any]:
    """Parametrize with the product of columns ``(names, values)``; the default run takes what covers them.

    A value of a column with several names is a tuple. With ``only``, no run takes the rest. The default run
    takes none of the values in ``further``, by column.
    """
    names = [name for given, _ in columns for name in ([given] if isinstance(given, str) else given)]
    tables = [list(values) for _, values in columns]
    rows = list(product(*(range(len(table)) for table in tables)))

    def values_of(row: tuple[int, ...]) -> list[Any]:
        return [table[index] for table, index in zip(tables, row, strict=True)]

    def is_further(row: tuple[int, ...]) -> bool:
        return any(
            value in further.get(given, ()) for (given, _), value in zip(columns, values_of(row), strict=True)
        )

    chosen = chosen_of([row for row in rows if not is_further(row)], pairs)

    def case(row: tuple[int, ...]) -> Any:
        flat: list[Any] = []
        for (given, _), value in zip(columns, values_of(row), strict=True):
            flat += [value] if isinstance(given, str) else value
        return pytest.param(*flat, marks=() if row in chosen else pytest.mark.slow)

    return pytest.mark.parametrize(names, [case(row) for row in rows if row in chosen or not only])


def rest_is_slow(values: Iterable[Any], *default: Any) -> list[Any]:
    """Parameters of which the default run takes the given ones only."""
    cases = list(values)
    missing = [value for value in default if value not in cases]
    assert not missing, f"no such case: {missing}"
    marks = {True: (), False: pytest.mark.slow}
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marks[value in default])
        for value in cases
    ]
