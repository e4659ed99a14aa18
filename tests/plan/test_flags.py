"""The flags of a plan: sizes, layout and ours. Every other flag is Megatron's."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from types import SimpleNamespace

import pytest

from megatron_vocabpar.megatron_lm.flags import config_from_argv
from megatron_vocabpar.megatron_lm.rules.check import check
from megatron_vocabpar.plan.choice import Choice, Request
from megatron_vocabpar.plan.choice_flags import flags_of, placing_flags
from megatron_vocabpar.plan.choices import choice_of
from megatron_vocabpar.plan.given import read_words
from megatron_vocabpar.plan.hardware import hardware_named
from megatron_vocabpar.plan.job import Job
from megatron_vocabpar.plan.layer_counts import StockLayout
from megatron_vocabpar.plan.plays import play_stock, stock_choice, stock_choices
from megatron_vocabpar.plan.read_config import model_preset, model_presets
from tests.support.megatron_parser import PLAIN
from tests.support.recorded_arguments import recorded

H100 = hardware_named("h100")
# Where argparse keeps a flag under another name than its own.
KEPT_AS = {"fp8-format": "fp8"}


def names_of(words: list[str]) -> set[str]:
    flags = [word.split()[0].removeprefix("--") for word in words]
    return {
        KEPT_AS.get(flag, flag.replace("-", "_")) for flag in flags if not flag.startswith("vocab-parallel")
    }


@pytest.mark.parametrize("name", model_presets())
def test_every_flag_is_one_of_megatrons(name: str) -> None:
    model = model_preset(name)
    d = 8 if model.experts else 2
    job = Job(
        p=2, t=2, c=2, d=d, e=d if model.experts else 1, m=4, distributed_optimizer=True, offload=True,
        recompute="selective", fp8=True,
    )  # fmt: skip
    flags = flags_of(Choice(Request(model, job, H100, 1e6), "baseline", "1f1b", (1, 1)))
    names = names_of(re.findall(r"--[\w-]+", " ".join(flags)))
    versions = {name: known for name, known in recorded().items() if "hybrid_layer_pattern" in known}
    assert versions
    for version, known in (versions if model.pattern else recorded()).items():
        assert names <= known, version


@pytest.mark.parametrize(
    ("layers", "number", "share"),
    [((8, 8), 1, 1 / 8), ((5, 5), 1, 1 / 5), ((1, 1), 0, 1.0), ((3, 1, 1, 1), 1, 4 / 6), ((9, 7), 1, 2 / 16)],
)
def test_what_is_planned_to_run_again_is_what_the_flag_repeats(
    layers: tuple[int, ...], number: int, share: float
) -> None:
    """Megatron repeats whole layers of every stage: an eighth of one layer is all of it."""
    model = replace(model_preset("llama-3.1-8b"), layers=sum(layers))
    job = Job(p=2, d=2, m=8, distributed_optimizer=True, recompute="full", recomputed=1 / 8)
    request = Request(model, job, H100, 1e6)
    layout = StockLayout("1f1b", len(layers) // 2, layers, ())
    choice = play_stock(stock_choice(request, layout))
    assert choice.request.job.recomputed == pytest.approx(share)
    flags = flags_of(choice)
    if number:
        assert f"--recompute-num-layers {number}" in flags
        assert "--recompute-method block" in flags
    else:
        assert "--recompute-method uniform" in flags
    whole = replace(choice.request, job=replace(job, recomputed=share))
    assert play_stock(stock_choice(whole, layout)).iteration_ms == pytest.approx(choice.iteration_ms)


@pytest.mark.parametrize("family", ["1f1b", "zb-h1", "v-zb"])
def test_reductions_overlap(family: str) -> None:
    """Where W is split off, too: as long as it takes, and in two chunks half of the rest."""
    model = replace(model_preset("llama-3.1-8b"), layers=16)
    request = Request(model, Job(p=4, d=2, m=8, distributed_optimizer=True), H100, 80.0)
    choice = choice_of(request, "vocab-2", family)
    assert {"--overlap-grad-reduce", "--overlap-param-gather"} <= set(flags_of(choice))
    apart = choice_of(replace(request, job=replace(request.job, overlap=False)), "vocab-2", family)
    assert choice.tail_ms < apart.tail_ms


def _value(text: str) -> bool | int | str:
    return int(text) if text.isdigit() else text or True


@pytest.mark.parametrize(
    ("method", "family", "delays"),
    [("vocab-2", "dualpipev", False), ("vocab-1", "1f1b-overlap", True), ("baseline", "1f1b-overlap", True)],
)
def test_flags_of_pairs_are_taken_at_the_door(method: str, family: str, delays: bool) -> None:
    """Transformer Engine's layers, which Megatron takes by default, let Megatron delay W within a pair."""
    model = replace(model_preset("qwen3-30b-a3b"), layers=16)
    request = Request(model, Job(p=4, d=8, e=8, m=8), H100, 80.0)
    of_model = ["--bf16", "--num-experts 128"]
    words = shlex.split(" ".join([*of_model, *flags_of(choice_of(request, method, family))]))
    assert "--overlap-moe-expert-parallel-comm" in words
    assert ("--delay-wgrad-compute" in words) is delays
    given = {name.replace("-", "_"): _value(text) for name, text in read_words(words).items()}
    args = SimpleNamespace(**PLAIN | {"transformer_impl": "transformer_engine"} | given)
    check(args, config_from_argv(words))
    args.overlap_moe_expert_parallel_comm = args.delay_wgrad_compute = False
    with pytest.raises(ValueError, match="give --overlap-moe-expert-parallel-comm"):
        check(args, config_from_argv(words))


@pytest.mark.parametrize("p", [1, 4])
def test_stock_with_overlap_has_its_flags(p: int) -> None:
    request = Request(replace(model_preset("qwen3-30b-a3b"), layers=16), Job(p=p, d=8, e=8, m=8), H100, 1e6)
    together = [one for one in stock_choices(request) if "with overlap" in one.family]
    assert together
    for choice in together:
        flags = flags_of(choice)
        assert {"--overlap-moe-expert-parallel-comm", "--delay-wgrad-compute"} <= set(flags)
        assert not any("vocab-parallel" in flag for flag in flags)


def test_a_softcap_is_a_flag_where_the_vocabulary_is_partitioned() -> None:
    request = Request(replace(model_preset("gemma-2-9b"), layers=8), Job(p=4), H100, 80.0)
    assert "--vocab-parallel-logit-softcap 30" in placing_flags(Choice(request, "vocab-2", "1f1b", (2,) * 4))
    assert placing_flags(Choice(request, "baseline", "1f1b", (2,) * 4)) == []


def test_heads_of_multi_token_prediction_stand_in_a_layout() -> None:
    request = Request(replace(model_preset("deepseek-v3"), layers=13), Job(p=4, m=8), H100, 1e6)
    (flag,) = placing_flags(Choice(request, "vocab-2", "1f1b", (3, 3, 3, 4)))[:1]
    assert flag == "--pipeline-model-parallel-layout 'Ettt|ttt|ttt|ttttmL'"
    by_hand = [one for one in stock_choices(request) if "by hand" in one.family]
    assert by_hand
    assert all("mL'" in one.flags[0] for one in by_hand)
