"""Hybrid models: what each symbol costs, where bars go, and every way to give a pattern."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import accumulate, combinations, pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
from click.testing import CliRunner

from megatron_vocabpar.cli.main import main
from megatron_vocabpar.plan.choice import Request, costs_of
from megatron_vocabpar.plan.choices import choice_of
from megatron_vocabpar.plan.given import Given, read_words
from megatron_vocabpar.plan.hardware import hardware_named
from megatron_vocabpar.plan.job import Job
from megatron_vocabpar.plan.layer_counts import layer_counts, layouts_of
from megatron_vocabpar.plan.pattern import check_pattern, layers_in, with_bars
from megatron_vocabpar.plan.plays import play_stock, play_stock_in_full, played, stock_choice, stock_choices
from megatron_vocabpar.plan.read_arguments import model_from_arguments
from megatron_vocabpar.plan.read_config import load_config, model_preset, model_presets
from megatron_vocabpar.schedule.make.families import family_named
from megatron_vocabpar.schedule.times.redistribution import cut
from megatron_vocabpar.schedule.words.methods import method_named

H100 = hardware_named("h100")
NEMOTRON = model_preset("nemotron-h-8b")
DSA = "--dsa-indexer-n-heads 4 --dsa-indexer-head-dim 32 --dsa-indexer-topk 64 --kv-lora-rank 64"


def of_words(words: str) -> Any:
    sizes = (
        "--hidden-size 256 --num-attention-heads 8 --seq-length 512 --vocab-size 1000 --ffn-hidden-size 768"
    )
    return model_from_arguments(Given(read_words(f"{sizes} {words}".split()), "here"))


def test_a_pattern_of_groups_is_the_gpt() -> None:
    """``[*-]`` is a GPT's layer: the same weights, operations, bytes, times and schedule, stage by stage."""
    gpt = replace(model_preset("llama-3.1-8b"), layers=16)
    by_groups = replace(gpt, pattern="[*-]" * 16)
    for name in ("parameters", "step_flops", "activation_bytes", "selective_bytes", "repeated_flops"):
        assert getattr(by_groups, name) == pytest.approx(getattr(gpt, name))
    first, second = (Request(model, Job(p=4, t=2, d=2, m=8), H100, 80.0) for model in (gpt, by_groups))
    for method, family, layers in (("baseline", "1f1b", (5, 5, 4, 2)), ("vocab-2", "v-half", (2,) * 8)):
        ours, theirs = (
            played(one, method_named(method), family_named(family), layers) for one in (second, first)
        )
        assert ours.iteration_ms == pytest.approx(theirs.iteration_ms)
        assert ours.peak_gib == pytest.approx(theirs.peak_gib)


@pytest.mark.parametrize(
    ("symbol", "words", "weights", "beyond_weights"),
    [
        ("*", "--group-query-attention --num-query-groups 2", 256 * (256 + 64 + 64 + 256), 4 * 512 * 256),
        ("-", "--swiglu", 3 * 256 * 768, 0),
        ("E", "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 128", 256 * 4 + 8 * 256 * 128, 0),
        ("M", "", 256 * (2 * 512 + 2 * 8 * 128 + 8) + 512 * 256, 7 * 512 * 128),
        ("G", "--linear-num-value-heads 8 --linear-num-key-heads 4 --linear-key-head-dim 32 "
            "--linear-value-head-dim 32", 256 * (2 * 128 + 2 * 256 + 16) + 256 * 256, 8 * 256 * 32),
        # queries; compressed keys; keys and values of heads; output; the indexer's three
        ("D", DSA, 256 * 8 * 192 + 256 * 128 + 64 * 8 * 256 + 8 * 128 * 256 + 256 * (4 * 32 + 32 + 4),
            2 * 64 * 8 * (192 + 128) + 2 * 512 * 4 * 32),
    ],
)  # fmt: skip
def test_what_a_symbol_costs(symbol: str, words: str, weights: int, beyond_weights: int) -> None:
    """Counted by hand from Megatron's state-space modules and its variant ``dsa`` of attention."""
    model = replace(
        of_words(f"--hybrid-layer-pattern *{symbol}{symbol} {words}"), pattern=2 * symbol, layers=2
    )
    assert model.shared_weights + model.expert_weights == weights
    active = weights - 4 * 256 * 128 if symbol == "E" else weights  # two of four experts
    assert model.matmul_flops == 2 * active
    assert model.attention_flops == beyond_weights


def test_bars_are_moved_between_layers() -> None:
    assert layers_in("M-M|[*-]E/*E") == ["M", "-", "M", "*-", "E"]
    assert with_bars("M-|M[*-]E/*E/*E", (1, 3, 1, 0)) == "M|-M[*-]|E|/*E/*E"
    for bad in ("M?", "[M-", "M[*[-]]", "|", "M/*E/*M", "M[]"):
        with pytest.raises(ValueError, match="is no pattern of layers"):
            check_pattern(bad)


@pytest.mark.parametrize("shape", ["one", "v", "turns"])
def test_ranks_take_about_what_the_mean_layers_would(shape: str) -> None:
    """Against every way to cut: most often the nearest, and on average within 3 % of it."""
    random, ratios = Random(1), []
    for _ in range(60):
        p = random.choice((2, 3, 4) if shape == "one" else (2, 3))
        ranks = {"one": [*range(p)], "v": [*range(p), *reversed(range(p))], "turns": [*range(p)] * 2}[shape]
        work = [random.choice((1.0, 2.5, 0.6)) for _ in range(random.randint(len(ranks) + 2, 12))]
        counts = [random.randint(1, 3) for _ in ranks]
        wanted = dict.fromkeys(ranks, 0.0)
        for rank, count in zip(ranks, counts, strict=True):
            wanted[rank] += sum(work) * count / sum(counts)

        def longest(each: Any, ranks: Any = ranks, work: Any = work, wanted: Any = wanted) -> float:
            busy = {rank: sum(work) / len(wanted) - ms for rank, ms in wanted.items()}
            for rank, (start, end) in zip(ranks, pairwise([0, *accumulate(each)]), strict=True):
                busy[rank] += sum(work[start:end])
            return max(busy.values())

        found = cut(work, counts, ranks)
        assert sum(found) == len(work)
        assert all(found[:-1])
        ends = combinations(range(1, len(work) + 1), len(ranks) - 1)
        every = ([b - a for a, b in pairwise((0, *each, len(work)))] for each in ends)
        ratios.append(longest(found) / min(map(longest, every)))
    assert sum(ratios) / len(ratios) < 1.03
    assert sum(ratio < 1.0 + 1e-9 for ratio in ratios) > 30
    assert cut([1.0] * 8, (3, 3, 2, 0), range(4)) == (3, 3, 2, 0)


@pytest.mark.slow
def test_a_plan_places_the_bars() -> None:
    """Stages take together what the mean layer says, and bars are better than layers divided evenly."""
    request = Request(NEMOTRON, Job(p=4, t=2, m=4), H100, 80.0)
    best = choice_of(request, "baseline", "v-zb")
    assert sum(best.layers) == 52
    rows = costs_of(request, best.layers).stage_ms
    mean = request.costs()
    for name in ("F_ms", "B_ms", "W_ms"):
        assert sum(rows[name]) == pytest.approx(4 * getattr(mean, name))
    even = played(request, method_named("baseline"), family_named("v-zb"), (7, 7, 7, 7, 6, 6, 6, 6))
    assert best.iteration_ms < even.iteration_ms
    by_hand = {one.family: one for one in stock_choices(request)}
    stock = layer_counts(request, method_named("baseline"), family_named("1f1b"))
    plain = played(request, method_named("baseline"), family_named("1f1b"), stock[0])
    assert by_hand["1f1b, by hand"].iteration_ms < plain.iteration_ms
    assert all("--hybrid-layer-pattern" in one.flags[0] for one in by_hand.values())


@pytest.mark.slow
def test_megatrons_own_bars_are_moved_as_long_as_that_is_faster() -> None:
    """Stages of unlike layers wait for each other in ways that sums of work do not show."""
    request = Request(NEMOTRON, Job(p=8, m=8), H100, 1e6)
    placed = [play_stock(stock_choice(request, one)) for one in layouts_of(request)]
    first = min(placed, key=lambda one: one.iteration_ms)
    best = min(stock_choices(request), key=lambda one: one.iteration_ms)
    assert best.iteration_ms < 0.99 * first.iteration_ms
    assert sum(best.layers) == 52
    assert best.flags[0].count("|") == len(best.layers) - 1
    assert play_stock_in_full(best).iteration_ms <= best.iteration_ms


CONFIGS = {
    "nemotron_h": ({"layers_block_type": ["mamba", "moe", "attention", "mlp"]}, "ME*-"),
    "qwen3_next": ({"mlp_only_layers": [1], "num_experts": 8}, "GEG-GE*E"),
    "granitemoehybrid": ({"layer_types": ["mamba", "attention"], "shared_intermediate_size": 96}, "M-*-"),
    "jamba": (
        {"num_experts": 4, "attn_layer_period": 4, "attn_layer_offset": 2, "expert_layer_period": 2,
            "expert_layer_offset": 1, "mamba_d_state": 16}, "M-ME*-ME"),
}  # fmt: skip


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_config_of_each_family(kind: str, tmp_path: Path) -> None:
    example = next(
        (one["config"] for one in model_presets().values() if one["config"]["model_type"] == kind), {}
    )
    keys, pattern = CONFIGS[kind]
    sizes = {"vocab_size": 512, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 64}
    data = {
        **example,
        "num_local_experts": 0,
        "num_experts_per_tok": 2,
        "mamba_d_head": "auto",
        **sizes,
        **keys,
    }
    data = {**data, "model_type": kind, "num_hidden_layers": 2 if "layer_types" in keys else 4}
    data.pop("hybrid_override_pattern", None)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(data))
    model = load_config(str(path), 128)
    assert (model.pattern, model.layers) == (pattern, len(pattern))
    assert model.ffn == (96 if kind == "granitemoehybrid" else 64)
    lost = {
        "nemotron_h": "layers_block_type",
        "jamba": "attn_layer_period",
        "qwen3_next": "linear_key_head_dim",
    }
    data.pop(lost.get(kind, "mamba_d_state"))
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=f"config.json: no {lost.get(kind, 'mamba_d_state')}; .* of {kind}"):
        load_config(str(path), 128)


def test_a_pattern_after_the_dashes() -> None:
    """Its bars move, and its head stays."""
    words = "--hybrid-layer-pattern M-M|-M*-M/*- --mamba-num-groups 2 --hidden-size 256 --seq-length 512 "
    words += (
        "--num-attention-heads 8 --vocab-size 64000 --pipeline-model-parallel-size 2 --global-batch-size 2"
    )
    done = CliRunner().invoke(main, ["plan", "--format", "json", "--", *words.split()])
    plan = json.loads(done.stdout)
    assert plan["model"]["mtp_depths"] == 1
    (written,) = (flag for flag in plan["flags"] if flag.startswith("--hybrid-layer-pattern"))
    assert written.endswith("/*-'")
    assert not plan["notes"]
    done = CliRunner().invoke(main, ["plan", "--", *words.replace("M*", "M?").split()])
    assert done.exit_code == 2
    assert "is no pattern of layers" in done.output
