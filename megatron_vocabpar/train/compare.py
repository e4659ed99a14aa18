"""How far the loss curves of several methods are from that of one of them, as in the paper's Figure 17.

Methods that compute the same differ by rounding alone. Next: ``tables.py`` and ``pictures.py`` show it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_vocabpar.schedule.words.methods import BASELINE

Curve = Mapping[int, float]
"""Loss by step."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How far one method's losses are from the reference's, over the ``steps`` steps that both have.

    ``absolute`` is the largest difference and ``absolute_step`` its step; ``relative`` and ``relative_step``
    are those of the difference divided by the reference's loss. Steps are compared until one of the two
    losses is not finite, at ``not_finite_step``.
    """

    method: str
    reference: str
    steps: int
    absolute: float
    absolute_step: int
    relative: float
    relative_step: int
    not_finite_step: int | None = None


def loss_curve(records: Sequence[Mapping[str, Any]], name: str = "loss") -> dict[int, float]:
    """``name`` by step, from lines of ``metrics.jsonl`` that have it."""
    return {record["step"]: record[name] for record in records if record.get(name) is not None}


def reference_method(methods: Sequence[str]) -> str:
    """The method that the others are compared with: baseline where it is there, else the first."""
    return BASELINE if BASELINE in methods else methods[0]


def differences(curves: Mapping[str, Curve], reference: str) -> Iterator[Difference]:
    """Compares every other method with the reference, unless they share no step."""
    base = curves[reference]
    for method, curve in curves.items():
        shared = sorted(curve.keys() & base.keys())
        if method == reference or not shared:
            continue
        finite = [math.isfinite(curve[step]) and math.isfinite(base[step]) for step in shared]
        steps = shared[: finite.index(False)] if False in finite else shared
        bad = None if len(steps) == len(shared) else shared[len(steps)]
        if not steps:
            yield Difference(method, reference, 0, math.nan, shared[0], math.nan, shared[0], bad)
            continue
        absolute = {step: abs(curve[step] - base[step]) for step in steps}
        relative = {step: absolute[step] / abs(base[step]) if base[step] else 0.0 for step in steps}
        worst, worst_relative = max(steps, key=absolute.__getitem__), max(steps, key=relative.__getitem__)
        largest = (absolute[worst], worst, relative[worst_relative], worst_relative)
        yield Difference(method, reference, len(steps), *largest, bad)
