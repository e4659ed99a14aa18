"""Run Megatron-LM's own ``pretrain_gpt.py`` on CPU processes and read what it reports."""

from __future__ import annotations

import atexit
import json
import os
import re
import select
import signal
import subprocess
import sys
import sysconfig
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from megatron_vocabpar.megatron_lm.bindings import VERSIONS, recognise, versions
from megatron_vocabpar.megatron_lm.checkout import source_signatures
from tests.megatron_lm.script_name import script_of
from tests.transformer_engine import hook

ON_CPU = "megatron_vocabpar.train.on_cpu"
ROOT = Path(__file__).resolve().parents[2]
_SECONDS = 280
_SAMPLES = "--train-samples"
_DIVISOR = "--make-vocab-size-divisible-by"


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


MODEL = words(
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--attention-dropout 0 --hidden-dropout 0"
)
LOCAL = words(
    "--transformer-impl local --no-gradient-accumulation-fusion --no-masked-softmax-fusion "
    "--no-persist-layer-norm --no-bias-gelu-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion "
    "--no-rope-fusion"
)
"""Megatron's own layers without what only a GPU has; else those of Transformer Engine, its default."""
BY_PATTERN = words(
    "--spec tests.megatron_lm.local_layers spec --num-layers 8 --hybrid-layer-pattern *-*-*-*- "
    "--position-embedding-type rope"
)
"""HybridModel of those layers; skip the test where ``is_since("0.18")`` is false."""
TRAINING = words(
    "--micro-batch-size 2 --global-batch-size 12 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine "
    "--weight-decay 0.01 --clip-grad 1.0 --seed 1234 --distributed-backend gloo "
    "--mock-data --num-workers 0 --tokenizer-type NullTokenizer --split 90,10,0 --log-interval 1 "
    "--no-create-attention-mask-in-dataloader --eval-interval 1000 --save-interval 1000 "
    "--ckpt-format torch_dist"
)


def checkout() -> Path:
    """The Megatron-LM checkout to test with; skips the test, saying why, where there is none."""
    path = os.environ.get("MEGATRON_LM_PATH")
    if not path:
        pytest.skip("MEGATRON_LM_PATH is not set: give the path of a Megatron-LM checkout")
    if not (Path(path) / "pretrain_gpt.py").is_file():
        pytest.skip(f"MEGATRON_LM_PATH={path} holds no pretrain_gpt.py")
    return Path(path)


@dataclass(frozen=True)
class Log:
    """What one training reported.

    Attributes:
        text: all that it printed.
        scalars: by tensorboard tag, the values in order.
    """

    text: str
    scalars: dict[str, list[float]]

    @property
    def losses(self) -> list[float]:
        """``lm loss`` of every iteration."""
        return self.scalars["lm loss"]

    @property
    def norms(self) -> list[float]:
        """Gradient norm of every iteration."""
        return self.scalars["grad-norm"]

    @property
    def evaluations(self) -> list[float]:
        """Loss of every evaluation."""
        return [float(value) for value in re.findall(r"lm loss value: +([-+.\dEe]+)", self.text)]


def scalars(folder: str | Path) -> dict[str, list[float]]:
    """By tensorboard tag, the values in order."""
    values: dict[str, list[float]] = {}
    path = Path(folder) / "scalars.jsonl"
    for line in path.read_text().splitlines() if path.exists() else ():
        tag, _, value = json.loads(line)
        values.setdefault(tag, []).append(value)
    return values


def build_dataset_helpers(megatron: Path) -> None:
    """Compile Megatron's C++ data helpers for this interpreter, whichever comes first on PATH."""
    folder = megatron / "megatron" / "core" / "datasets"
    target = folder / f"helpers_cpp{sysconfig.get_config_var('EXT_SUFFIX')}"
    if target.exists():
        return
    includes = subprocess.run(
        [sys.executable, "-m", "pybind11", "--includes"], check=True, capture_output=True, text=True
    ).stdout.split()
    partial = target.with_suffix(f".{os.getpid()}")
    command = ["g++", "-O2", "-shared", "-std=c++17", "-fPIC", *includes, str(folder / "helpers.cpp")]
    subprocess.run([*command, "-o", str(partial)], check=True)
    partial.replace(target)


def added_ids(megatron: Path) -> int:
    """How many ids the NullTokenizer adds to ``--vocab-size``: older ones add the end-of-document token."""
    return 0 if is_since("0.18", megatron) else 1


def version_of(megatron: Path | None = None) -> str:
    """The version of a checkout, by default of the tested one."""
    return recognise(source_signatures(megatron or checkout())).version


def is_since(version: str, megatron: Path | None = None) -> bool:
    """Whether a checkout, by default the tested one, is of this version or later, or of no known one."""
    found = version_of(megatron)
    return found not in VERSIONS or found in versions(version)


def pretrain(
    *arguments: str,
    pp: int = 1,
    tp: int = 1,
    dp: int = 1,
    cp: int = 1,
    vocab_size: int = 4608,
    iterations: int = 20,
    script: Path | None = None,
    fresh: bool = False,
    fails: bool = False,
    transformer_engine: bool = False,
) -> Log:
    """Run ``pretrain_gpt.py``, or that of layers by pattern, on ``pp * tp * dp * cp`` processes.

    Args:
        arguments: of Megatron and ours.
        vocab_size: number of token ids, the end-of-document token included; 0.14 makes up ids to 4096.
        script: to run instead of the checkout's own.
        fresh: start the processes as a user does, through torchrun.
        fails: whether the run is to fail rather than to succeed.
        transformer_engine: train with Megatron's default layers; skips the test where there are none.
    """
    megatron = checkout()
    layers = () if transformer_engine else LOCAL
    build_dataset_helpers(megatron)
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(str(script or megatron / f"{script_of(arguments)}.py"), *MODEL, *layers, *TRAINING),
            *("--pipeline-model-parallel-size", str(pp), "--tensor-model-parallel-size", str(tp)),
            *(["--context-parallel-size", str(cp)] if cp > 1 else []),
            *("--vocab-size", str(vocab_size - added_ids(megatron))),
            *([] if _SAMPLES in arguments else ["--train-iters", str(iterations), "--lr-warmup-iters", "2"]),
            *([] if "--eval-iters" in arguments else ["--eval-iters", "1"]),
            *([] if _DIVISOR in arguments else [_DIVISOR, "8"]),
            *(["--sequence-parallel"] if tp > 1 else []),
            *("--tensorboard-dir", folder, "--tensorboard-log-interval", "1"),
            *arguments,
        ]
        ranks = pp * tp * dp * cp
        if fresh:
            succeeded, text = _torchrun(megatron, ranks, command)
        else:
            succeeded, text = _ranks(megatron, _wheel() if transformer_engine else None).run(ranks, command)
        log = Log(text, scalars(folder))
    assert succeeded != fails, log.text[-6000:]
    return log


def _environment(megatron: Path) -> dict[str, str]:
    # Python 3.11.0 to 3.11.3 write members of enumerations so that torch.load refuses them by default.
    trusted = {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"} if sys.version_info < (3, 11, 4) else {}
    return (
        trusted
        | os.environ
        | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(megatron), os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": "1",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            **{"NCCL_ALGO": "Ring", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"},  # for --deterministic-mode
            "PYTHONWARNINGS": "ignore",
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        }
    )


def _torchrun(megatron: Path, processes: int, command: list[str]) -> tuple[bool, str]:
    """Whether the job succeeded, started as a user starts it, and what it printed."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(processes), "-m", ON_CPU, *command),
        ],
        env=_environment(megatron),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_SECONDS,
    )
    return done.returncode == 0, done.stdout


def _wheel() -> Path:
    """Transformer Engine's Python; skips the test where there is none."""
    folder = hook.wheel()
    if folder is None:
        pytest.skip(hook.MISSING)
    return folder


@cache
def _ranks(megatron: Path, transformer_engine: Path | None) -> Ranks:
    """The same as torchrun without the start of the processes; ends with the session."""
    return Ranks(megatron, transformer_engine)


class Ranks:
    """The interpreter of ``ranks.py``, started again after a job that hangs."""

    def __init__(self, megatron: Path, transformer_engine: Path | None) -> None:
        folders = [megatron, *([transformer_engine] if transformer_engine else [])]
        self._command = [sys.executable, "-m", "tests.megatron_lm.ranks", *map(str, folders)]
        self._environment = _environment(megatron)
        self._process: subprocess.Popen[str] | None = None
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        atexit.register(self.end)

    def run(self, processes: int, command: list[str]) -> tuple[bool, str]:
        """Whether all ranks of a job succeeded, and what they printed."""
        try:
            return self._run(processes, command)
        except BaseException:  # pytest-timeout's too: the next job would wait behind this one
            self.end()
            raise

    def _run(self, processes: int, command: list[str]) -> tuple[bool, str]:
        if self._process is None:
            # A rank that is killed while torch compiles leaves a lock, for which all later ranks would wait.
            self._extensions = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
            self._process = subprocess.Popen(
                self._command,
                env=self._environment | {"TORCH_EXTENSIONS_DIR": self._extensions.name},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                start_new_session=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # where the ranks meet
        with tempfile.NamedTemporaryFile("r") as output:
            job = {"processes": processes, "arguments": command, "port": store.port, "output": output.name}
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
            codes, failed = "", f"no end after {_SECONDS} s"
            if select.select([self._process.stdout], [], [], _SECONDS)[0]:
                codes = self._process.stdout.readline()
                failed = f"{self._command} has ended:"
            text = output.read()
        if not codes:
            self.end()
            self._errors.seek(0)
            return False, f"{text}\n{failed}\n{self._errors.read()[-3000:]}"
        return not any(json.loads(codes)), f"{text}\nexit statuses: {codes}"

    def end(self) -> None:
        """End the interpreter, its ranks and what they have started."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            self._extensions.cleanup()
