"""Runs each check in processes of its own: one that raises, crashes or hangs is a failed row.

A kernel that reads foreign memory leaves its process without a usable GPU, and a collective whose peer is
missing never returns. So no two checks share a process, and this one never touches a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from megatron_vocabpar.doctor.result import Check, Finding, Result
from megatron_vocabpar.runtime.processes import ProcessFailed
from megatron_vocabpar.runtime.processes import run as run_processes

_LONGEST_REASON = 200
_ENVIRONMENT = {"PYTHONFAULTHANDLER": "1"}  # a crash says where


def run_all(checks: Sequence[Check], say: Callable[[str], None]) -> Iterator[Result]:
    """Run the checks one after the other; each comes after the one that it depends on."""
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
    """Run one check; end everything that it started. Rank 0's finding counts."""
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
