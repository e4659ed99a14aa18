"""What the pages tell people to type: every line is one that its verb takes, and one case of each verb runs.

Verbs run as forks of this process. Scripts run with the programs that they start replaced by one that records
its arguments; what they would have started must be a line that its verb takes, too.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import click
import pytest
import torch

from lab import __main__ as lab
from lab.losses.theirs import MODULES as MODULES_OF
from megatron_vocabpar.cli import main as vocabpar
from tests.faults import warm
from tests.faults.case import SMALL
from tests.slime_module import PLAIN
from tests.support.typed_commands import ROOT, name_of, typed

TYPED = typed()
GROUPS: dict[str, click.Group] = {"vocabpar": vocabpar.main, "lab": lab.main}
_LEFT_OUT = re.compile(r"\.\.\.|\[.*")

_MODEL = "--pp 2 --layers 2 --hidden 32 --seq-length 32 --vocab-size 512 --device cpu"
_TABLE = "{}/scripts/artifact/quick.csv"
VERBS = {
    "vocabpar train": f"train {SMALL} --steps 1 --text {{}}/text.txt --output {{}}/out",
    "vocabpar doctor": "doctor --megatron {}/Megatron-LM",
    "vocabpar plan": "plan --preset llama-3.2-3b --pp 2 --microbatches 4",
    "vocabpar layout": "layout --preset llama-3.2-3b --pp 2 --microbatches 4 --chunks 1",
    "vocabpar schedule": "schedule --pp 2 --microbatches 2 --format json --output {}/s.json",
    "vocabpar simulate": "simulate {}/s.json --html {}/s.html",
    "lab emulate": "lab emulate vocab-2 --pp 2 --microbatches 2 --scale 0.01 --report {}/out",
    "lab gpu": "lab gpu host --device cpu --tiny --save {}/results",
    "lab patches": "lab patches",
    "lab artifact": f"lab artifact run {_TABLE} --only vocab-2 --megatron {{}}/Megatron-LM --dry-run",
    "lab runtime": f"lab runtime {_MODEL} --microbatches 2 --pairs 1",
    "lab losses": "lab losses --slime {}/slime --tokens 8 --vocab-size 96 --rounds 1",
    "lab paper": "lab paper table3",
    "lab page": "lab page recipes",
}
"""In this order: some read what others write. ``{}`` is a folder."""

SCRIPTS = {
    "scripts/artifact/quick_exp.sh": ("run vocab-2", "lab artifact"),
    "scripts/artifact/full_exp.sh": ("scripts/artifact/exp_one_host.csv --smoke", "lab artifact"),
    "scripts/slurm/full_exp.sbatch": ("scripts/artifact/exp_two_hosts.csv", "lab artifact"),
    "scripts/slurm/pretrain.sbatch": ("--enable-vocab-parallel", "megatron_vocabpar.launch"),
    "scripts/docker/try_on_debian.sh": ("", "vocabpar doctor", "vocabpar schedule", "vocabpar train"),
}
"""A script's arguments, and what of ours it starts."""

MODULES = {
    "megatron_vocabpar.launch": ("{}/Megatron-LM/pretrain_gpt.py --lr 1", "pretrain_gpt.py --lr 1"),
    "megatron_vocabpar.megatron_lm.flags_page": ("{}/page.md", ""),
}
"""A module's arguments, and what it must say."""

ELSEWHERE = {
    "lab drift": "tests/lab/test_drift.py",
    "lab rates": "tests/lab/test_published_runs.py",
    "lab kernels": "tests/lab/test_kernels.py",
    "scripts/head_precision.py": "tests/test_head_precision.py",
}
"""Run in every run by tests of their own."""

STUB = """#!/bin/sh
{ printf '%s\\t' "${0##*/}" "$@"; echo; } >> "$RECORD"
echo step 1
"""
_STUBS = ("python3", "torchrun", "scontrol", "podman", "mmdebstrap", "sleep")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a text, a page with our tables, what passes for a checkout of Megatron-LM, and what pages name."""
    path = tmp_path_factory.mktemp("typed")
    (path / "text.txt").write_text(
        "".join(f"line {number} of a text, {number**2}\n" for number in range(800))
    )
    (path / "page.md").write_text((ROOT / "docs" / "flags.md").read_text())
    (path / "scripts").symlink_to(ROOT / "scripts")
    for name in ("Megatron-LM", "vocabpar-out/Megatron-LM"):
        (path / name).mkdir(parents=True)
    (slime,) = MODULES_OF["slime"].values()
    (path / "slime" / slime).parent.mkdir(parents=True)
    (path / "slime" / slime).write_text(PLAIN)
    megatron = find_spec("megatron.core")
    assert megatron is not None
    assert megatron.origin is not None
    (path / "Megatron-LM" / "megatron").symlink_to(Path(megatron.origin).parents[1])
    (path / "Megatron-LM" / "pretrain_gpt.py").write_text("import sys\nprint(*sys.argv)\n")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warm.import_all()
    return path


def forked(_: int | None) -> None:
    """Ranks that a verb spawns are forked: they import nothing again."""
    vars(torch.multiprocessing)["spawn"] = partial(torch.multiprocessing.start_processes, start_method="fork")


def check_line(words: Sequence[str], folder: Path) -> None:
    """A verb of ours takes these words; paths from the root lead to the folder."""
    start = words.index("-m") + 1 if "-m" in words else 0
    program, verb, *rest = words[start:]
    rest = [f"{folder}/{word.rpartition('/')[2]}" if word.startswith("/") else word for word in rest]
    group = GROUPS["lab" if program == "lab" else "vocabpar"]
    with click.Context(group) as context, suppress(click.exceptions.Exit):  # of --help
        command = group.get_command(context, verb)
        assert command is not None
        command.make_context(verb, rest)


@pytest.mark.parametrize("name", [name for name in TYPED if name.split()[0] in GROUPS])
def test_a_verb_takes_what_is_typed(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for page, words, whole in TYPED[name]:
        if whole and not any(map(_LEFT_OUT.fullmatch, words)):
            try:
                check_line(words, folder)
            except (click.UsageError, ValueError) as error:
                pytest.fail(f"{page}: {' '.join(words)}: {error}")


def test_each_has_a_case() -> None:
    """A page that prints a new verb or script needs a row in one of the tables above."""
    cases = {*VERBS, *SCRIPTS, *MODULES, *ELSEWHERE}
    assert sorted(name for name in TYPED if not name.startswith("make ") and name not in cases) == []
    assert sorted({*cases} - {*TYPED}) == []
    for name, path in ELSEWHERE.items():
        assert re.search(rf"\b{name.split()[-1].rpartition('/')[2]}\b", (ROOT / path).read_text())


@pytest.mark.parametrize("name", VERBS)
def test_a_verb_runs(name: str, folder: Path) -> None:
    words = [word.replace("{}", str(folder)) for word in VERBS[name].split()]
    environment = {**os.environ, "VOCABPAR_CACHE": str(folder / "cache")}
    command = warm.Command(words, folder, environment, plant=forked)
    code = command.wait(60)
    assert code == 0, command.said()


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_starts_what_it_says(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    for program in _STUBS:
        (tmp_path / "bin" / program).write_text(STUB)
    (tmp_path / "bin" / "srun").write_text('#!/bin/sh\nexec "$@"\n')
    for program in (tmp_path / "bin").iterdir():
        program.chmod(0o755)
    arguments, *expected = SCRIPTS[name]
    record = tmp_path / "record"
    environment = os.environ | {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "RECORD": str(record),
        "MEGATRON_LM_PATH": str(folder / "Megatron-LM"),
        **{"SLURM_JOB_NODELIST": "a", "SLURM_NNODES": "1", "SLURM_NODEID": "0"},
    }
    done = subprocess.run(
        ["bash", name, *arguments.split()],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    started = [line.split("\t")[:-1] for line in record.read_text().splitlines()]
    ours = [words for line in started for words in [_ours(line)] if words]
    assert [name for name in expected if name not in map(name_of, ours)] == []
    monkeypatch.chdir(folder)
    monkeypatch.setenv("MEGATRON_LM_PATH", environment["MEGATRON_LM_PATH"])
    for words in ours:
        if name_of(words).split()[0] in GROUPS:
            check_line(words, folder)


def _ours(line: list[str]) -> list[str]:
    """From our program on: ``vocabpar ...`` in a container, ``python3 -m lab ...``, ``torchrun ...``."""
    if "vocabpar" in line:
        return line[line.index("vocabpar") :]
    return line if name_of(line) else []


@pytest.mark.parametrize("name", MODULES)
def test_a_module_runs(name: str, folder: Path) -> None:
    arguments, said = MODULES[name]
    done = subprocess.run(
        [sys.executable, "-m", name, *arguments.replace("{}", str(folder)).split()],
        cwd=folder, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert said in done.stdout


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_has_the_targets() -> None:
    """Tried without being run."""
    targets = [name.split()[1] for name in TYPED if name.startswith("make ")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    for target in targets:
        done = subprocess.run(
            ["make", "-n", target], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
