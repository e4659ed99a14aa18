"""Every fault ends in time, with one clear message and the right exit code; nothing is lost."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults import warm
from tests.faults.case import SMALL, Fault, Place, run_case
from tests.faults.job_faults import FAULTS, unmount

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc"),
]


@pytest.fixture(scope="module", autouse=True)
def adopted() -> Iterator[None]:
    with warm.orphans_adopted():
        yield


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Results of jobs that went well, to be copied: of one method, and of two."""
    folder = tmp_path_factory.mktemp("templates")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warm.import_all()
    text = folder / "text.txt"
    text.write_text("".join(f"line {number} of a text, {number * number}\n" for number in range(800)))
    made = {"text": text, "cache": folder / "cache"}
    for name, more in (("one", ""), ("two", "--compare baseline")):
        made[name] = folder / name
        job = f"train {SMALL} --steps 4 --save-interval 2 --text {text} --output {made[name]} {more}"
        command = warm.Command(job.split(), folder, {**os.environ, "VOCABPAR_CACHE": str(folder / "cache")})
        assert command.wait(120) == 0, command.said()
    return made


@pytest.mark.parametrize("case", FAULTS, ids=[case.name for case in FAULTS])
def test_a_fault_ends_as_it_must(case: Fault, templates: dict[str, Path], tmp_path: Path) -> None:
    try:
        run_case(case, tmp_path, templates)
    finally:
        unmount(Place(tmp_path))
