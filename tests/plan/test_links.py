"""Communication times: bytes over the slower of link and network, held against sums made by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_vocabpar.plan.hardware import hardware_named, hardware_presets
from megatron_vocabpar.plan.job import Job
from megatron_vocabpar.plan.read_config import model_preset
from megatron_vocabpar.plan.times import (
    LINK_REACHES,
    NETWORK_REACHES,
    Group,
    context_ms,
    estimated_costs,
    exchange_ms,
    gather_ms,
    gradients_ms,
    layer_ms,
    step_ms,
    tail_ms,
    tensor_ms,
    transfer_ms,
)

H100, GB200 = hardware_named("h100"), hardware_named("gb200")
DEEPSEEK = replace(model_preset("deepseek-v3"), dense_layers=0)


def test_a_group_knows_how_many_are_in_a_node() -> None:
    assert Group(8, 1).inside(H100) == 8
    assert Group(8, 4).inside(H100) == 2
    assert Group(8, 8).inside(H100) == 1
    assert Group(64, 1).inside(GB200) == 64


def test_a_gather_is_as_slow_as_link_or_network() -> None:
    within = gather_ms(8e6, Group(8, 1), H100)
    assert within == pytest.approx(7e6 / (LINK_REACHES * 450e9) * 1e3)
    # Four nodes: 8 adapters each carry an eighth of what a node lacks.
    slower = H100.connected(network_gb_s=25.0)
    across = gather_ms(32e6, Group(32, 1), slower)
    assert across == pytest.approx(24e6 / (NETWORK_REACHES * 8 * 25e9) * 1e3)
    assert gather_ms(1e9, Group(1, 1), H100) == 0.0
    assert gather_ms(32e6, Group(32, 1), H100.connected(network_gb_s=500.0)) < across


@pytest.mark.parametrize(
    ("name", "flex", "microseconds"),
    [("gb200", False, 930), ("gb200", True, 675), ("h100", False, 9164), ("h100", True, 4626)],
)
def test_the_exchange_of_experts_takes_as_long_as_published(
    name: str, flex: bool, microseconds: float
) -> None:
    """arXiv 2603.07685 has the dispatch over 64 ranks; 4,096 tokens a rank are our assumption."""
    job = Job(p=1, d=64, e=64, flex_dispatcher=flex)
    measured = exchange_ms(DEEPSEEK, job, hardware_named(name)) * 1e3
    assert measured == pytest.approx(microseconds, rel=0.25)


def test_experts_across_nodes_cost_more_than_within_one() -> None:
    model = model_preset("kimi-k2")
    inside, across = (layer_ms(model, Job(p=4, d=32, e=e), hardware_named("b200")) for e in (8, 32))
    assert across.exchange > 5 * inside.exchange
    assert across.products == inside.products


def test_a_pair_hides_most_of_the_exchange_of_both_its_passes() -> None:
    model, gpu = model_preset("kimi-k2"), hardware_named("b200")
    within = layer_ms(model, Job(p=4, d=32, e=8), gpu)
    assert within.hidden == pytest.approx(0.93 * 2 * within.exchange)
    # An exchange that takes longer than the other pass computes is hidden so far.
    slow = layer_ms(model, Job(p=4, d=32, e=32), gpu.connected(network_gb_s=5.0))
    forward, backward = slow.forward - slow.exchange, slow.backward - slow.exchange
    assert max(forward, backward) < slow.exchange
    assert slow.hidden == pytest.approx(0.93 * (forward + backward))
    costs = estimated_costs(model, Job(p=4, d=32, e=8), gpu)
    assert costs.hidden_ms == pytest.approx(within.hidden * 61 / 4)


@pytest.mark.parametrize("changes", [{"e": 1}, {"recompute": "full"}])
def test_no_pairs_where_megatron_has_none(changes: dict[str, Any]) -> None:
    model, job = model_preset("qwen3-30b-a3b"), Job(p=4, d=8, e=8)
    assert estimated_costs(model, job, H100).hides
    assert not estimated_costs(model, replace(job, **changes), H100).hides
    assert not estimated_costs(replace(model, mtp_depths=2), job, H100).hides


def test_tensor_parallelism_around_experts_is_attentions_alone() -> None:
    dense, sparse = model_preset("llama-3.1-8b"), replace(model_preset("qwen3-30b-a3b"), hidden=4096)
    job = Job(p=1, t=4)
    each = gather_ms(2 * 8192 * 4096, Group(4, 1), H100)
    assert tensor_ms(dense, job, H100) == pytest.approx(4 * each)
    assert tensor_ms(sparse, job, H100) == pytest.approx(2 * each * 4096 / 8192)
    assert tensor_ms(dense, Job(p=1), H100) == 0.0


def test_keys_and_values_go_around_beside_attention() -> None:
    model = replace(model_preset("llama-3.1-8b"), seq_length=32768)
    job = Job(p=1, c=4)
    moved = 2 * 32768 * 2 * 8 * 128
    assert context_ms(model, job, H100) == pytest.approx(gather_ms(moved, Group(4, 1), H100))
    assert layer_ms(model, job, H100).context == 0.0
    assert layer_ms(model, job, H100.connected(link_gb_s=1.0)).context > 0.0


def test_stages_of_one_node_talk_faster() -> None:
    moved = 12.6e6
    assert transfer_ms(moved, Job(p=8), hardware_named("a100")) == pytest.approx(0.35, rel=0.02)
    assert transfer_ms(moved, Job(p=8, d=2), H100) == pytest.approx(moved / (NETWORK_REACHES * 50e9) * 1e3)


def test_gradients_are_reduced_beside_passes_if_they_are_long_enough() -> None:
    job = Job(p=1, d=8, distributed_optimizer=True)
    scattered, gathered = gradients_ms(1e9, 0.0, job, H100)
    assert scattered == pytest.approx(2 * gathered) == pytest.approx(gather_ms(4e9, Group(8, 1), H100))
    both, nothing = gradients_ms(1e9, 0.0, replace(job, distributed_optimizer=False), H100)
    assert (both, nothing) == (2 * scattered, 0.0)
    costs = estimated_costs(model_preset("llama-3.1-8b"), job, H100)
    step = step_ms(1e9 / 8, H100)
    assert tail_ms(1e9, 0.0, 1e9 / 8, job, H100, costs) == pytest.approx(step)
    long = replace(costs, W_ms=scattered / 3)
    for chunks in (1, 2):  # W is split off, and hides what it takes
        left = tail_ms(1e9, 0.0, 1e9 / 8, job, H100, long, w_chunks=chunks) - step
        assert left == pytest.approx(scattered * 2 / 3 / chunks)
    apart = tail_ms(1e9, 0.0, 1e9 / 8, replace(job, overlap=False), H100, costs)
    assert apart == pytest.approx(step + scattered + gathered)
    assert step_ms(1e9, H100, offload=True) > step_ms(1e9, H100)


@pytest.mark.parametrize("name", hardware_presets())
def test_every_figure_has_its_source(name: str) -> None:
    gpu = hardware_presets()[name]
    figures = set(vars(gpu)) - {"name", "rates", "sources"}
    assert set(gpu.sources) == figures
    assert all(gpu.sources.values())
    assert set(gpu.rates.sources) == set(vars(gpu.rates)) - {"sources"}
    assert gpu.connected(network_gb_s=12.5).sources["network_gb_s"] == "as given"
