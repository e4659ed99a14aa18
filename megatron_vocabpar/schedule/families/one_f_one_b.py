"""1F1B: one stage a rank; F and B run down and up the pipeline without waiting.

Source: Harlap et al., PipeDream (2018); Figure 9 with the vocabulary passes inserted, section 5.2 for the
peak.
"""

from __future__ import annotations

from . import Family, as_close_as_can_be


def peak(p: int, chunks: int, barriers: int) -> float:
    """One microbatch for every rank, and one for every barrier."""
    return p + barriers


ONE_F_ONE_B = Family(
    name="1f1b",
    summary="one forward, one backward",
    shape="standard",
    chunks=1,
    fixed_chunks=True,
    splits_w=False,
    packed=True,
    hops=as_close_as_can_be,
    peak=peak,
)
