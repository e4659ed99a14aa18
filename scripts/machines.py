"""The README's commands, or the tests, on machines that differ from this one.

    python3 scripts/machines.py                      every row, one after the other
    python3 scripts/machines.py "Python 3.12" AVX2   rows whose names contain a word
    python3 scripts/machines.py --list

A row runs in a clone of the last commit, in a folder of its own under ``--work``, and its result goes to
scripts/machines.md. Rows named "README" make an environment of their own and run ``make train``, then
``make test``; the others share one environment for each torch. A row that this machine cannot have says so.
Standard library only; Linux; rows that take rights away need root.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "scripts" / "machines.md"
LIMIT_S = 1800

README = 'make train PYTHON="$PYTHON" TORCH="$TORCH" && make test PYTHON="$PYTHON" TORCH="$TORCH"'
TRAIN = (
    "python -m megatron_vocabpar train --compare baseline --overwrite"
    " && python -m lab emulate --microbatches 16 --scale 6 --report vocabpar-out"
)
PYTEST = 'python -m pytest -n 2 --dist loadfile -m "not slow and not long" -p no:cacheprovider'
# What the documentation promises bit for bit or to a tolerance, and what reads a checkpoint.
PROMISES = (
    f"{PYTEST} tests/layers tests/losses tests/pipeline/test_invariance.py"
    " tests/pipeline/test_equality.py tests/pipeline/test_bf16.py tests/train/test_trainer.py"
)
# What starts processes, writes files or measures time: load or an earlier job can change nothing else.
PROCESSES = (
    f"{PYTEST} tests/runtime tests/train tests/faults tests/lab tests/doctor tests/cli"
    " tests/pipeline/test_equality.py tests/pipeline/test_measured_plan.py"
)
ROOMS = f"{PYTEST} tests/layers tests/losses tests/runtime tests/pipeline tests/train tests/lab"
# A job that was started, and stopped by Ctrl-C once it trains.
INTERRUPTED = (
    'setsid bash -c "trap - INT; exec python -m megatron_vocabpar train --overwrite" & job=$!;'
    " for i in $(seq 60); do sleep 1; grep -qs . vocabpar-out/vocab-2/metrics.jsonl && break; done;"
    " kill -INT -- -$job; wait $job; test -d vocabpar-out"
)
BUSY = "for i in 1 2; do (while :; do :; done) & done; trap 'kill $(jobs -p)' EXIT;"
NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
SMALL = (
    "mount -t tmpfs -o size=64m tmpfs /dev/shm && ip link set lo up"
    ' && echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6 && exec "$@"'
)
"""For ``unshare``: a small /dev/shm, and no network but this machine's own IPv4."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One machine.

    Attributes:
        name: as in the table.
        command: for bash, in the clone.
        python: ``3.12``: the interpreter's version; ``system``: that of /usr/bin.
        torch: as for pip.
        own: an environment of its own, made by the commands; else one that the rows of this torch share.
        environment: further variables.
        inside: the words of a command that the row's own is given to.
        folder: the clone's name.
        owner: user id that owns the clone.
    """

    name: str
    command: str
    python: str = "system"
    torch: str = "torch==2.13.0"
    own: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    inside: tuple[str, ...] = ()
    folder: str = "clone"
    owner: int | None = None


def rows() -> list[Row]:
    """Every row of the table, in its order."""

    def readme(what: str, **options: Any) -> Row:
        return Row(name=f"README, {what}", command=README, own=True, **options)

    def tests(name: str, command: str = PYTEST, **options: Any) -> Row:
        return Row(name=name, command=command, **options)

    def settings(threads: int, variable: str, value: str) -> Row:
        environment = {variable: value, "OMP_NUM_THREADS": str(threads)}
        return tests(f"{variable}={value}, {threads} threads", PROMISES, environment=environment)

    home = {"HOME": "/nonexistent"}
    words = {"LANG": "C", "LC_ALL": "C", "TZ": "Asia/Kathmandu", "TMPDIR": "{elsewhere}"}
    small = ("unshare", "-m", "-n", "sh", "-c", SMALL, "sh")
    both = f"{TRAIN} && {PROCESSES}"
    return [
        readme("the system's Python"),
        readme(
            "user without root or home, spaces and umlauts",
            environment=home,
            inside=NOBODY,
            owner=65534,
            folder="ein Ördner für alles",
        ),
        *(tests(f"Python {version}", python=version) for version in ("3.11", "3.12", "3.13")),
        *(tests(f"torch {version}", ROOMS, torch=f"torch=={version}") for version in ("2.8.0", "2.11.0")),
        settings(1, "ATEN_CPU_CAPABILITY", "default"),
        settings(2, "ATEN_CPU_CAPABILITY", "avx2"),
        settings(3, "MKL_ENABLE_INSTRUCTIONS", "SSE4_2"),
        settings(8, "MKL_ENABLE_INSTRUCTIONS", "AVX2"),
        settings(2, "ONEDNN_MAX_CPU_ISA", "SSE41"),
        tests("a read-only installation and clone", inside=NOBODY),
        tests("LANG=C, TZ=Asia/Kathmandu, TMPDIR elsewhere", environment=words),
        tests("one core", inside=("taskset", "-c", "0")),
        tests("64 MiB of /dev/shm, no network, no IPv6", both, inside=small),
        *(tests(f"a busy machine, run {i} of 5", f"{BUSY} {PROCESSES}") for i in range(1, 6)),
        tests("after an interrupted make train", f"{INTERRUPTED}; {both}"),
        tests("both commands, twice in a row", f"{both} && {both}"),
    ]


def interpreter(version: str) -> str | None:
    """The Python of a version (``3.12``) on the path or among pyenv's, the newest first; None without one."""
    if version == "system":
        return "/usr/bin/python3" if Path("/usr/bin/python3").exists() else None
    folders = [Path(folder) for folder in os.environ["PATH"].split(os.pathsep)]
    kept = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin"), reverse=True)
    for python in (folder / f"python{version}" for folder in (*kept, *folders)):
        if python.exists() and subprocess.run([python, "-c", ""], capture_output=True).returncode == 0:
            return str(python)
    return None


def head() -> str:
    """The last commit, in short."""
    words = ["git", "-C", ROOT, "rev-parse", "--short", "HEAD"]
    return subprocess.check_output(words, text=True).strip()


def run(row: Row, work: Path) -> str:
    """The row's result in words: pytest's last line, or how its command ended."""
    python = interpreter(row.python)
    if python is None:
        return f"not to be had here: no Python {row.python}"
    folder = Path(tempfile.mkdtemp(dir=work))
    folder.chmod(0o755)
    clone, elsewhere = folder / row.folder, folder / "elsewhere"
    elsewhere.mkdir()
    elsewhere.chmod(0o777)
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    if row.owner is not None:
        for path in (clone, *clone.rglob("*")):
            os.chown(path, row.owner, row.owner)
    environment = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    environment |= {"PYTHON": python, "TORCH": row.torch}
    if not row.own:
        venv = shared_environment(row, python, clone, work)
        environment |= {"PATH": f"{venv}/bin{os.pathsep}{environment['PATH']}", "PYTHONPATH": str(clone)}
    environment |= {name: value.format(elsewhere=elsewhere) for name, value in row.environment.items()}
    log = work / f"{re.sub(r'[^a-z0-9]+', '-', row.name.lower())}.log"
    start = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*row.inside, "bash", "-c", row.command],
            cwd=clone,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            code = process.wait()
    shutil.rmtree(folder, ignore_errors=True)
    closing = re.findall(r"^=+ (\d+ .*) in [\d.]+s.* =+$", log.read_text(errors="replace"), re.MULTILINE)
    tests = "; ".join(re.sub(r", \d+ warnings?", "", line) for line in closing) or "no tests"
    outcome = "ok" if code == 0 else f"**failed**, exit code {code}"
    return f"{outcome}: {tests}; {time.monotonic() - start:.0f} s"


def shared_environment(row: Row, python: str, clone: Path, work: Path) -> Path:
    """The environment of a torch, made by ``make install`` once."""
    venv = work / f"venv-{row.python}-{row.torch.replace('==', '-')}"
    if not (venv / ".vocabpar-installed-test").exists():
        words = ["make", "install", f"PYTHON={python}", f"TORCH={row.torch}", f"VENV={venv}"]
        environment = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
        subprocess.run(words, cwd=clone, env=environment, check=True, stdout=subprocess.DEVNULL)
    return venv


def write_result(name: str, commit: str, result: str) -> None:
    """Put a row's result into the page's table, in the order of ``rows``."""
    above, rule, tail = PAGE.read_text(encoding="utf-8").partition("| --- | --- | --- |\n")
    known = {line.split(" | ")[0].removeprefix("| "): line for line in tail.splitlines()}
    known[name] = f"| {name} | {date.today().isoformat()}, {commit} | {result} |"
    lines = [known[row.name] for row in rows() if row.name in known]
    PAGE.write_text(above + rule + "\n".join(lines) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "words", nargs="*", help="run the rows whose names contain one of these; default: all"
    )
    parser.add_argument("--list", action="store_true", help="print the rows' names")
    parser.add_argument(
        "--work", type=Path, default=ROOT / ".machines", help="for clones, environments and logs"
    )
    arguments = parser.parse_args()
    words = arguments.words or [""]
    chosen = [row for row in rows() if any(word in row.name for word in words)]
    if not chosen:
        parser.error(f"no row is named so: {', '.join(arguments.words)}; see --list")
    if arguments.list:
        print("\n".join(row.name for row in chosen))
        return 0
    arguments.work.mkdir(exist_ok=True)
    failed = 0
    for row in chosen:
        print(f"{row.name} ... ", end="", flush=True)
        commit = head()  # before the row, in case another one follows while it runs
        result = run(row, arguments.work.resolve())
        print(result, flush=True)
        write_result(row.name, commit, result)
        failed += result.startswith("**failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
