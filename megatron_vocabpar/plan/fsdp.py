"""Megatron's FSDP as an opponent: weights, gradients and optimizer states are divided over the replicas.

There is no pipeline, so nothing is played: a microbatch gathers the weights of each layer before F and again
before B, and scatters its gradients behind B, all beside the layers that run. What is longer than they are is
waited for, and so are the gather of the first layer and the scatter of the last one. Kernels that communicate
are resident beside layers all the while, and take from them what ``price.py`` says.

With hybrid sharding (HSDP) only the ranks of a node divide the weights, and the nodes all-reduce gradients
once in an iteration. Gradients are kept and sent in float32, or in bfloat16.

For example, Llama-3.1 70B on 64 GB300 is planned within some percent of what NVIDIA published for it
(``lab/published_runs.json`` has such runs, ``python -m lab rates`` the errors).

Source: Megatron-FSDP's arguments in Megatron core 0.19; Zhao et al. (2023), PyTorch FSDP.
Next: ``configurations.py``, which asks for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from megatron_vocabpar.plan.choice import STOCK, Choice, Request
from megatron_vocabpar.plan.job import OVERLAP, in_whole_layers
from megatron_vocabpar.plan.price import Use
from megatron_vocabpar.plan.stage_memory import Bytes, Held, parameters_of, stage_memory
from megatron_vocabpar.plan.times import Group, can_pair, gather_ms, step_ms
from megatron_vocabpar.schedule.words.methods import BASELINE, method_named
from megatron_vocabpar.schedule.words.placement import Placement

FLAGS = (
    "--use-megatron-fsdp",
    "--data-parallel-sharding-strategy optim_grads_params",
    "--no-gradient-accumulation-fusion",
    "--ckpt-format fsdp_dtensor",
)
_WEIGHT = 2  # bytes of a parameter in 16 bits
_GRADIENTS = {4: "float32", 2: "bfloat16"}
_HELD_LAYERS = 2  # whole layers at a time: the one that runs, and the one that is gathered meanwhile


def fsdp_choices(request: Request) -> Iterator[Choice]:
    """Megatron's FSDP for a job of one stage, by width of gradients, and with or without hybrid sharding.

    Those whose memory does not fit are among them; the times of all are complete.
    """
    job = in_whole_layers(request.job, (request.model.layers,))
    request = replace(request, job=job)
    around = job.d * job.c
    if around == 1:
        return
    node = request.hardware.per_node // job.t
    divided = [around]
    if not request.model.experts and 1 < node < around and around % node == 0:
        divided.append(node)
    pairs = (False, True) if can_pair(request.model, job) and job.m > 1 else (False,)
    for shards, width, paired in product(divided, _GRADIENTS, pairs):
        yield _choice(request, shards, width, paired)


def _choice(request: Request, shards: int, width: int, paired: bool) -> Choice:
    """FSDP over ``shards`` ranks with gradients of ``width`` bytes; F and B run together if ``paired``."""
    model, job, gpu = request.model, request.job, request.hardware
    method, placement = method_named(BASELINE), Placement(1, 1, "standard")
    (held,) = parameters_of(model, job, method, placement, (model.layers,))
    around, expert_replicas = job.replicas
    dense, expert = Group(shards, job.t), Group(expert_replicas, job.expert_tensor * job.e)
    gather, scatter = (
        gather_ms(held.shared * size, dense, gpu) + gather_ms(held.experts * size, expert, gpu)
        for size in (_WEIGHT, width)
    )
    costs = request.costs()
    last, first = costs.last_rank_extra, costs.first_rank_extra
    forward = _sum(costs.F_ms, costs.IF_ms) + last["F_ms"]
    backward = _sum(costs.B_ms, costs.W_ms) + last["B_ms"] + last["W_ms"] + sum(first.values())
    resident = min(1.0, (2 * gather + scatter) / (forward + backward))
    use = Use(1.0, resident=resident)
    hidden = _sum(costs.hidden_ms) * (job.m - 1) / job.m if paired else 0.0
    waited = (gather + scatter) / model.layers
    nodes = Group(around // shards, job.t * shards)
    reduced = max(0.0, 2 * gather_ms(held.shared / shards * width, nodes, gpu) - backward)
    updated = held.shared / shards + held.experts / expert_replicas
    tail_ms = reduced + step_ms(updated, gpu)
    factor = request.factor(use)
    passes = max(forward * factor, gather) + max(backward * factor, gather + scatter) - hidden + waited
    iteration_ms = job.m * passes + tail_ms
    computing = job.m * (forward + backward) / iteration_ms
    choice = Choice(
        request,
        STOCK,
        f"{'fsdp' if shards == around else 'hsdp'}, gradients in {_GRADIENTS[width]}",
        (model.layers,),
        iteration_ms,
        idle=max(0.0, 1.0 - computing - tail_ms / iteration_ms),
        is_full=True,
        exact=True,
        flags=(
            *FLAGS,
            *([f"--num-distributed-optimizer-instances {around // shards}"] if shards < around else []),
            *(["--grad-reduce-in-bf16"] if width == _WEIGHT else []),
            *(OVERLAP[:1] if paired else []),
        ),
        tail_ms=tail_ms,
        use=use,
    )
    whole = _whole_layers(request)
    activations = Held(2.0 if paired else 1.0)
    (stage,) = stage_memory(model, job, method, placement, (model.layers,), [activations])
    stage = replace(
        stage,
        weights=updated * _WEIGHT + whole * _WEIGHT,
        gradients=updated * width + whole * width,
        optimizer=updated * Bytes().optimizer,
    )
    return replace(choice, stages=(stage.with_reserve(),))


def _whole_layers(request: Request) -> float:
    """The parameters of the layers that a rank has whole at a time, and of the vocabulary layers."""
    model, job = request.model, request.job
    layer = max(
        kind.shared_weights / job.t + kind.expert_weights / (job.expert_tensor * job.e)
        for _, kind in model.kinds
    )
    return _HELD_LAYERS * layer + (1 if model.tied else 2) * model.vocabulary_weights / job.t


def _sum(*times: float | tuple[float, ...]) -> float:
    """The ms of passes of a pipeline of one rank."""
    return sum(sum(ms) if isinstance(ms, tuple) else ms for ms in times)
