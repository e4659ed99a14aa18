"""The command line as a person meets it: verbs, one-line errors, exit codes, a whole job, torchrun."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from megatron_vocabpar.cli import main as command
from megatron_vocabpar.runtime.processes import Stopped
from megatron_vocabpar.schedule.make.generate import generate
from megatron_vocabpar.schedule.serialize import from_json

SMALL = [
    "--seq-length", "16", "--vocab-size", "300", "--steps", "40", "--pp", "2", "--layers", "2",
    "--device", "cpu",
]  # fmt: skip


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A small job's flags; its results go to ``out``."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {number} of a text, {number * number}\n" for number in range(800)))
    monkeypatch.setenv("VOCABPAR_CACHE", str(tmp_path / "cache"))
    return [*SMALL, "--text", str(text), "--output", str(tmp_path / "out")]


def python(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=240, **options)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_processes_run_is_one_line(
    sent: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(*_: object) -> None:
        raise Stopped(sent)

    monkeypatch.setattr("megatron_vocabpar.train.run_job.run_job", ended)
    result = CliRunner().invoke(command.main, ["train"])
    assert (result.exit_code, result.stderr) == (128 + sent, "vocabpar train: interrupted\n")


def test_help_of_every_verb_needs_no_torch() -> None:
    code = (
        "import sys; from click.testing import CliRunner\n"
        "from megatron_vocabpar.cli.main import VERBS, main\n"
        "shown = CliRunner().invoke(main, ['--help']).output\n"
        "assert all(verb in shown for verb in VERBS), shown\n"
        "for verb in VERBS:\n"
        "    assert CliRunner().invoke(main, [verb, '--help']).exit_code == 0, verb\n"
        "heavy = {'torch', 'megatron', 'numpy', 'matplotlib'} & sys.modules.keys()\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("words", "typed", "names"),
    [
        (["schedule", "--method"], "vocab", ["vocab-1", "vocab-2"]),
        (["schedule", "--family"], "v-h", ["v-half"]),
        (["train", "--method"], "base", ["baseline"]),
        (["train", "--compare"], "baseline,vocab-1,int", ["baseline,vocab-1,interlaced"]),
        (["plan", "--preset"], "deepseek", ["deepseek-v3"]),
        (["plan", "--hardware"], "gb", ["GB200", "GB300"]),
        ([], "lay", ["layout"]),
    ],
)
def test_a_shell_completes_names(words: list[str], typed: str, names: list[str]) -> None:
    shell = ShellComplete(command.main, {}, "vocabpar", "_VOCABPAR_COMPLETE")
    assert [item.value for item in shell.get_completions(words, typed)] == names


def test_version() -> None:
    result = CliRunner().invoke(command.main, ["--version"])
    assert result.output.startswith("vocabpar, version ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pp", "9"], "--pp 9 is larger than --layers 8"),
        (["--resume"], "holds no checkpoint"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path: Path, arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(command.main, ["train", "--output", str(tmp_path / "out"), *arguments])
    assert result.exit_code == 2
    assert result.stderr.startswith("vocabpar train: error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("module", "extra"),
    [("torch", "train"), ("megatron.core", "train"), ("psutil", "tools"), ("matplotlib.figure", "tools")],
)
def test_a_module_of_an_extra_that_is_missing(
    module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has a torch and a Megatron of one's own needs the tools alone."""

    def load(package: str, verb: str) -> click.Command:
        raise ModuleNotFoundError(f"No module named '{module}'", name=module)

    monkeypatch.setattr(command, "load", load)
    result = CliRunner().invoke(command.main, ["train"])
    assert result.exit_code == 2
    assert result.stderr == (
        f"vocabpar train: error: the module '{module}' is not installed; "
        f"run in the clone: pip install '.[{extra}]'\n"
    )


@pytest.mark.parametrize("culprit", ["int('x')", "raise ValueError('ours')"])
def test_only_our_own_value_errors_are_the_users(monkeypatch: pytest.MonkeyPatch, culprit: str) -> None:
    scope = {"__name__": "megatron_vocabpar.x" if "ours" in culprit else "somewhere.else"}
    failing = click.Command("train", callback=lambda: exec(culprit, scope))
    monkeypatch.setattr(command, "load", lambda package, verb: failing)
    result = CliRunner().invoke(command.main, ["train"])
    if "ours" in culprit:
        assert (result.exit_code, result.stderr) == (2, "vocabpar train: error: ours\n")
    else:
        assert isinstance(result.exception, ValueError)


def test_an_interrupt_while_the_command_line_is_imported(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text(f"import os\nos.kill(os.getpid(), {int(signal.SIGINT)})\n")
    root = str(Path(command.__file__).parents[2])
    paths = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{root}"}
    interrupted = python("-m", "megatron_vocabpar", env=os.environ | paths)
    assert (interrupted.returncode, interrupted.stderr) == (130, "vocabpar: interrupted\n")


@pytest.mark.skipif(
    subprocess.run(
        ["unshare", "--fork", "--pid", "--map-root-user", "true"], stderr=subprocess.DEVNULL
    ).returncode
    if shutil.which("unshare")
    else True,
    reason="no process may be the first of a namespace here",
)
def test_the_first_process_of_a_container_ends_on_sigterm(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text(f"import os\nos.kill(os.getpid(), {int(signal.SIGTERM)})\n")
    root = str(Path(command.__file__).parents[2])
    done = subprocess.run(
        ["unshare", "--fork", "--pid", "--map-root-user", sys.executable, "-m", "megatron_vocabpar"],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{root}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (143, "")


FAKE_JOB = (
    "from megatron_vocabpar.train import run_job\n"
    "from tests.train.fake_results import pretend\n"
    "run_job.run_method, run_job._train = pretend, lambda job, device: pretend(job.output)\n"
    "from megatron_vocabpar.cli.main import main\n"
    "main(prog_name='vocabpar')"
)
"""A job whose ranks only pretend."""


@pytest.mark.slow
def test_a_whole_job_with_two_methods(tmp_path: Path, job: list[str]) -> None:
    output = tmp_path / "out"
    result = python("-c", FAKE_JOB, "train", *job, "--compare", "baseline")
    assert result.returncode == 0, result.stderr
    assert "training vocab-2 on 2 processes (cpu)" in result.stdout
    assert "rank 0 of 2 trains baseline" in result.stdout
    assert (output / "index.html").is_file()
    assert (output / "baseline" / "data.json").is_file()
    assert from_json((output / "vocab-2" / "schedule.json").read_text()) == generate("vocab-2", 2, 8)
    assert "<p>Schedule: 1f1b, 1 model chunk a rank; planned peak" in (output / "index.html").read_text()
    again = python("-m", "megatron_vocabpar", "train", *job, "--compare", "baseline")
    assert again.returncode == 2
    assert "give --resume, --overwrite, or another folder" in again.stderr


@pytest.mark.slow
def test_a_further_method_joins_a_finished_job(job: list[str]) -> None:
    for further in (["baseline"], ["baseline,naive", "--resume"]):
        result = python("-c", FAKE_JOB, "train", *job, "--compare", *further)
        assert result.returncode == 0, result.stderr
    assert "baseline has done its 40 steps" in result.stdout
    assert "rank 0 of 2 trains naive" in result.stdout


def torchrun(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(f"import sys\nsys.argv[1:] = {['train', *words]!r}\n{FAKE_JOB}\n")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    return python(*launcher, str(script))


@pytest.mark.slow
def test_under_torchrun(tmp_path: Path, job: list[str]) -> None:
    result = torchrun(tmp_path, *job, "--compare", "baseline")
    assert result.returncode == 0, result.stderr
    assert "rank 0 of 2 trains baseline" in result.stdout
    assert "rank 1 of 2 trains vocab-2" in result.stdout
    assert (tmp_path / "out" / "index.html").is_file()


@pytest.mark.slow
def test_what_fails_under_torchrun_is_said_once(tmp_path: Path, job: list[str]) -> None:
    result = torchrun(tmp_path, *job, "--tp", "2")
    assert result.returncode != 0
    said = "torchrun started 2 processes, but the job has --pp 2 × --tp 2 × --dp 1"
    assert result.stderr.count(said) == 1
    assert not (tmp_path / "out").exists()
