"""Megatron's own schedules: 1F1B, and interleaved with several chunks on each rank.

Their order of passes is fixed, so there are no candidates: a rank runs its list, and waits where a pass
needs another stage's. For p 2 with 2 chunks and 2 microbatches rank 0 runs ``0F0 0F1 2F0 2F1 2B0 2B1 0B0
0B1``. With ``--overlap-moe-expert-parallel-comm`` each F after the warm-up, which is one F longer, runs
together with the B that follows it in the list, and both hide time of each other.

Source: Megatron-LM, ``forward_backward_pipelining_with_interleaving``; Narayanan et al. (2021), section 2.2.
Next: ``play/events.py``, which plays them, and ``plan/layer_counts.py``, which places their layers.
"""

from __future__ import annotations

from itertools import chain
from math import inf

from megatron_vocabpar.schedule.words.methods import BASELINE, method_named
from megatron_vocabpar.schedule.words.passes import Pair, Pass, PassType
from megatron_vocabpar.schedule.words.placement import Placement
from megatron_vocabpar.schedule.words.schedule import Schedule


def warm_up_length(p: int, m: int, chunks: int, overlaps: bool, rank: int, most: float = inf) -> int:
    """The F that a rank runs before its first B; as many B come behind its last F (``stock_schedule``)."""
    ahead = int(min(p - rank, most)) - 1 if chunks == 1 else 2 * (p - rank - 1) + (chunks - 1) * p
    return min(ahead + overlaps, chunks * m)


def stock_schedule(p: int, m: int, chunks: int = 1, overlaps: bool = False, most: float = inf) -> Schedule:
    """The passes of every rank as Megatron runs them, for ``m`` microbatches on ``p`` ranks.

    With several chunks Megatron requires ``m`` to be a multiple of ``p``, which is not checked here. If it
    ``overlaps``, an F and a B run as a pair. With one chunk, a rank holds the activations of at most ``most``
    microbatches, which Megatron has no flag for.
    """
    placement = Placement(p, chunks, "standard")
    turns = [
        (chunk, microbatch)
        for start in range(0, m, p)
        for chunk in range(chunks)
        for microbatch in range(start, min(start + p, m))
    ]
    rows, pairs = [], []
    for rank in range(p):
        forward = [Pass(PassType.F, chunk * p + rank, mb) for chunk, mb in turns]
        backward = [Pass(PassType.B, (chunks - 1 - chunk) * p + rank, mb) for chunk, mb in turns]
        warm_up = warm_up_length(p, m, chunks, overlaps, rank, most)
        steady = list(zip(forward[warm_up:], backward, strict=False))
        rows.append((*forward[:warm_up], *chain.from_iterable(steady), *backward[len(steady) :]))
        pairs += [Pair(*passes) for passes in steady] if overlaps else []
    return Schedule(method_named(BASELINE), placement, m, tuple(rows), pairs=frozenset(pairs))
