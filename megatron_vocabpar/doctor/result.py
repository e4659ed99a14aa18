"""A check, its finding, and its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Outcome = Literal["ok", "failed", "not run"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check's function returns."""

    outcome: Outcome  # "not run" where the machine lacks what the check needs
    figure: str = ""  # the measurement in words, with units
    reason: str = ""  # one line on why it is not ok


@dataclass(frozen=True, slots=True)
class Check:
    """One row of the table, before it runs."""

    name: str
    function: Callable[..., Finding]  # of a module: its processes import it
    arguments: Mapping[str, Any]
    timeout_s: float  # after which the check has failed
    ranks: int = 1  # processes that call the function, one a GPU
    after: str | None = None  # name of the check that must be ok before this one runs


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
    if error <= limit:  # NaN is not
        return Finding("ok", figure)
    return Finding("failed", figure, f"an error of {error:.2g} is above {limit:.2g}")
