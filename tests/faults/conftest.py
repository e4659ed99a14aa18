"""Prints at the end how many of the faults and bad inputs ended as they must."""

from __future__ import annotations

from typing import Any

_KINDS = {"faults": "test_faults.py", "bad inputs": "test_bad_inputs.py"}


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for kind, file in _KINDS.items():
        ended = {
            outcome: sum(
                file in report.nodeid and getattr(report, "when", "") == "call"
                for report in terminalreporter.getreports(outcome)
            )
            for outcome in ("passed", "failed")
        }
        if total := sum(ended.values()):
            terminalreporter.write_line(f"{kind}: {ended['passed']} of {total} ended as they must")
