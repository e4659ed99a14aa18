"""Times that may differ from rank to rank: one number for all, or one number a rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

PerRank = float | tuple[float, ...]


def per_rank_of(value: float | Sequence[float]) -> PerRank:
    """A time as a cost file gives it."""
    return tuple(map(float, value)) if isinstance(value, Sequence) else float(value)


def mean_of(value: PerRank) -> float:
    """The mean time of all ranks."""
    return sum(value) / len(value) if isinstance(value, tuple) else value


def spread(value: PerRank, p: int, name: str) -> tuple[float, ...]:
    """The time of each of ``p`` ranks.

    Raises:
        ValueError: if there is another number of times; the message says ``name``.
    """
    if not isinstance(value, tuple):
        return (value,) * p
    if len(value) != p:
        raise ValueError(
            f"costs: {name} lists {len(value)} ranks, but the pipeline has {p}; give one number or {p}"
        )
    return value


def halves_of_t(
    row: Mapping[str, PerRank], p: int, *, apart: bool
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """T and TW of each rank; unless they run ``apart``, T takes the time of both and TW none.

    Without ``TW_ms``, TW is half of T, as T is two equal products and TW one of them.
    """
    t = spread(row.get("T_ms", 0.0), p, "T_ms")
    if "TW_ms" not in row:
        t = tw = tuple(time / 2 for time in t)
    else:
        tw = spread(row["TW_ms"], p, "TW_ms")
    return (t, tw) if apart else (tuple(map(sum, zip(t, tw, strict=True))), (0.0,) * p)
