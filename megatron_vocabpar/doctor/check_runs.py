"""A check, its run in processes of its own, and the table of results.

A check that raises, crashes or hangs is a failed row. A kernel that reads memory out of bounds leaves its
process without a usable GPU, and a collective that a peer does not join never returns. So no two checks share
a process, and the process that runs them never touches a GPU.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from megatron_vocabpar.runtime.processes import ProcessFailed
from megatron_vocabpar.runtime.processes import run as run_processes
from megatron_vocabpar.text_tables import console, text_table

Outcome = Literal["ok", "failed", "not run"]
_OUTCOMES: tuple[Outcome, ...] = ("ok", "failed", "not run")
_COLUMNS = 150
_LONGEST_REASON = 200
_ENVIRONMENT = {"PYTHONFAULTHANDLER": "1"}  # a crash then prints the traceback of every thread


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
    """One row of the table: the finding, its time, and for a failed check the last lines of its output."""

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


def run_all(checks: Sequence[Check], say: Callable[[str], None]) -> Iterator[Result]:
    """Run the checks in order; a check that depends on another follows it."""
    outcomes: dict[str, str] = {}
    for check in checks:
        say(check.name)
        if check.after is not None and outcomes[check.after] != "ok":
            reason = f"{check.after}: {outcomes[check.after]}"
            result = Result(check.name, "not run", "", reason, 0.0)
        else:
            result = run(check)
        outcomes[check.name] = result.outcome
        yield result


def run(check: Check) -> Result:
    """Run one check in processes of its own, and return rank 0's finding with its time."""
    start = time.monotonic()
    log: tuple[str, ...] = ()
    try:
        finding: Finding = run_processes(
            partial(check.function, **check.arguments),
            ranks=check.ranks,
            environment=_ENVIRONMENT,
            timeout_s=check.timeout_s,
            quiet=True,
        )[0]
    except ProcessFailed as failed:
        reason, *lines = str(failed).splitlines()
        finding, log = Finding("failed", reason=reason[:_LONGEST_REASON]), tuple(lines)
    seconds = time.monotonic() - start
    return Result(check.name, finding.outcome, finding.figure, finding.reason, seconds, log)


def print_table(results: Sequence[Result]) -> None:
    """Print the number of each outcome, one row per check, and the last lines of each failed check."""
    shown, counts = console(_COLUMNS), Counter(result.outcome for result in results)
    shown.print(", ".join(f"{counts[outcome]} {outcome}" for outcome in _OUTCOMES))
    rows = [["check", "result", "figure", "seconds"]]
    for result in results:
        texts = [text for text in (result.reason, result.figure) if text]
        rows.append([result.check, result.outcome, "\n".join(texts), f"{result.seconds:.1f}"])
    shown.print(text_table(rows, rows[0][:3]))
    for result in results:
        if result.log:
            shown.print(f"\n{result.check} printed last:", style="bold")
            shown.print("\n".join(result.log))
