"""Redis: transformer layers moved away from the stages that hold the vocabulary layers.

The paper's second baseline (section 6.2) counts floating-point operations and makes the longest stage as
short as whole layers allow. If the output layer alone outweighs an average stage, that does not help: the
last stage has no layer left, and the others wait for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heapreplace
from itertools import accumulate, combinations_with_replacement, pairwise

from megatron_vocabpar.schedule.times.flops import input_flops, layer_flops, output_flops


def redistribute(
    layers: int,
    p: int,
    first_stage_work: float,
    last_stage_work: float,
    layer_work: float,
) -> tuple[int, ...]:
    """The numbers of transformer layers per stage that make the longest stage shortest.

    The work of the input layer (on the first stage), of the output layer (on the last) and of a transformer
    layer are in the same unit, any one. The last stage may get no layer; ties go to earlier stages. For
    example, 8 layers on 4 stages with work 0, 2 and 1 give (3, 3, 2, 0).

    Raises:
        ValueError: if there are fewer layers than stages to fill.
    """
    if p > 1 and layers < p - 1:
        raise ValueError(f"{layers} layers cannot fill the first {p - 1} of {p} stages; use fewer stages")
    counts = [1] * (p - 1) + [0] if p > 1 else [0]
    loads = [count * layer_work for count in counts]
    loads[0] += first_stage_work
    loads[-1] += last_stage_work
    shortest = [(load, stage) for stage, load in enumerate(loads)]
    heapify(shortest)
    for _ in range(layers - sum(counts)):
        load, stage = shortest[0]
        counts[stage] += 1
        heapreplace(shortest, (load + layer_work, stage))
    return tuple(counts)


def redistribute_by_flops(
    layers: int, p: int, hidden: int, seq_length: int, vocab_size: int
) -> tuple[int, ...]:
    """``redistribute`` with the operation counts of Table 4, as in section 6.2."""
    return redistribute(
        layers,
        p,
        input_flops(hidden),
        output_flops(hidden, vocab_size),
        layer_flops(hidden, seq_length),
    )


def cut(work: Sequence[float], counts: Sequence[float], ranks: Sequence[int]) -> tuple[int, ...]:
    """The layers of each stage, of layers with unlike ``work``, if ``counts`` would be right for mean layers.

    Stages first end with the layer nearest to their work so far. Then the best of ``moves`` is taken, as
    long as that lowers the eighth powers of what ``ranks``, one of each stage, have beyond their work. For
    example, layers of 1, 1, 4, 1 and 1 on two ranks, counted 4 and 1, become 3 and 2. All stages
    but the last get a layer.
    """
    done, layers, stages = [0.0, *accumulate(work)], len(work), len(counts)
    wanted, mean = [done[-1] * count / sum(counts) for count in counts], done[-1] / len(set(ranks))

    def excess(counts: Sequence[int]) -> float:
        ends = accumulate(counts, initial=0)
        has = [(done[end] - done[start]) / mean for start, end in pairwise(ends)]
        of_stages = [ms - share / mean for ms, share in zip(has, wanted, strict=True)]
        of_ranks = dict.fromkeys(ranks, 1.0)
        for rank, ms in zip(ranks, of_stages, strict=True):
            of_ranks[rank] += ms
        return sum(max(0.0, ms) ** 8 for ms in of_ranks.values()) + 1e-3 * sum(ms**2 for ms in of_stages)

    ends = [0]
    for stage, until in enumerate(accumulate(wanted[:-1]), 2 - stages):
        distances = {end: abs(done[end] - until) for end in range(ends[-1] + 1, layers + stage + 1)}
        ends.append(min(distances, key=distances.__getitem__))
    best: tuple[int, ...] = ()
    moved = tuple(end - start for start, end in pairwise([*ends, layers]))
    while not best or excess(moved) < excess(best) * (1 - 1e-9):
        best, moved = moved, min(moves(moved), key=excess, default=moved)
    return best


def moves(counts: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """One layer less on a stage, one more on another up to eight stages away, the nearest first.

    For example, 3, 2 and 1 become 2, 3, 1, then 4, 1, 1 and so on. All stages but the last keep a layer.
    """
    runs = combinations_with_replacement(range(len(counts) - 1), 2)
    for first, last in sorted(runs, key=lambda run: run[1] - run[0]):
        for step in (-1, 1) if last - first < 8 else ():
            moved = list(counts)
            moved[first] += step
            moved[last + 1] -= step
            if all(moved[:-1]) and moved[-1] >= 0:
                yield tuple(moved)


def with_final_stage(layers: int, p: int, final_stage_layers: int) -> tuple[int, ...]:
    """The layers per stage if the last has ``final_stage_layers``; the others are as even as can be.

    If the others cannot be equal, the earlier ones are longer.

    Raises:
        ValueError: if the other stages would have no layer.
    """
    rest = layers - final_stage_layers
    if final_stage_layers < 0 or p < 2 or rest < p - 1:
        raise ValueError(
            f"{final_stage_layers} layers on the last of {p} stages leave {rest} for the other {p - 1}; "
            f"choose 0 to {max(0, layers - p + 1)} with at least two stages"
        )
    share, longer = divmod(rest, p - 1)
    return (*(share + (stage < longer) for stage in range(p - 1)), final_stage_layers)


def layout(counts: tuple[int, ...]) -> str:
    """Megatron's layout for these layers per stage, such as ``Ettt|ttt|tL`` for 3, 3 and 1."""
    stages = ["t" * count for count in counts]
    return "|".join(["E" + stages[0], *stages[1:-1], stages[-1] + "L"])
