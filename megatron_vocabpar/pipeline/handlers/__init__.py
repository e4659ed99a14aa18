"""The table: which method of which layer runs an instruction.

    training      IF -> CI -> F(first) ... F(last) -> C0 -> S -> C1 [-> S2 -> C2] -> T -> [C2 | C3]
                  -> L -> CG -> B(last) ... B(first) -> CIB -> IB
    evaluation    IF -> CI -> F(first) ... F(last) -> C0 -> S -> C1 [-> S2 -> C2] [-> R -> C] -> L

Handlers hand tensors to each other through buffers, launch communication on side streams, and wait for what
they consume. They never decide an order: that is the schedule's (``schedule/words/dependencies.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from megatron_vocabpar.pipeline.call import Call
from megatron_vocabpar.pipeline.handlers.input_layer import InputLayer
from megatron_vocabpar.pipeline.handlers.planned_stages import PlannedStages
from megatron_vocabpar.pipeline.handlers.stages import Stages, Transfers
from megatron_vocabpar.pipeline.iteration import Iteration
from megatron_vocabpar.pipeline.output.chain import OutputChain
from megatron_vocabpar.pipeline.output.collectives import HiddenStates, OutputCollectives
from megatron_vocabpar.pipeline.output.loss import DistantLoss, Losses
from megatron_vocabpar.pipeline.output.shard_passes import InStep, NaivePasses, SoftmaxPasses
from megatron_vocabpar.pipeline.split_w.weight_gradients import WeightGradients
from megatron_vocabpar.runtime.executor import Handlers
from megatron_vocabpar.schedule.words.passes import CommType, InstructionType, PairType, PassType

Table = dict[InstructionType, Callable[[Any], None]]


def stage_table(stages: Stages) -> Table:
    """Handlers of the transformer layers and of point-to-point: all of most baselines."""
    transfers = Transfers(stages.iteration)
    return {
        PassType.F: stages.forward,
        PassType.B: stages.backward,
        PassType.W: stages.weight_backward,
        PairType.FB: stages.pair,
        CommType.SEND_F: transfers.send_forward,
        CommType.RECV_F: transfers.receive_forward,
        CommType.SEND_B: transfers.send_backward,
        CommType.RECV_B: transfers.receive_backward,
    }


def input_table(inputs: InputLayer) -> Table:
    """Handlers of the partitioned input layer."""
    return {
        PassType.IF: inputs.input_forward,
        CommType.CI: inputs.gather_rows,
        CommType.CIB: inputs.scatter_gradient,
        PassType.IB: inputs.input_backward,
    }


def distant_table(loss: DistantLoss) -> Table:
    """Handlers of a whole output layer whose loss function is on another rank."""
    return {CommType.C0: loss.send_losses, PassType.L: loss.gradient, CommType.CG: loss.send_gradient}


def output_table(chain: OutputChain, hidden: HiddenStates, losses: Losses) -> Table:
    """Handlers of the partitioned output layer: of a method's passes, and of its collectives.

    A collective carries the result of the pass before it.
    """
    method, collectives, kind = chain.method, OutputCollectives(chain), SoftmaxPasses
    if method.in_step:
        kind = InStep
    elif PassType.S2 in method.passes:
        kind = NaivePasses
    run = kind(chain, hidden, losses).table() | {PassType.L: losses.gradient}
    carry: dict[PassType, Callable[[Any], None]] = {
        PassType.S: collectives.gather_statistics,
        PassType.S2: collectives.gather_statistics,
        PassType.T: collectives.reduce_input_gradient,
        PassType.R: collectives.sum_counts,
        PassType.L: losses.broadcast_gradient,
    }
    if kind is NaivePasses:
        carry[PassType.S] = collectives.reduce_maximum
    table: Table = {type_: run[type_] for type_ in method.passes}
    table |= {type_: carry[producer] for type_, producer in method.producers.items()}
    return table | {CommType.C0: hidden.broadcast}


def handlers_of(
    iteration: Iteration,
    chain: OutputChain | None,
    weight_gradients: Sequence[WeightGradients] = (),
) -> tuple[Handlers, Callable[[], None]]:
    """The table for one forward-backward call, and what to call when its instructions have run.

    Args:
        iteration: the state of the call.
        chain: the partitioned output layer of the call; None for baseline and redis.
        weight_gradients: one for each chunk if the schedule splits W from B.
    """
    if chain is None and not iteration.rank.method.chain:
        return stage_table(_stages(iteration)(iteration, weight_gradients)), iteration.finish
    if chain is None:
        loss = DistantLoss(iteration)
        stages = _stages(iteration)(iteration, weight_gradients, output_gradient=loss.of_losses)
        return stage_table(stages) | distant_table(loss), partial(_finish, loss, iteration)
    inputs = InputLayer(iteration, chain.model)
    hidden, losses = HiddenStates(chain), Losses(chain)
    stages = _stages(iteration)(iteration, weight_gradients, inputs.embedded_rows, hidden.gradient)
    table = stage_table(stages) | input_table(inputs)
    table |= output_table(chain, hidden, losses)
    return table, partial(_finish, losses, inputs, iteration)


def runs_layer_plans(call: Call) -> bool:
    """Whether F and B run through Megatron's plans of layers: if training hides the exchange of experts."""
    return getattr(call.config, "overlap_moe_expert_parallel_comm", False) and not call.forward_only


def _stages(iteration: Iteration) -> type[Stages]:
    """The class that handles F and B."""
    return PlannedStages if runs_layer_plans(iteration.call) else Stages


def _finish(*parts: Losses | InputLayer | DistantLoss | Iteration) -> None:
    for part in parts:
        part.finish()
