"""One fault: what is run, what goes wrong, how it must end, and the checks that hold for each of them."""

from __future__ import annotations

import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megatron_vocabpar.train.metrics import read_metrics
from tests.faults import plants
from tests.faults.warm import Command, Plant, descendants, kill

SMALL = (
    "--seq-length 16 --vocab-size 300 --pp 2 --layers 2 --hidden 16 --heads 2 --microbatches 2 "
    "--micro-batch-size 1 --warmup 1 --device cpu --eval-interval 0 --log-interval 1"
)
ENDS_WITHIN_S = 5.0
_SAID = re.compile(r"^((?:vocabpar|lab)[\w ]*: (error: |interrupted)|Error: |Usage: )", re.MULTILINE)
_NOISE = re.compile(r"terminate called|Exception ignored|RuntimeWarning|core dumped")


@dataclass(frozen=True)
class Place:
    """Where a case runs: ``out`` is its results folder, ``text.txt`` a text; both in ``folder``."""

    folder: Path

    @property
    def out(self) -> Path:
        return self.folder / "out"


Prepare = Callable[[Place], object]
Meanwhile = Callable[[Place, Command], object]


@dataclass(frozen=True)
class Fault:
    """A fault and how it must end.

    Attributes:
        name: what is at stake, then the fault.
        code: expected exit code.
        says: regular expression that what it says must hold.
        arguments: after ``vocabpar``; ``{}`` in them is the case's folder, and ``SMALL`` a small job's flags.
        after: a job that has been there before: ``"none"``, ``"one"`` method or ``"two"``, with checkpoints
            of the steps 2 and 4.
        prepare: what is done to the folder before.
        plant: what goes wrong inside.
        meanwhile: what is done while it runs.
        variables: of the environment, besides.
        limit_s: within which it must end.
        messages: lines that begin with the verb's error; 0 where it goes well or is killed itself.
        spared: whether checkpoints and metrics of before must still be there.
        real: starts a Python of its own.
        launched: by torchrun, which says things of its own.
    """

    name: str
    code: int
    says: str
    arguments: str = "train {small} --steps 4 --no-save --text {}/text.txt --output {}/out"
    after: str = "none"
    prepare: Prepare = lambda place: None
    plant: Plant = plants.none
    meanwhile: Meanwhile = lambda place, command: None
    variables: Mapping[str, str] = field(default_factory=dict)
    limit_s: float = 60.0
    messages: int | None = None
    spared: bool = True
    real: bool = False
    launched: bool = False

    def words(self, place: Place) -> list[str]:
        text = self.arguments.replace("{small}", SMALL)
        return [word.replace("{}", str(place.folder)) for word in text.split()]


def run_case(case: Fault, folder: Path, templates: Mapping[str, Path]) -> None:
    """Run a case in an empty folder; every claim about it is asserted.

    Args:
        case: the fault.
        folder: for its files.
        templates: results folders to copy, by ``Fault.after``; ``"cache"`` and ``"text"`` are shared.
    """
    place = Place(folder)
    shutil.copy(templates["text"], folder / "text.txt")
    if case.after != "none":
        shutil.copytree(templates[case.after], place.out)
    temporary = Path(tempfile.mkdtemp(prefix="f-", dir="/tmp"))  # sockets have short names
    case.prepare(place)
    before = _kept(place.out)
    known = descendants()
    environment = {
        **os.environ,
        "VOCABPAR_CACHE": str(templates["cache"]),
        "TMPDIR": str(temporary),
        "OMP_NUM_THREADS": "1",
        **case.variables,
    }
    command = Command(case.words(place), folder, environment, case.plant, case.real)
    try:
        case.meanwhile(place, command)
        code = command.wait(case.limit_s)
        out, err = command.said()
        told = f"{case.name}\n--- standard output\n{out}\n--- standard error\n{err}"
        assert code is not None, f"not ended after {case.limit_s} s: {told}"
        left = _left(known)
        assert not left, f"alive: {left}; {told}"
    finally:
        kill(descendants() - known)
    code = 130 if code == -signal.SIGINT else code  # so a shell says it
    assert code == case.code, f"exit code {code}, not {case.code}: {told}"
    assert re.search(case.says, out + err), f"does not say {case.says!r}: {told}"
    expected = case.messages if case.messages is not None else int(code > 0)
    assert case.launched or len(_SAID.findall(err)) == expected, f"{expected} messages expected: {told}"
    assert case.launched or not _NOISE.search(err), told
    assert case.launched or "Traceback" not in err.partition("error: rank ")[0], told
    of_torchrun = "torchelastic_"  # it leaves its folder after a failure
    temporary_files = [
        path for path in temporary.iterdir() if not (case.launched and path.name.startswith(of_torchrun))
    ]
    shutil.rmtree(temporary)
    assert not temporary_files, f"{temporary_files} are left: {told}"
    if case.spared:
        _assert_kept(before, place.out, told)


def _left(known: set[int]) -> dict[int, str]:
    """Processes that are still there some seconds later, with their command lines."""
    end = time.monotonic() + ENDS_WITHIN_S
    while (left := descendants() - known) and time.monotonic() < end:
        time.sleep(0.05)
    return {pid: Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in left}


@dataclass(frozen=True)
class _Kept:
    checkpoints: frozenset[Path]
    losses: Mapping[Path, Mapping[int, float]]


def _kept(out: Path) -> _Kept:
    """Complete checkpoints, and the loss of each step by file, up to the newest checkpoint's."""
    complete = frozenset(path.parent for path in out.glob("*/checkpoint/step_*[0-9]/metadata.json"))
    losses = {}
    for path in out.glob("*/metrics.jsonl"):
        steps = [int(each.name[5:]) for each in complete if each.parents[1] == path.parent]
        found = {record["step"]: record.get("loss") for record in read_metrics(path)}
        losses[path] = {step: loss for step, loss in found.items() if step <= max(steps, default=0)}
    return _Kept(complete, losses)


def _assert_kept(before: _Kept, out: Path, told: str) -> None:
    after = _kept(out)
    assert before.checkpoints <= after.checkpoints, f"lost: {before.checkpoints - after.checkpoints}; {told}"
    for path, losses in before.losses.items():
        now = {record["step"]: record.get("loss") for record in read_metrics(path)}
        assert losses.items() <= now.items(), f"{path} lost lines: {told}"
