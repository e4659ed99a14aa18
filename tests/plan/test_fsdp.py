"""FSDP as an opponent: its time between fast and slow links, its memory by hand, and published runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_vocabpar.plan.choice import Choice, Request
from megatron_vocabpar.plan.configurations import sharded
from megatron_vocabpar.plan.fsdp import fsdp_choices
from megatron_vocabpar.plan.hardware import hardware_named
from megatron_vocabpar.plan.job import Job
from megatron_vocabpar.plan.read_config import model_preset
from megatron_vocabpar.plan.stage_memory import GIB, RESERVED
from megatron_vocabpar.plan.variants import Question

MODEL, H100 = model_preset("llama-3.1-8b"), hardware_named("H100")
JOB = Job(p=1, d=16, m=4, distributed_optimizer=True)


def plain(choices: list[Choice]) -> Choice:
    """Without hybrid sharding, gradients in float32."""
    return next(choice for choice in choices if choice.family == "fsdp, gradients in float32")


def planned(link_gb_s: float, network_gb_s: float, job: Job = JOB) -> list[Choice]:
    gpu = H100.connected(link_gb_s=link_gb_s, network_gb_s=network_gb_s)
    return list(fsdp_choices(Request(MODEL, job, gpu, 80.0)))


def test_with_fast_links_it_takes_the_layers_and_the_step() -> None:
    choice = plain(planned(1e9, 1e9))
    computing = replace(JOB, d=1, distributed_optimizer=False)
    alone = Request(MODEL, computing, H100, 80.0)
    costs, factor = alone.costs(), alone.factor(choice.use)
    output = sum(costs.last_rank_extra.values()) + sum(costs.first_rank_extra.values())
    layers = costs.F_ms + costs.B_ms + costs.W_ms + costs.IF_ms + output
    assert choice.iteration_ms == pytest.approx(JOB.m * layers * factor + choice.tail_ms, rel=1e-6)
    assert choice.use.resident < 1e-6


def test_with_slow_links_it_takes_what_is_moved() -> None:
    """Weights before F and before B, and gradients behind B, over the network of two nodes."""
    slow = 0.1
    choice = plain(planned(450.0, slow))
    crossing = MODEL.parameters * (2 + 2 + 4) / 2  # bytes to the other node, in all of its eight GPUs
    moved_ms = crossing / 8 / (0.85 * slow * 1e6)
    assert choice.iteration_ms == pytest.approx(JOB.m * moved_ms, rel=0.03)
    assert choice.use.resident == 1.0


def test_hybrid_sharding_reduces_between_nodes_once() -> None:
    hybrid = [choice for choice in planned(450.0, 0.1) if choice.family.startswith("hsdp")]
    assert [choice.flags[-1] for choice in hybrid] == [
        "--num-distributed-optimizer-instances 2",
        "--grad-reduce-in-bf16",
    ]
    assert hybrid[0].iteration_ms < plain(planned(450.0, 0.1)).iteration_ms / 3
    assert hybrid[0].peak_gib > plain(planned(450.0, 0.1)).peak_gib


def test_weights_gradients_and_states_are_divided() -> None:
    (stage,) = plain(planned(450.0, 50.0)).stages
    assert stage.optimizer == pytest.approx(12 * MODEL.parameters / 16, rel=1e-3)
    whole = 2 * MODEL.shared_weights + 2 * MODEL.vocabulary_weights
    assert stage.weights == pytest.approx(2 * (MODEL.parameters / 16 + whole), rel=1e-3)
    assert stage.gradients == pytest.approx(2 * stage.weights)
    inside = (
        stage.weights
        + stage.gradients
        + stage.optimizer
        + stage.activations
        + stage.output
        + stage.workspaces
    )
    assert stage.total == pytest.approx(inside * (1 + RESERVED) + 1.5 * GIB, rel=1e-3)


def test_one_replica_has_nothing_to_divide() -> None:
    assert planned(450.0, 50.0, Job(p=1, t=8, m=4)) == []


@pytest.mark.parametrize(("gpu", "published"), [("GB300", 5_248), ("GB200", 4_224)])
def test_published_runs_are_met(gpu: str, published: int) -> None:
    """Llama-3 70B in 8 bits on 64 GPUs, 256 sequences, Megatron Bridge 26.04."""
    hardware = hardware_named(gpu)
    fixed = {"fp8": True, "t": 1, "c": 1}
    asked = Question(model_preset("llama-3.1-70b"), hardware, 64, 256, hardware.memory_gib, fixed)
    best = min(sharded(asked), key=lambda choice: choice.iteration_ms)
    assert best.tokens_per_s / 64 == pytest.approx(published, rel=0.15)
