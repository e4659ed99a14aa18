"""The command line as a person meets it: verbs, one-line errors, exit codes, a whole job, torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from megatron_vocabpar.cli import main as command
from megatron_vocabpar.schedule.make.generate import generate
from megatron_vocabpar.schedule.serialize import from_json

SMALL = [
    "--seq-length", "16", "--vocab-size", "300", "--steps", "40", "--pp", "2", "--layers", "2",
    "--device", "cpu",
]  # fmt: skip


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {number} of a text, {number * number}\n" for number in range(800)))
    return str(path)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "VOCABPAR_CACHE": str(tmp_path / "cache")}


def vocabpar(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "megatron_vocabpar", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_verbs_are_listed_without_torch() -> None:
    code = (
        "import sys; from click.testing import CliRunner\n"
        "from megatron_vocabpar.cli.main import VERBS, main\n"
        "shown = CliRunner().invoke(main, ['--help']).output\n"
        "CliRunner().invoke(main, ['train', '--help'])\n"
        "assert all(verb in shown for verb in VERBS), shown\n"
        "heavy = {'torch', 'megatron', 'numpy', 'matplotlib'} & sys.modules.keys()\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_version() -> None:
    result = CliRunner().invoke(command.main, ["--version"])
    assert result.output.startswith("vocabpar, version ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pp", "9"], "--pp 9 is larger than --layers 8"),
        (["--microbatches", "0"], "--microbatches is 0"),
        (["--method", "vocab2"], "did you mean vocab-2?"),
        (["--text", "/no/such/text"], "--text /no/such/text: there is no such file"),
        (["--vocab-size", "300", "--tokenizer-vocab-size", "301"], "--vocab-size 300 is smaller than"),
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


def test_a_module_of_an_extra_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(verb: str) -> click.Command:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(command, "load", load)
    result = CliRunner().invoke(command.main, ["train"])
    assert result.exit_code == 2
    assert result.stderr == (
        "vocabpar train: error: the module 'torch' is not installed; "
        "run in the clone: pip install '.[train]'\n"
    )


@pytest.mark.parametrize("culprit", ["int('x')", "raise ValueError('ours')"])
def test_only_our_own_value_errors_are_the_users(monkeypatch: pytest.MonkeyPatch, culprit: str) -> None:
    scope = {"__name__": "megatron_vocabpar.x" if "ours" in culprit else "somewhere.else"}
    failing = click.Command("train", callback=lambda: exec(culprit, scope))
    monkeypatch.setattr(command, "load", lambda verb: failing)
    result = CliRunner().invoke(command.main, ["train"])
    if "ours" in culprit:
        assert (result.exit_code, result.stderr) == (2, "vocabpar train: error: ours\n")
    else:
        assert isinstance(result.exception, ValueError)


def test_an_interrupt_while_the_command_line_is_imported(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text(f"import os\nos.kill(os.getpid(), {int(signal.SIGINT)})\n")
    root = str(Path(command.__file__).parents[2])
    interrupted = vocabpar(environment={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{root}"})
    assert (interrupted.returncode, interrupted.stderr) == (130, "vocabpar: interrupted\n")


def fake_job(*arguments: str) -> list[str]:
    """Python's arguments for a job whose workers only pretend."""
    code = (
        "import functools\n"
        "from megatron_vocabpar.train import job\n"
        "job.run_job = functools.partial(job.run_job, worker_module='tests.train.fake_worker')\n"
        "from megatron_vocabpar.cli.main import main\n"
        "main(prog_name='vocabpar')"
    )
    return ["-c", code, "train", *arguments]


def test_a_whole_job_with_two_methods(tmp_path: Path, text: str, environment: dict[str, str]) -> None:
    output = tmp_path / "out"
    arguments = [*SMALL, "--text", text, "--output", str(output), "--compare", "baseline"]
    result = subprocess.run(
        [sys.executable, *fake_job(*arguments)], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert "training vocab-2 on 2 processes (cpu)" in result.stdout
    assert "rank 0 of 2 trains baseline" in result.stdout
    assert (output / "index.html").is_file()
    assert (output / "baseline" / "data.json").is_file()
    assert from_json((output / "vocab-2" / "schedule.json").read_text()) == generate("vocab-2", 2, 8)
    assert "<p>Schedule: 1f1b, 1 model chunk a rank; planned peak" in (output / "index.html").read_text()
    again = vocabpar("train", *arguments, environment=environment)
    assert again.returncode == 2
    assert "give --resume, --overwrite, or another folder" in again.stderr


@pytest.mark.slow
def test_a_further_method_joins_a_finished_job(
    tmp_path: Path, text: str, environment: dict[str, str]
) -> None:
    arguments = [*SMALL, "--text", text, "--output", str(tmp_path / "out"), "--compare"]
    for further in ([*arguments, "baseline"], [*arguments, "baseline,naive", "--resume"]):
        job = [sys.executable, *fake_job(*further)]
        result = subprocess.run(job, env=environment, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
    assert "baseline has done its 40 steps" in result.stdout
    assert "rank 0 of 2 trains naive" in result.stdout


@pytest.mark.slow
def test_a_failing_worker_is_exit_code_1(tmp_path: Path, text: str, environment: dict[str, str]) -> None:
    arguments = [*SMALL, "--text", text, "--output", str(tmp_path / "out")]
    result = subprocess.run(
        [sys.executable, *fake_job(*arguments)],
        env={**environment, "FAKE_WORKER": "raise:1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1
    first = result.stderr.splitlines()[0]
    assert first.startswith(
        "vocabpar train: error: rank 1 raised RuntimeError: the pretended fault (at step 7"
    )


@pytest.mark.slow
def test_ctrl_c_is_exit_code_130(tmp_path: Path, text: str, environment: dict[str, str]) -> None:
    arguments = [*SMALL, "--text", text, "--output", str(tmp_path / "out")]
    process = subprocess.Popen(
        [sys.executable, *fake_job(*arguments)], env={**environment, "FAKE_WORKER": "wait"}
    )
    deadline = time.monotonic() + 240
    while not (tmp_path / "out" / "vocab-2" / "pid1").exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=240) == 130


def torchrun(
    tmp_path: Path, environment: dict[str, str], *arguments: str
) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    _, code, *words = fake_job(*arguments)
    script.write_text(f"import sys\nsys.argv[1:] = {words!r}\n{code}\n")
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.slow
def test_under_torchrun(tmp_path: Path, text: str, environment: dict[str, str]) -> None:
    output = tmp_path / "out"
    result = torchrun(
        tmp_path, environment, *SMALL, "--text", text, "--output", str(output), "--compare", "baseline"
    )
    assert result.returncode == 0, result.stderr
    assert "rank 0 of 2 trains baseline" in result.stdout
    assert (output / "vocab-2" / "pid1").exists()
    assert (output / "index.html").is_file()


@pytest.mark.slow
def test_a_refusal_under_torchrun_is_said_once(
    tmp_path: Path, text: str, environment: dict[str, str]
) -> None:
    result = torchrun(
        tmp_path, environment, *SMALL, "--text", text, "--output", str(tmp_path / "o"), "--tp", "2"
    )
    assert result.returncode != 0
    assert (
        result.stderr.count("torchrun started 2 processes, but the job has --pp 2 × --tp 2 × --dp 1 = 4") == 1
    )
    assert not (tmp_path / "o").exists()


@pytest.mark.slow
def test_a_failure_under_torchrun_names_the_rank(
    tmp_path: Path, text: str, environment: dict[str, str]
) -> None:
    environment = {**environment, "FAKE_WORKER": "kill:1"}
    result = torchrun(tmp_path, environment, *SMALL, "--text", text, "--output", str(tmp_path / "out"))
    assert result.returncode != 0
    assert result.stderr.count("error: rank 1 was killed by signal 9, SIGKILL (at step 7, in pass 2S5") == 1
