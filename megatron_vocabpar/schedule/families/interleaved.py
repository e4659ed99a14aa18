"""Interleaved 1F1B: several model chunks a rank, each running down the whole pipeline; smaller bubbles.

Megatron's virtual pipeline lets p microbatches pass one chunk before the next chunk starts. Here each
microbatch goes on from chunk to chunk at once, which needs no number of microbatches that p divides.

Source: Narayanan et al., Efficient Large-Scale Language Model Training (2021), section 2.2.
"""

from __future__ import annotations

from ..building_block import Hops
from . import Family

_LONG_F, _LONG_B = 0.5, 0.75  # of the one-chunk hops at which the steady state has been found to pack best


def hops(p: int, chunks: int, max_activations: float) -> tuple[Hops, ...]:
    """As close as can be, or farther apart in some chunks, which makes room where the rings are full."""
    zeros = (0.0,) * chunks
    first, rest = zeros[:1], zeros[1:]
    long_f, long_b = 2.0 * _LONG_F / chunks, 2.0 * _LONG_B / chunks
    return (
        Hops((long_f,) * chunks, first + (long_b,) * len(rest)),
        Hops(zeros, first + (long_f,) * len(rest)),
        Hops(zeros, zeros),
        Hops((long_f, *rest), zeros),
        Hops((long_f / 2, *rest), first + (long_f,) * len(rest)),
    )


def peak(p: int, chunks: int, barriers: int) -> float:
    """Megatron's warm-up of 2(p-1) + (chunks-1)p chunk passes and one more, and one microbatch a barrier."""
    return ((chunks + 1) * p - 1) / chunks + barriers


INTERLEAVED = Family(
    name="interleaved",
    summary="several chunks a rank, one after another",
    shape="standard",
    chunks=2,
    fixed_chunks=False,
    splits_w=False,
    packed=True,
    hops=hops,
    peak=peak,
)
