"""Found by the flag: whole vocabulary layers where they are faster, families, and layouts by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatron_vocabpar.megatron_lm import model_choice
from megatron_vocabpar.megatron_lm.flag_config import FlagConfig
from megatron_vocabpar.megatron_lm.flags import OVERLAP, config_from_argv
from megatron_vocabpar.megatron_lm.layouts import layers_of
from megatron_vocabpar.megatron_lm.model_choice import decided
from tests.cases import covering
from tests.megatron_lm.training import pretrain, words
from tests.support.launch_options import ENABLE
from tests.support.megatron_parser import inside

LLAMA = (
    f"{ENABLE} --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --swiglu "
    "--ffn-hidden-size 14336 --untie-embeddings-and-output-weights --micro-batch-size 1 "
    "--global-batch-size 32 --pipeline-model-parallel-size 4"
)
EXPERTS = (
    "--num-experts 64 --moe-router-topk 8 --moe-ffn-hidden-size 1536 --expert-model-parallel-size 8 "
    f"{OVERLAP}"
)
TWO = "--num-virtual-stages-per-pipeline-rank 2"


def decide(flags: str, world_size: int = 4) -> tuple[FlagConfig, str]:
    argv = f"{LLAMA} {flags}".split()
    config, lines = decided(config_from_argv(argv), argv, world_size)
    return config, "\n".join(lines)


@covering(("asked", ["auto", "search"]), (("vocabulary", "whole"), [(1_000, True), (256_000, False)]))
def test_vocabulary_layers_are_whole_where_that_is_faster(asked: str, vocabulary: int, whole: bool) -> None:
    config, said = decide(f"--vocab-size {vocabulary} --vocab-parallel-family {asked} {TWO}")
    assert (config.method == "baseline") == whole
    assert config.family == asked
    assert said.startswith(f"{asked} builds the model for {'baseline' if whole else 'vocab-'}")
    assert ("baseline in v-half +" in said) != whole


@pytest.mark.parametrize("flags", [
    "--vocab-parallel-method vocab-2", "--vocab-parallel-logit-softcap 30",
    "--mtp-num-layers 1",  # with Megatron's default positions, which are learned
])  # fmt: skip
def test_whole_layers_are_left_out_where_they_cannot_be(flags: str) -> None:
    small = "--num-layers 8 --global-batch-size 8"
    config, said = decide(f"--vocab-size 1000 --vocab-parallel-family auto {TWO} {small} {flags}")
    assert config.method == "vocab-2"
    assert "baseline" not in said


def test_a_given_layout_is_compared_as_it_is() -> None:
    """With a last rank that has room for the whole output layer, baseline wins; with even layers it loses."""
    flags = "--vocab-size 128000 --vocab-parallel-family auto"
    even = "--pipeline-model-parallel-layout Et*8|t*8|t*8|t*8L"
    by_hand = "--pipeline-model-parallel-layout Et*9|t*9|t*9|t*5L"
    assert decide(f"{flags} {even}")[0].method == "vocab-2"
    config, said = decide(f"{flags} {by_hand}")
    assert config.method == "baseline"
    assert "vocab-2 in zb-h1 +" in said
    assert "by hand" not in said


def test_a_layout_is_recommended_with_its_gain_and_set_if_asked_for() -> None:
    asked = f"--vocab-size 128000 --vocab-parallel-family v-half --vocab-parallel-method baseline {TWO}"
    config, said = decide(asked)
    assert said.startswith("layers by hand, ")
    assert config.layout is None
    placed, line = decide(f"{asked} --vocab-parallel-layout auto")
    assert placed.layout is not None
    assert placed.layout in said
    assert placed.layout in line
    layers = layers_of(placed.layout)
    assert sum(layers) == 32
    assert layers[0] + layers[-1] < 8  # rank 0 of a V, which has both vocabulary layers
    pairs, _ = decide(f"--vocab-size 32000 --vocab-parallel-family auto {TWO} {EXPERTS}", 32)
    assert pairs.open_schedules(4, 2).has_pairs


def test_what_the_planner_cannot_read_stays_as_it_is() -> None:
    config, said = decide(f"--vocab-parallel-family auto {TWO}")
    assert config.method == "vocab-2"
    assert said == "auto leaves out baseline: the command line: no --vocab-size; add them"
    with pytest.raises(ValueError, match=r"--vocab-parallel-layout auto: .*no --vocab-size"):
        decide("--vocab-parallel-layout auto")
    with pytest.raises(ValueError, match="--decoder-first-pipeline-num-layers places the layers; leave it"):
        decide("--vocab-size 1000 --vocab-parallel-layout auto --decoder-first-pipeline-num-layers 5")
    with pytest.raises(ValueError, match="--vocab-parallel-layout auto: method baseline runs Megatron's own"):
        decide("--vocab-parallel-method baseline --vocab-parallel-layout auto")


def test_a_cost_file_takes_the_place_of_estimates(tmp_path: Path) -> None:
    costs = {"F_ms": 10, "B_ms": 11, "W_ms": 9, "methods": {"vocab-2": {"S_ms": 9, "T_ms": 9}}}
    file = tmp_path / "costs.json"
    flags = f"--vocab-size 256000 --vocab-parallel-family auto --vocab-parallel-costs {file}"
    file.write_text(json.dumps(costs))
    assert decide(flags)[0].method == "vocab-2"  # nothing says what a whole layer takes
    file.write_text(json.dumps(costs | {"baseline_last_rank_extra": {"F_ms": 0.1}}))
    assert decide(flags)[0].method == "baseline"


def test_megatron_takes_the_layout_before_it_checks_layers() -> None:
    argv = f"{LLAMA} --num-layers 30 --vocab-size 128000 --vocab-parallel-family v-half {TWO}".split()
    argv += words("--vocab-parallel-layout auto --max-position-embeddings 4096 --mock-data")
    argv += words("--tokenizer-type NullTokenizer --transformer-impl local --lr 1e-3 --train-iters 1")
    result = inside("arguments", tuple(argv))
    assert sum(layers_of(result["args"]["pipeline_model_parallel_layout"].strip("'"))) == 30


def test_auto_trains_with_whole_vocabulary_layers_by_hand() -> None:
    """As if what it chose had been asked for; stock's own interleaved schedule gives NaN over gloo."""
    sizes = {"pp": 2, "vocab_size": 64, "iterations": 4}
    layout = f"{ENABLE} --pipeline-model-parallel-layout Et|t|t|tL --vocab-parallel-family"
    log = pretrain(*words(f"{layout} auto"), **sizes)
    assert "> vocabulary parallelism: auto builds the model for baseline in " in log.text
    chosen = re.search(r"vocabulary parallelism: method baseline, family ([\w-]+)", log.text)
    assert chosen is not None
    asked = pretrain(*words(f"{layout} {chosen[1]} --vocab-parallel-method baseline"), **sizes)
    assert log.losses == asked.losses


@pytest.mark.parametrize("flags", [
    f"--vocab-parallel-family auto {TWO}", "--vocab-parallel-family zb-h1", "--vocab-parallel-layout auto",
    "--vocab-parallel-family zb-h1 --pipeline-model-parallel-layout Et*9|t*9|t*9|t*5L",
])  # fmt: skip
def test_all_ranks_decide_alike_and_none_plays_for_a_line_that_it_does_not_print(
    flags: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = f"{LLAMA} --vocab-size 128000 {flags}".split()
    config, _ = decided(config_from_argv(argv), argv, 4)
    plays: list[object] = []
    play = model_choice.choices_of
    monkeypatch.setattr(
        model_choice, "choices_of", lambda *each, layouts: plays.append(each) or play(*each, layouts=layouts)
    )
    assert decided(config_from_argv(argv), argv, 4, prints=False)[0] == config
    assert bool(plays) == ("auto" in flags)
