"""Launch scripts, by their text and by a run: what Megatron would parse, or what the text leaves open."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from megatron_vocabpar.cli.main import main
from megatron_vocabpar.cli.plan import model_of
from megatron_vocabpar.plan.given import Given
from megatron_vocabpar.plan.read_arguments import job_from_arguments
from megatron_vocabpar.plan.read_script import read_script, run_script

SIZES = {"num-layers": "8", "hidden-size": "512"}


def is_running(process: int) -> bool:
    state = Path(f"/proc/{process}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"


def script(folder: Path, text: str) -> str:
    path = folder / "a script.sh"
    path.write_text(f"#!/bin/bash\n{text}\n")
    return str(path)


BY_TEXT = {
    "comments": (
        "ARGS=(\n  --num-layers 8  # --num-layers 9\n  # --swiglu\n  --hidden-size 512\n)\n"
        "torchrun pretrain_gpt.py ${ARGS[@]}",
        SIZES,
    ),
    "a layout keeps its brackets": (
        "torchrun a.py --num-layers 8 --pipeline-model-parallel-layout 'Et*3|(tt|)*2,L'",
        {"num-layers": "8", "pipeline-model-parallel-layout": "Et*3|(tt|)*2,L"},
    ),
    "variables": (
        'N=8; export WIDTH="512"\nMORE="--num-layers $N"\nMORE+=" --hidden-size ${WIDTH:-64}"\n'
        "python a.py $MORE --lr ${LR:-1e-4}",
        {**SIZES, "lr": "1e-4"},
    ),
    "an array with another": (
        "A=(--num-layers 8)\nB=(${A[@]} --hidden-size 512)\nsrun python a.py \\\n  ${B[@]} $@",
        SIZES,
    ),
    "an empty array": (
        'A=()\ntorchrun a.py --swiglu "${A[@]}" --num-layers 8',
        {"swiglu": "", "num-layers": "8"},
    ),
    "a path that is open": ("torchrun a.py --num-layers 8 --save $OUT", {"num-layers": "8", "save": "$OUT"}),
    "a function elsewhere": (
        "f() {\n  echo a\n}\nif true; then f; fi\ntorchrun a.py --num-layers 8",
        {"num-layers": "8"},
    ),
    "a function by its keyword": (
        "function f {\n  torchrun b.py\n}\nselect x in a; do break; done\ntorchrun a.py --num-layers 8",
        {"num-layers": "8"},
    ),
    "arguments for others to source": ('MODEL_ARGS="\\\n  --num-layers 8 \\\n  --hidden-size 512"', SIZES),
    "Slurm": ("#SBATCH --nodes=4\nsrun python a.py --num-layers 8", {"nodes": "4", "num-layers": "8"}),
    "the same launch twice": (
        "torchrun a.py --num-layers 8\ntorchrun a.py --num-layers 8",
        {"num-layers": "8"},
    ),
}


@pytest.mark.parametrize("name", BY_TEXT)
def test_flags_that_the_text_says(name: str, tmp_path: Path) -> None:
    text, flags = BY_TEXT[name]
    assert read_script(script(tmp_path, text)) == flags


BY_RUN = {
    "source": (
        "A=(--num-layers 8)",
        ". '{folder}/sizes.sh'; torchrun a.py ${{A[@]}} --hidden-size 512",
        SIZES,
    ),
    "arithmetic": ("", "torchrun a.py --num-layers $((2 * 4))", {"num-layers": "8"}),
    "a branch": ("", "if true; then N=8; else N=9; fi\ntorchrun a.py --num-layers $N", {"num-layers": "8"}),
    "a launch in a branch": ("", "for N in 8; do torchrun a.py --num-layers $N; done", {"num-layers": "8"}),
    "a launch in a function": (
        "",
        "function f {{\n  torchrun a.py --num-layers 8\n}}\nf",
        {"num-layers": "8"},
    ),
    "Python's answer": ("", "N=$(python -c 'print(8)'); torchrun a.py --num-layers $N", {"num-layers": "8"}),
    "a command in a string": (
        "",
        'srun bash -c "cd /; python -u a.py --num-layers $((8))"',
        {"num-layers": "8"},
    ),
    "a job of Ray": (
        "",
        "pkill -9 python; sleep 60\nray start --head\nNONE=$(echo)\n"
        "ray job submit -- python3 a.py $NONE --num-layers 8",
        {"num-layers": "8"},
    ),
    "GPUs of ms-swift": (
        "",
        "N=$(echo 8); NPROC_PER_NODE=$N megatron sft --num_layers $N",
        {"nproc-per-node": "8", "num-layers": "8"},
    ),
}


@pytest.mark.parametrize("name", BY_RUN)
def test_what_a_text_leaves_open_is_refused_and_a_run_says_it(name: str, tmp_path: Path) -> None:
    sizes, text, flags = BY_RUN[name]
    (tmp_path / "sizes.sh").write_text(sizes)
    path = script(tmp_path, text.format(folder=tmp_path))
    with pytest.raises(ValueError, match=r"--run"):
        Given(read_script(path), path).number("num-layers")
    said = run_script(path)
    assert {name: said.get(name) for name in flags} == flags


def test_a_run_starts_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    """What a script starts in the background ends with it, and its training does not run."""
    (tmp_path / "a.py").write_text("import pathlib; pathlib.Path('ran').touch()")
    path = script(
        tmp_path,
        f"cd '{tmp_path}'\n(tail -f /dev/null) & echo $! > '{tmp_path}/pid'\npython a.py --num-layers 8",
    )
    assert run_script(path) == {"num-layers": "8"}
    assert not (tmp_path / "ran").exists()
    left = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 10
    while is_running(left) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(left)


@pytest.mark.parametrize(
    ("text", "run", "says"),
    [
        (
            "echo hello",
            False,
            "no command has Megatron's arguments, such as --num-layers, .*give them after --",
        ),
        ("echo set BASE; exit 1", True, "no command has .*the script's last line: set BASE"),
        (
            "torchrun a.py --num-layers 8\ntorchrun b.py --num-layers 9",
            False,
            "starts 2 trainings .*torchrun a.py.*give the arguments of one after --",
        ),
        (
            "torchrun a.py --num-layers 8 ${MORE[@]}",
            False,
            r"\$\{MORE\[@\]\} in the command of the training.*--run",
        ),
        ("torchrun a.py --swiglu $EXTRA_ARGS --num-layers 8", False, r"\$EXTRA_ARGS in the command .*--run"),
        ("torchrun a.py --num-layers 'eight", False, "quotes or brackets are not closed; add --run"),
    ],
)
def test_a_script_without_an_answer_is_refused_with_a_remedy(
    text: str, run: bool, says: str, tmp_path: Path
) -> None:
    path = script(tmp_path, text)
    with pytest.raises(ValueError, match=re.compile(says, re.DOTALL)):
        (run_script if run else read_script)(path)


def test_the_command_runs_a_script_if_asked_and_says_so(tmp_path: Path) -> None:
    model = "--hidden-size 512 --num-attention-heads 8 --seq-length 512 --vocab-size 32000"
    path = script(tmp_path, f"torchrun a.py --num-layers $((8)) {model} --pipeline-model-parallel-size 2")
    arguments = ["plan", "--script", path, "--microbatches", "4"]
    refused = CliRunner().invoke(main, arguments)
    assert refused.exit_code == 2
    assert "--num-layers is $((8)), which the text does not say; add --run" in refused.output
    done = CliRunner().invoke(main, [*arguments, "--run"])
    assert done.exit_code == 0, done.output
    assert "torchrun, python, python3, srun, ray, mpirun, megatron, swift only record" in done.stderr
    alone = CliRunner().invoke(main, ["plan", "--preset", "llama-3.2-3b", "--run"])
    assert (alone.exit_code, "--run needs a --script FILE" in alone.output) == (2, True)


def test_a_script_s_job_completes_a_configuration_or_a_preset(tmp_path: Path) -> None:
    """ms-swift's scripts name a model of Hugging Face, and sizes of the job."""
    job = "--tensor_model_parallel_size 2 --pipeline_model_parallel_size 4 --seq-length 1024"
    path = script(
        tmp_path, f"megatron sft --model some/model {job} --micro_batch_size 1 --global_batch_size 8"
    )
    options = {"preset": "llama-3.2-3b", "config_file": None, "seq_length": None, "mtp_depths": None}
    given = Given(read_script(path), path)
    model, made = model_of(options, given), job_from_arguments(given, {"dp": 1})
    assert (model.layers, model.seq_length, made.p, made.t, made.m) == (28, 1024, 4, 2, 8)
    both = CliRunner().invoke(
        main, ["plan", "--preset", "llama-3.2-3b", "--", "--num-layers", "8", "--hidden-size", "512"]
    )
    assert both.exit_code == 2
    assert "--preset and your arguments given for the model; give one of" in both.output
