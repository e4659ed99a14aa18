"""Loss curves of several methods against one of them, in numbers.

Methods that compute the same thing differ by rounding alone; the largest difference says how far.
The comparison is that of the paper's Figure 17.
Next: ``plots.py`` (the same in a picture).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Curve = Mapping[int, float]
"""Loss by step."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How far one method's losses are from the reference's, over the steps that both have.

    Attributes:
        method: the method.
        reference: the method that it is compared with.
        steps: number of steps compared.
        absolute: largest difference of the losses.
        absolute_step: the step where it is.
        relative: largest difference divided by the reference's loss.
        relative_step: the step where it is.
    """

    method: str
    reference: str
    steps: int
    absolute: float
    absolute_step: int
    relative: float
    relative_step: int


def loss_curve(records: Sequence[Mapping[str, Any]], name: str = "loss") -> dict[int, float]:
    """``name`` by step, from lines of ``metrics.jsonl`` that have it."""
    return {record["step"]: record[name] for record in records if record.get(name) is not None}


def reference_method(methods: Sequence[str]) -> str:
    """The method that the others are compared with: baseline where it is there, else the first."""
    return "baseline" if "baseline" in methods else methods[0]


def differences(curves: Mapping[str, Curve], reference: str) -> list[Difference]:
    """Every method but the reference against it; a method that shares no step with it is left out."""
    return [
        _difference(method, curve, reference, curves[reference])
        for method, curve in curves.items()
        if method != reference and curve.keys() & curves[reference].keys()
    ]


def _difference(method: str, curve: Curve, reference: str, reference_curve: Curve) -> Difference:
    steps = sorted(curve.keys() & reference_curve.keys())
    absolute = {step: abs(curve[step] - reference_curve[step]) for step in steps}
    relative = {step: absolute[step] / abs(reference_curve[step]) for step in steps if reference_curve[step]}
    worst = max(steps, key=lambda step: absolute[step])
    worst_relative = max(relative, key=lambda step: relative[step], default=worst)
    return Difference(
        method,
        reference,
        len(steps),
        absolute[worst],
        worst,
        relative.get(worst_relative, 0.0),
        worst_relative,
    )
