"""What is given is read, or listed: scripts of several nodes, recomputation, context parallelism."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result

from megatron_vocabpar.cli.main import main
from megatron_vocabpar.plan.given import Given, read_words
from megatron_vocabpar.plan.job import RECOMPUTE
from megatron_vocabpar.plan.read_arguments import (
    job_from_arguments,
    model_from_arguments,
    other_gpus,
    overruled,
    refuse_unknown_layers,
)
from megatron_vocabpar.plan.read_script import read_script

MODEL = (
    "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --vocab-size 32000 "
    "--hidden-dropout 0 --untie-embeddings-and-output-weights "
)
SCRIPT = f"""#!/bin/bash
GPUS_PER_NODE=${{GPUS_PER_NODE:-8}}
NNODES=8   # of the cluster
MODEL="{MODEL}"
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes $NNODES pretrain_gpt.py $MODEL \\
    --pipeline-model-parallel-size 8 --global-batch-size 512 --micro-batch-size 1 --lr 1e-4
"""


def plan(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["plan", "--format", "json", *arguments])


def job_of(words: str, **sizes: int | bool | str) -> tuple[dict[str, object], list[str]]:
    given = Given(read_words(words.split()), "here")
    job = job_from_arguments(given, sizes)
    return vars(job), [*overruled(given, sizes), *other_gpus(given, job.gpus), *given.unread()]


@pytest.mark.parametrize("asked", RECOMPUTE)
def test_the_option_says_what_is_recomputed(asked: str) -> None:
    job, said = job_of("--recompute-granularity full", recompute=asked)
    assert job["recompute"] == asked
    replaced = [f"--recompute {asked} instead of --recompute-granularity full"]
    assert said == (replaced if asked != "full" else [])


def test_a_script_of_eight_nodes_has_eight_replicas(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(SCRIPT)
    given = Given(read_script(str(path)), "train.sh")
    model_from_arguments(given)
    job = job_from_arguments(given, {})
    assert (job.p, job.d, job.m, job.gpus) == (8, 8, 64, 64)
    (note,) = given.unread()
    assert "--lr 1e-4" in note
    assert "--num-layers" not in note


@pytest.mark.parametrize(
    ("lines", "gpus"),
    [
        ("#SBATCH --nodes=4\n#SBATCH --gpus-per-node=8\n", 32),
        ("#SBATCH --nodes=4\n#SBATCH --gres=gpu:h100:8\n", 32),
        ("#SBATCH --nodes=2 --ntasks-per-node=8\n", 16),
        ("", 8),
    ],
)
def test_slurm_says_how_many_gpus(tmp_path: Path, lines: str, gpus: int) -> None:
    path = tmp_path / "train.sh"
    path.write_text(
        f"#!/bin/bash\n{lines}srun python pretrain_gpt.py {MODEL} --pipeline-model-parallel-size 8\n"
    )
    assert job_from_arguments(Given(read_script(str(path)), "x"), {}).gpus == gpus


def test_recomputation_and_context_parallelism_are_read() -> None:
    job, unread = job_of("--context-parallel-size 4 --recompute-activations --bf16")
    # Kernels keep no scores of attention in any case.
    assert (job["c"], job["recompute"], unread) == (4, "none", [])
    job, _ = job_of("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    assert job["recompute"] == "full"
    job, _ = job_of("--recompute-granularity selective --recompute-modules layernorm mlp")
    assert job["recompute"] == "selective"
    job, _ = job_of("--optimizer-cpu-offload --use-distributed-optimizer --fp8-format hybrid")
    assert (job["offload"], job["fp8"], job["overlap"]) == (True, True, False)


def test_an_option_comes_before_an_argument_and_says_so() -> None:
    job, said = job_of("--tensor-model-parallel-size 4 --global-batch-size 64", tp=2, dp=8)
    assert (job["t"], job["m"]) == (2, 8)
    assert said == ["--tp 2 instead of --tensor-model-parallel-size 4"]


def test_a_search_says_what_its_options_replace() -> None:
    words = ("--gpus", "2", "--tp", "1", "--global-batch-size", "4", "--seq-length", "1024", "--recompute")
    given = ("--tensor-model-parallel-size", "2", "--global-batch-size", "8", "--nnodes", "8")
    more = ("--nproc-per-node", "8", "--recompute-granularity", "selective")
    data = json.loads(plan(*words, "--", *MODEL.split(), *given, *more).stdout)
    assert (data["gpus"], data["global_batch_size"], data["model"]["seq_length"]) == (2, 4, 1024)
    assert data["notes"] == [
        "--tp 1 instead of --tensor-model-parallel-size 2",
        "--global-batch-size 4 instead of --global-batch-size 8",
        "--seq-length 1024 instead of --seq-length 512",
        "--recompute full instead of --recompute-granularity selective",
        "2 GPUs instead of the 64 that are given",
    ]


def test_of_two_options_for_the_batch_one_is_said_to_replace_the_other() -> None:
    job, said = job_of("--bf16", microbatches=64, global_batch_size=512)
    assert (job["m"], said) == (64, ["--microbatches 64 instead of --global-batch-size 512"])


def test_nodes_that_are_given_twice_are_listed_where_they_differ() -> None:
    """torchrun's ``--nnodes`` counts; Slurm's ``--nodes`` may say the same."""
    words = "--nnodes 2 --nproc-per-node 8 --gpus-per-node 8 --nodes "
    for nodes, unread in (("2", []), ("4", ["Not used by the plan: --nodes 4."])):
        job, said = job_of(words + nodes)
        assert (job["d"], said) == (2, unread)


@pytest.mark.parametrize(
    ("words", "sizes", "says"),
    [
        ("--nproc-per-node 8 --nnodes 3 --pipeline-model-parallel-size 16", {}, "24|3 nodes of 8 .*--dp"),
        ("--global-batch-size 100", {"dp": 8}, "100 sequences does not divide .*give another"),
        ("--expert-model-parallel-size 8", {"tp": 4}, r"= 4; choose 1, 2 or 4 \(--ep\)"),
    ],
)
def test_what_does_not_divide_says_what_would(words: str, sizes: dict[str, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        job_of(words, **sizes)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            "--preset llama-3.1-8b --tp 3",
            "does not divide the 32 attention heads; choose 1, 2, 4, 8, 16 or 32",
        ),
        ("--preset gemma-2-9b --ep 2 --dp 2", "no experts"),
        ("--preset qwen3-30b-a3b --ep 3 --dp 3", "does not divide the 128 experts"),
        ("--preset llama-3.1-8b --cp 3 --seq-length 8192", "do not divide into 6 parts"),
        ("--preset llama-3.1-8b --cpp 2", "No such option"),
        ("--preset llama-3.1-8b --hardware A100 --fp8", "A100 has no products in 8 bits; leave out --fp8"),
        ("--preset llama-3.1-8b --hardware A100 --gpus 8 --fp8", "A100 has no products in 8 bits"),
        ("llama-3.1-8b", "unexpected 'llama-3.1-8b'.*--preset"),
        ("--preset llama-3.1-8b --hardware H10", "did you mean 'H100'"),
    ],
)
def test_what_megatron_would_refuse_is_refused_with_a_remedy(arguments: str, says: str) -> None:
    result = CliRunner().invoke(main, ["plan", *arguments.split()])
    assert result.exit_code == 2
    assert re.search(says, result.output), result.output


def test_a_preset_takes_arguments_of_the_job() -> None:
    result = plan(
        "--preset",
        "llama-3.2-3b",
        "--microbatches",
        "2",
        "--",
        "--context-parallel-size",
        "2",
        "--pipeline-model-parallel-size",
        "2",
    )
    data = json.loads(result.output)
    assert (data["job"]["c"], data["job"]["p"]) == (2, 2)
    assert "--context-parallel-size 2" in data["flags"]


@pytest.mark.parametrize(
    ("typed", "parsed", "dense"),
    [
        ("[0]*3+[1]*5", [0, 0, 0, 1, 1, 1, 1, 1], 3),
        ("([1]*3+[0])*2", [1, 1, 1, 0, 1, 1, 1, 0], 2),
        ("[0,0]+[1]*6", [0, 0, 1, 1, 1, 1, 1, 1], 2),
        ("2*[0]+[1]*6", [0, 0, 1, 1, 1, 1, 1, 1], 2),
        ("3", 3, 5),
        (None, 1, 0),
    ],
)
def test_layers_without_experts_as_typed_and_as_parsed(
    typed: str | None, parsed: object, dense: int, tmp_path: Path
) -> None:
    words = f"{MODEL} --num-experts 4 --window-size 127,0 --window-attn-skip-freq [1,1,1,0]*2"
    words += f" --moe-layer-freq {typed}" if typed else ""
    (tmp_path / "train.sh").write_text(words.replace("(", "'(").replace(")*2", ")*2'"))
    args = SimpleNamespace(
        **{name.replace("-", "_"): value or True for name, value in read_words(MODEL.split()).items()},
        num_experts=4, moe_layer_freq=parsed, window_size=(127, 0), window_attn_skip_freq=[1, 1, 1, 0] * 2,
    )  # fmt: skip
    for given in (
        Given(read_words(words.split()), "here"),
        Given(read_script(str(tmp_path / "train.sh")), "here"),
        Given.of(args),
    ):
        model = model_from_arguments(given)
        assert (model.dense_layers, model.window, model.windowed) == (dense, 128, 0.75)


@pytest.mark.parametrize("pattern", ["[0]*3+[1]*4", "[0]**8", "[[0]]*8", "[0", "[0]*x", "[x]*8"])
def test_a_list_of_other_layers_is_refused(pattern: str) -> None:
    words = f"{MODEL} --num-experts 4 --moe-layer-freq {pattern}"
    with pytest.raises(ValueError, match=r"here: --moe-layer-freq .* list of 8 layers; write .*\[1\]\*7$"):
        model_from_arguments(Given(read_words(words.split()), "here"))


@pytest.mark.parametrize(
    ("frequency", "windowed"),
    [
        ("[1]*6+[0]*2", 6 / 8),
        ("[1,1,0,1]*2", 6 / 8),
        ("([1]+[0]*3)*2", 2 / 8),
        ("4", 3 / 4),
        ("3", 2 / 3),
        ("", 1.0),
    ],
)
def test_windows_follow_megatrons_grammar(frequency: str, windowed: float) -> None:
    given = {**read_words(MODEL.split()), "window-size": "127,0"}
    given |= {"window-attn-skip-freq": frequency} if frequency else {}
    assert model_from_arguments(Given(given, "here")).windowed == pytest.approx(windowed)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--experimental-attention-variant", "gated_delta_net"),
        ("--heterogeneous-layers-config-path", "layers.json"),
    ],
)
def test_layers_with_other_parts_are_refused_by_the_flag(flag: str, value: str) -> None:
    refuse_unknown_layers(Given({"heterogeneous-layers-config-encoded-json": ""}, "as parsed"))
    with pytest.raises(ValueError, match=f"{flag} {value} gives layers parts .* --hybrid-layer-pattern"):
        refuse_unknown_layers(Given(read_words([*MODEL.split(), flag, value]), "here"))
