"""A check, its finding, and its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Outcome = Literal["ok", "failed", "not run"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check's function returns.

    Attributes:
        outcome: ``not run`` where the machine lacks what the check needs.
        figure: what was measured, in words, with units.
        reason: why it is not ok, on one line; empty otherwise.
    """

    outcome: Outcome
    figure: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """One row of the table, before it is run.

    Attributes:
        target: ``module:function``, which returns a ``Finding``.
        arguments: the function's, as JSON has them.
        timeout_s: after which it has failed.
        after: name of the check that must be ok before this one is run; None for no such check.
    """

    name: str
    target: str
    arguments: Mapping[str, Any]
    timeout_s: float
    after: str | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """One row of the table: the finding, its time, and for a failed check the end of what it printed."""

    check: str
    outcome: Outcome
    figure: str
    reason: str
    seconds: float
    log: tuple[str, ...] = ()


def within(error: float, limit: float, figure: str) -> Finding:
    """Ok where an error is a number no larger than its limit."""
    if error <= limit:
        return Finding("ok", figure)
    return Finding("failed", figure, f"an error of {error:.2g} is above {limit:.2g}")
