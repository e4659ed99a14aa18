"""What F and B hide of each other, from measured times of passes alone and of pairs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, median

from megatron_vocabpar.schedule.words.passes import Pair, Pass, PassType

Kind = tuple[PassType, int]  # a pass's type and stage


def alone_ms(alone: Mapping[Kind, Sequence[float]], pairs: Iterable[Pair]) -> dict[Kind, float]:
    """For each type and stage of one rank, the median of its passes outside pairs.

    A stage whose passes all ran in pairs gets the mean of the rank's other stages. There is always another
    one: a rank's first F runs alone, as no B can come before it, and so does its last B.
    """
    medians = {kind: median(times) for kind, times in alone.items()}
    times = dict(medians)
    for pass_ in (part for pair in pairs for part in (pair.forward, pair.backward)):
        other_stages = [ms for (type_, _), ms in medians.items() if type_ is pass_.type]
        if (pass_.type, pass_.stage) not in times and other_stages:
            times[pass_.type, pass_.stage] = mean(other_stages)
    return times


def hidden_ms(alone: Mapping[Kind, float], together: Mapping[Pair, float]) -> dict[tuple[int, int], float]:
    """What F and B of two stages hide of each other on one rank, the medians of its pairs: F + B - FB.

    Args:
        alone: the ms of each type and stage alone, as ``alone_ms`` gives them.
        together: the ms of each pair.

    Returns:
        ms by the stages of F and B; negative if pairs take longer than their passes one after the other.
    """
    saved: dict[tuple[int, int], list[float]] = {}
    for pair, ms in together.items():
        stages = pair.forward.stage, pair.backward.stage
        saved.setdefault(stages, []).append(_ms(alone, pair.forward) + _ms(alone, pair.backward) - ms)
    return {stages: median(ms) for stages, ms in saved.items()}


def _ms(alone: Mapping[Kind, float], pass_: Pass) -> float:
    return alone[pass_.type, pass_.stage]
