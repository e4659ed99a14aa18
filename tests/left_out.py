"""One line at the end of a run: how many tests were left out, by cause."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

SLOW = "are slow or long (make test-ci, make test-long)"
_VARIABLE = re.compile(r"\b[A-Z]+(?:_[A-Z]+)*_PATH\b")
_LIBRARY = re.compile(
    r"could not import '([\w.]+)'|needs (\w+), which is not installed|(\w+) is not installed"
)


def cause(reason: str) -> str:
    """What would run a test that was skipped for this reason."""
    if "CUDA device" in reason:
        return "need a GPU"
    if "interpreter" in reason:
        return "run in Triton's interpreter, by another test"
    if variables := sorted({*_VARIABLE.findall(reason)}):
        return f"need {' and '.join(variables)}"
    if library := _LIBRARY.search(reason):
        return f"need the library {next(filter(None, library.groups()))}"
    return "are for other versions or machines"


def line(reasons: Iterable[str], slow: int) -> str:
    """``left out: 120 need a GPU, 20 need MEGATRON_LM_PATH``; empty if nothing was."""
    counts = Counter(map(cause, reasons)) + Counter({SLOW: slow})
    return "left out: " + ", ".join(f"{count} {why}" for why, count in counts.most_common()) if counts else ""
