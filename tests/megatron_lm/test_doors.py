"""The doors into a real Megatron-LM: what is replaced and when, and which launch lines are accepted."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from lab.verbs.patches import table
from megatron_vocabpar.cli.doctor import doctor_command
from megatron_vocabpar.megatron_lm import bindings
from megatron_vocabpar.megatron_lm.bindings import BINDINGS, SIGNATURES, VERSIONS, recognise
from megatron_vocabpar.megatron_lm.checkout import importable
from megatron_vocabpar.megatron_lm.flag_config import FlagConfig
from megatron_vocabpar.megatron_lm.flags import FLAGS, Flag, config_from_argv, is_asked_for
from megatron_vocabpar.megatron_lm.flags import PUBLISHED as SPELLINGS
from megatron_vocabpar.megatron_lm.flags_page import example, written
from megatron_vocabpar.megatron_lm.rules.check import check
from megatron_vocabpar.pipeline.options import VocabOptions
from megatron_vocabpar.schedule.times.redistribution import layout
from tests.megatron_lm.training import ROOT, checkout, version_of, words
from tests.support.launch_options import ENABLE
from tests.support.megatron_parser import PLAIN, inside


@pytest.mark.parametrize("argv", [(), ("--num-layers", "4")])
def test_nothing_is_touched_without_our_flags(argv: tuple[str, ...]) -> None:
    result = inside("adaptor", argv)
    assert len(result["places"]) >= 10
    assert result["replaced"] == []
    assert not inside("adaptor_first", argv)["megatron was imported"]


PLACED = (ENABLE, "--vocab-parallel-family", "v-half")  # what replaces every name of the table


def test_replaces_every_copy_once_and_undoes_it() -> None:
    result = inside("adaptor", PLACED)
    assert result["replaced"] == result["places"]
    assert result["again"]
    assert result["left"] == []


def test_later_imports_take_the_replacement() -> None:
    assert inside("adaptor_first", PLACED)["replaced"] == inside("adaptor", PLACED)["places"]


def test_layers_are_placed_for_a_v_alone() -> None:
    result = inside("adaptor", (ENABLE,))
    left = set(result["places"]) - set(result["replaced"])
    placed = {binding.name for binding in BINDINGS if binding.when == "a V placement"}
    assert {place.rpartition(".")[2] for place in left} == placed & {
        place.rpartition(".")[2] for place in result["places"]
    }


def test_redistribution_alone_leaves_schedule_and_model() -> None:
    flags = ("--enable-layer-redistribution", "--final-stage-num-layers", "1")
    replaced = inside("adaptor", flags)["replaced"]
    assert {place.rpartition(".")[2] for place in replaced} == {"parse_args", "validate_args"}


# The published script's options, but for its data and sizes.
PUBLISHED = words(
    "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 8 --num-layers 32 --hidden-size 64 "
    "--ffn-hidden-size 256 --num-attention-heads 4 --exit-interval 30 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 24 --train-samples 146484375 "
    "--lr-decay-samples 126953125 --lr-warmup-samples 183105 --lr 6.0e-5 --min-lr 6.0e-6 "
    "--lr-decay-style cosine --log-interval 10 --eval-iters 40 --eval-interval 10000 --mock-data "
    "--tokenizer-type GPTSentencePieceTokenizer --split 98,2,0 --clip-grad 8.0 --weight-decay 0.1 "
    "--adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 --no-barrier-with-level-1-timing "
    "--profile-step-start 7 --profile-step-end 8 --profile-ranks 0 1 2 3 4 5 6 7 "
    "--use-flash-attn --sequence-parallel --untie-embeddings-and-output-weights "
    "--attention-dropout 0 --hidden-dropout 0 --use-cpu-initialization --use-distributed-optimizer "
    "--initial-loss-scale 65536 --no-create-attention-mask-in-dataloader --fp16 --transformer-impl local"
)
FIVE_METHODS = {
    "baseline": (),
    "redis": words("--enable-layer-redistribution --final-stage-num-layers 1"),
    "interlaced": words("--enable-vocab-parallel --use-interlaced-schedule"),
    "vocab-1": words("--enable-vocab-parallel --disable-backward-fusion"),
    "vocab-2": words("--enable-vocab-parallel"),
}


@pytest.mark.parametrize("method", FIVE_METHODS)
def test_published_launch_lines_are_accepted(method: str) -> None:
    result = inside("arguments", (*PUBLISHED, *FIVE_METHODS[method]), world_size=8)
    assert result["method"] == method
    assert result["args"]["enable_vocab_parallel"] == str(ENABLE in FIVE_METHODS[method])
    if method == "redis":
        expected = layout((5, 5, 5, 4, 4, 4, 4, 1))
        assert expected in result["args"]["pipeline_model_parallel_layout"].replace("'", "")


DATA = {"DATA_PATH": "/data/text", "TOKENIZER_MODEL": "/data/tokenizer.model"}


def script(method: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """What ``scripts/METHOD.sh`` would run, printed."""
    environment = os.environ | {"MEGATRON_LM_PATH": "/megatron", "DRY_RUN": "1"} | variables
    path = ROOT / "scripts" / f"{method}.sh"
    return subprocess.run(["bash", str(path)], env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("variables", [{}, DATA | {"VOCAB_SIZE": "128000"}], ids=["made up", "data"])
@pytest.mark.parametrize("method", FIVE_METHODS)
def test_launch_scripts_are_accepted(method: str, variables: dict[str, str]) -> None:
    command = shlex.split(script(method, **variables).stdout)
    launcher = command.index("megatron_vocabpar.launch")
    assert command[launcher + 1] == "/megatron/pretrain_gpt.py"
    argv = command[launcher + 2 :]
    config = config_from_argv(argv)
    assert config.method == method
    parsed = SimpleNamespace(
        **PLAIN | {"pipeline_model_parallel_size": 8, "vocab_size": _value(argv, "--vocab-size")}
    )
    check(parsed, config)
    if not variables or method == "redis":
        result = inside("arguments", tuple(argv), world_size=8)
        assert result["method"] == method
        assert (result["args"]["pipeline_model_parallel_layout"] != "None") == (method == "redis")


def _value(argv: list[str], flag: str) -> int | None:
    return int(argv[argv.index(flag) + 1]) if flag in argv else None


def test_launch_scripts_say_what_is_missing() -> None:
    for method, variables, message in (
        ("vocab-2", {"DATA_PATH": "/data/text"}, "TOKENIZER_MODEL: with DATA_PATH"),
        ("redis", DATA, "VOCAB_SIZE: with DATA_PATH, redis needs"),
        ("vocab-2", {"MEGATRON_LM_PATH": ""}, "MEGATRON_LM_PATH: set it"),
    ):
        done = script(method, **variables)
        assert done.returncode != 0
        assert message in done.stderr


def test_a_refused_launch_line_names_every_flag() -> None:
    flags = (ENABLE, "--fp16-lm-cross-entropy", "--inprocess-restart")
    message = inside("refused", (*PUBLISHED, *flags), world_size=8)["message"]
    assert "--fp16-lm-cross-entropy: logits" in message
    assert "--inprocess-restart: the vocabulary groups" in message


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("flags.md", "### vocab-parallel-z-loss\n"),
        ("megatron.md", "| `--optimizer-cuda-graph` |"),
        ("megatron.md", "| any job | `--perform-rl-step` |"),
    ],
)
def test_what_the_page_has_of_flags_is_current(name: str, line: str) -> None:
    """Else: ``python -m megatron_vocabpar.megatron_lm.flags_page docs/flags.md docs/megatron.md``."""
    page = (ROOT / "docs" / name).read_text()
    assert written(page) == page
    assert line in page
    assert written(page.replace(line, "")) == page


@pytest.mark.parametrize(
    "flag", [flag for flag in FLAGS if flag not in SPELLINGS], ids=lambda flag: flag.flag
)
def test_a_flag_has_a_default_and_an_example_that_is_read(flag: Flag) -> None:
    words = example(flag)
    assert flag.by_default
    assert flag.field is None or config_from_argv(words) != config_from_argv(words[:1])


@pytest.mark.parametrize(
    ("written", "arguments", "refused"),
    [
        ("iter_0000003/mp_rank_00_001/model.pt", {"load": "one"}, True),
        ("iter_0000003/mp_rank_00/model.pt", {"pretrained_checkpoint": "one"}, True),
        ("iter_0000003/mp_rank_00/model.pt", {"load": "empty", "pretrained_checkpoint": "one"}, True),
        ("release/mp_rank_00/model.pt", {"load": "one"}, True),
        ("iter_0000002/mp_rank_00/model.pt", {"load": "one", "ckpt_step": 2}, True),
        ("iter_0000002/mp_rank_00/model.pt", {"load": "one"}, False),
        ("iter_0000003/metadata.json", {"load": "one"}, False),
        ("iter_0000003/mp_rank_00/model.pt", {"load": "empty"}, False),
    ],
)
def test_a_legacy_checkpoint_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    written: str,
    arguments: dict[str, Any],
    refused: bool,
) -> None:
    file = tmp_path / "one" / written
    file.parent.mkdir(parents=True)
    file.touch()
    tracker = "release" if written.startswith("release") else "3"
    (tmp_path / "one" / "latest_checkpointed_iteration.txt").write_text(tracker)
    monkeypatch.chdir(tmp_path)
    args = SimpleNamespace(**PLAIN | arguments)
    check(args, FlagConfig(enabled=True, method="redis"))
    message = r"one/\w+ is a legacy checkpoint .* --ckpt-convert-format torch_dist"
    with pytest.raises(ValueError, match=message) if refused else nullcontext():
        check(args, FlagConfig(enabled=True, method="vocab-2"))


def test_a_checkpoint_of_modelopt_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    args = SimpleNamespace(**PLAIN, load=str(tmp_path))
    config = FlagConfig(enabled=True, method="vocab-2")
    check(args, config)
    (tmp_path / "iter_0000003" / "modelopt_state").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"iter_0000003 is a checkpoint of ModelOpt .* train it without"):
        check(args, config)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--vocab-parallel-method vocab-1", "needs --enable-vocab-parallel"),
        ("--use-interlaced-schedule", "needs --enable-vocab-parallel"),
        (f"{ENABLE} --use-interlaced-schedule --disable-backward-fusion", "different methods"),
        (f"{ENABLE} --vocab-parallel-method vocab-2 --disable-backward-fusion", "different methods"),
        ("--final-stage-num-layers 1", "needs --enable-layer-redistribution"),
        ("--vocab-parallel-recompute-logits", "needs --enable-vocab-parallel"),
        (f"{ENABLE} --vocab-parallel-method redis --vocab-parallel-tokens-per-chunk 8", "method redis"),
        (f"{ENABLE} --vocab-parallel-tokens-per-chunk 0", "give 1 or more"),
        ("--vocab-parallel-family v-half", "v-half: needs --enable-vocab-parallel; add it, with"),
        (f"{ENABLE} --vocab-parallel-profile-iterations -1", "profile-iterations -1: give 0 or more"),
        (f"{ENABLE} --vocab-parallel-max-activations 0.5", "max-activations 0.5: give 1 or more"),
        (f"{ENABLE} --vocab-parallel-timeline 0", "timeline 0: give 1 or more"),
        ("--vocab-parallel-costs costs.json", "costs.json: method baseline runs Megatron's own"),
        (f"{ENABLE} --vocab-parallel-family 2f2b", "2f2b: unknown family; use one of 1f1b"),
        ("--vocab-parallel-invariant", "invariant: needs --enable-vocab-parallel"),
        ("--vocab-parallel-fp32-head", "head: needs --enable-vocab-parallel"),
        ("--vocab-parallel-independent-init", "init: needs --enable-vocab-parallel"),
        ("--vocab-parallel-drop-masked", "masked: needs --enable-vocab-parallel"),
        ("--vocab-parallel-metrics entropy", "metrics entropy: needs --enable-vocab-parallel"),
        (
            f"{ENABLE} --vocab-parallel-metrics accuracy --vocab-parallel-recompute-logits "
            "--vocab-parallel-logit-softcap 30",
            "not with --vocab-parallel-recompute-logits and --vocab-parallel-logit-softcap",
        ),
        ("--vocab-parallel-z-loss 0.1", "vocab-parallel-z-loss 0.1: needs --enable-vocab-parallel"),
        (f"{ENABLE} --vocab-parallel-logit-softcap -1", "logit-softcap -1.0: softcap -1.0: give a"),
        (
            f"{ENABLE} --vocab-parallel-logit-softcap 30 --vocab-parallel-label-smoothing 0.1",
            "softcap 30.0 and --vocab-parallel-label-smoothing 0.1: .* use one of the two",
        ),
    ],
)
def test_contradicting_options(argv: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_from_argv(argv.split())


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("", FlagConfig()),
        (ENABLE, FlagConfig(True, "vocab-2")),
        (f"{ENABLE} --vocab-parallel-method=naive --num-layers 4", FlagConfig(True, "naive")),
        (f"{ENABLE} --disable-backward-fusion", FlagConfig(True, "vocab-1")),
        (f"{ENABLE} --vocab-parallel-family zb-h1", FlagConfig(True, "vocab-2", "zb-h1")),
        (
            f"{ENABLE} --vocab-parallel-method baseline --vocab-parallel-family search",
            FlagConfig(True, "baseline", "search", methods=("baseline",)),
        ),
        (
            f"{ENABLE} --vocab-parallel-family auto --vocab-parallel-max-activations 4.5",
            FlagConfig(
                True,
                "vocab-2",
                "auto",
                methods=("baseline", "naive", "vocab-1", "vocab-2", "interlaced"),
                max_activations=4.5,
            ),
        ),
        (
            f"{ENABLE} --vocab-parallel-family auto --disable-backward-fusion --vocab-parallel-timeline 7",
            FlagConfig(True, "vocab-1", "auto", methods=("vocab-1",), timeline=7),
        ),
        (
            f"{ENABLE} --vocab-parallel-family auto --vocab-parallel-recompute-logits "
            "--vocab-parallel-costs costs.json",
            FlagConfig(
                True,
                "vocab-2",
                "auto",
                options=VocabOptions(recompute=True),
                methods=("vocab-1", "vocab-2", "interlaced"),
                costs="costs.json",
                profile_iterations=0,
            ),
        ),
        (
            f"{ENABLE} --vocab-parallel-costs costs.json --vocab-parallel-profile-iterations 2",
            FlagConfig(True, "vocab-2", costs="costs.json", profile_iterations=2),
        ),
        (
            f"{ENABLE} --vocab-parallel-recompute-logits --vocab-parallel-tokens-per-chunk 64",
            FlagConfig(True, "vocab-2", options=VocabOptions(recompute=True, rows_per_chunk=64)),
        ),
        (
            f"{ENABLE} --vocab-parallel-strict",
            FlagConfig(True, "vocab-2", strict=True),
        ),
        (
            f"{ENABLE} --vocab-parallel-invariant",
            FlagConfig(True, "vocab-2", options=VocabOptions(invariant=True)),
        ),
        (
            f"{ENABLE} --vocab-parallel-fp32-head",
            FlagConfig(True, "vocab-2", options=VocabOptions(fp32_head=True)),
        ),
        (
            f"{ENABLE} --vocab-parallel-fp8-head",
            FlagConfig(True, "vocab-2", options=VocabOptions(fp8_head=True)),
        ),
        (
            f"{ENABLE} --vocab-parallel-drop-masked",
            FlagConfig(True, "vocab-2", options=VocabOptions(drop_masked=True)),
        ),
        (
            f"{ENABLE} --vocab-parallel-metrics accuracy entropy --num-layers 4",
            FlagConfig(True, "vocab-2", options=VocabOptions(metrics=("accuracy", "entropy"))),
        ),
        (
            f"{ENABLE} --vocab-parallel-independent-init --vocab-parallel-invariant",
            FlagConfig(True, "vocab-2", options=VocabOptions(invariant=True, independent_init=True)),
        ),
        (
            f"{ENABLE} --vocab-parallel-logit-scale 0.5 --vocab-parallel-logit-softcap 30 "
            "--vocab-parallel-z-loss 1e-4",
            FlagConfig(True, "vocab-2", options=VocabOptions(logit_scale=0.5, softcap=30.0, z_loss=1e-4)),
        ),
        (
            f"{ENABLE} --use-interlaced-schedule --vocab-parallel-label-smoothing 0.1",
            FlagConfig(True, "interlaced", options=VocabOptions(label_smoothing=0.1)),
        ),
        (
            "--enable-layer-redistribution --final-stage-num-layers 2",
            FlagConfig(True, "redis", redistribute=True, final_stage_layers=2),
        ),
        (f"{ENABLE} --vocab-parallel-method redis", FlagConfig(True, "redis", redistribute=True)),
    ],
)
def test_options(argv: str, expected: FlagConfig) -> None:
    assert config_from_argv(argv.split()) == expected


@pytest.mark.parametrize(
    ("argv", "asked"), [("", False), ("--num-layers 4", False), ("--help", True), (f"{ENABLE}", True)]
)
def test_is_asked_for(argv: str, asked: bool) -> None:
    assert is_asked_for(argv.split()) == asked


def _signatures_of(version: str) -> dict[tuple[str, str], tuple[str, ...]]:
    """The last row of each function that begins with this version or one before it; it may have none."""
    at = VERSIONS.index(version)
    known = {
        key: [parameters for since, parameters in rows.items() if VERSIONS.index(since) <= at]
        for key, rows in SIGNATURES.items()
    }
    return {key: parameters[-1] for key, parameters in known.items() if parameters}


@pytest.mark.parametrize("version", VERSIONS)
def test_signatures_tell_the_version(version: str) -> None:
    known = _signatures_of(version)
    newest = [each for each in VERSIONS if _signatures_of(each) == known][-1]
    assert recognise(lambda module, name: known.get((module, name))) == (newest, "")


def test_one_model_class_suffices() -> None:
    known = _signatures_of("main")
    for lacking in ("models.gpt.", "models.hybrid."):
        found = {key: row for key, row in known.items() if lacking not in key[0]}
        assert recognise(lambda module, name, found=found: found.get((module, name))).unread == ""
    neither = {key: row for key, row in known.items() if "models." not in key[0]}
    with pytest.raises(ValueError, match=r"it has no \S+GPTModel.*no \S+HybridModel"):
        recognise(lambda module, name: neither.get((module, name)))


def test_an_unknown_version_has_the_names_of_the_newest() -> None:
    of_newest = [binding for binding in BINDINGS if binding.is_in("main")]
    assert [binding for binding in BINDINGS if binding.is_in("unknown")] == of_newest
    of_oldest = {binding.name for binding in BINDINGS if binding.is_in("0.14")}
    assert {binding.name for binding in BINDINGS} - of_oldest >= {"HybridModel", "select_pipeline_segment"}
    assert "MambaModel" in of_oldest - {binding.name for binding in of_newest}


def test_rows_of_signatures_are_in_the_order_of_versions() -> None:
    for rows in SIGNATURES.values():
        assert list(rows) == [version for version in VERSIONS if version in rows]
        assert len(set(rows.values())) == len(rows)


def test_a_megatron_of_tomorrow_is_known_by_what_has_not_been_read() -> None:
    known: dict[tuple[str, str], Any] = dict(_signatures_of("main"))
    key = (bindings.BINDINGS[0].module, "backward_step")
    known[key] = (*known[key], "something_new")
    version, unread = recognise(lambda module, name: known[module, name])
    assert version == "unknown"
    assert re.search(
        r": \S+backward_step with something_new, which has not been read; use one of 0\.14", unread
    )
    known[key] = ("input_tensor", "something_new")
    with pytest.raises(ValueError, match="backward_step lacks config, output_tensor"):
        recognise(lambda module, name: known[module, name])
    with pytest.raises(ValueError, match=r"it has no .*schedules.backward_step; use one of"):
        recognise(lambda module, name: None if (module, name) == key else known[module, name])
    known[key] = _signatures_of("0.14")[key]  # beside main's
    assert "signatures of several versions" in recognise(lambda module, name: known[module, name]).unread


def test_the_table_file_is_current() -> None:
    assert (ROOT / "patches" / "PATCHES.md").read_text() == "\n".join(table()) + "\n"


def test_the_patch_applies_and_reverses(tmp_path: Path) -> None:
    """It has no line around its own; it must stand before the first import, and not in the docstring."""
    shutil.copy(checkout() / "pretrain_gpt.py", tmp_path)
    script = tmp_path / "pretrain_gpt.py"
    before = script.read_text()
    apply = ["git", "apply", "--unidiff-zero", str(ROOT / "patches" / "pretrain_gpt.patch")]
    subprocess.run(apply, cwd=tmp_path, check=True)
    _, first, *_ = ast.parse(script.read_text()).body
    assert ast.unparse(first) == "import megatron_vocabpar.adaptor"
    subprocess.run([*apply, "-R"], cwd=tmp_path, check=True)
    assert script.read_text() == before


def test_doctor_refuses_another_folder(tmp_path: Path) -> None:
    result = CliRunner().invoke(doctor_command, ["--megatron", str(tmp_path)])
    assert isinstance(result.exception, ValueError)
    assert f"{tmp_path} holds no megatron/core" in str(result.exception)


def test_doctor_finds_the_installed_package() -> None:
    major, minor, *_ = metadata.version("megatron-core").split(".")
    result = CliRunner().invoke(doctor_command, [])
    assert result.exit_code == 0, result.output
    assert f"Megatron core {major}.{minor}, by its signatures" in result.output
    assert "megatron.core.models.gpt.gpt_model.GPTModel" in result.output
    assert "megatron.training.arguments.parse_args" not in result.output
    assert "this is the megatron-core package" in result.output
    assert "Megatrons here" not in result.output


def test_doctor_notices_two_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (installed,) = importable(sys.path)
    (tmp_path / "megatron").symlink_to(installed / "megatron")
    monkeypatch.syspath_prepend(tmp_path)
    for arguments in ([], ["--megatron", str(tmp_path)], ["--megatron", str(installed)]):
        result = CliRunner().invoke(doctor_command, arguments)
        assert "There are 2 Megatrons here" in result.output
        assert f"  {tmp_path}\n" in result.output
        assert f"  {installed}\n" in result.output


@pytest.mark.parametrize(
    ("script", "state", "code"), [("import json", "; ready", 0), ("import no_library", "; not ready: ", 1)]
)
def test_doctor_ends_with_1_where_a_library_is_missing(
    tmp_path: Path, script: str, state: str, code: int
) -> None:
    (installed,) = importable(sys.path)
    (tmp_path / "megatron").symlink_to(installed / "megatron")
    (tmp_path / "pretrain_gpt.py").write_text(script)
    result = CliRunner().invoke(doctor_command, ["--megatron", str(tmp_path)])
    assert state in result.output.splitlines()[0]
    assert result.exit_code == code


def test_doctor_names_version_and_every_replaced_name() -> None:
    result = CliRunner().invoke(doctor_command, ["--megatron", str(checkout())])
    assert result.exit_code == 0, result.output
    assert f"Megatron core {version_of()}, by its signatures" in result.output
    version = version_of()
    for binding in BINDINGS:
        assert (f"  {binding.module}.{binding.name}\n" in result.output) == binding.is_in(version)
