"""The table: which method of which layer runs an instruction.

    training      IF -> CI -> F(first) ... F(last) -> C0 -> S -> C1 [-> S2 -> C2] -> T -> [C2 | C3]
                  -> L -> CG -> B(last) ... B(first) -> CIB -> IB
    evaluation    IF -> CI -> F(first) ... F(last) -> C0 -> S -> C1 [-> S2 -> C2] -> L

Handlers hand tensors to each other through buffers, launch communication on side streams, and wait for what
they consume. They never decide an order: that is the schedule's (``schedule/words/dependencies.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from megatron_vocabpar.pipeline.handlers.barriers import Barriers
from megatron_vocabpar.pipeline.handlers.chain import OutputChain
from megatron_vocabpar.pipeline.handlers.distant_loss import DistantLoss
from megatron_vocabpar.pipeline.handlers.hidden import HiddenStates
from megatron_vocabpar.pipeline.handlers.in_step import InStep
from megatron_vocabpar.pipeline.handlers.input_layer import InputLayer
from megatron_vocabpar.pipeline.handlers.loss import Losses
from megatron_vocabpar.pipeline.handlers.planned_stages import PlannedStages
from megatron_vocabpar.pipeline.handlers.softmax import SoftmaxPasses
from megatron_vocabpar.pipeline.handlers.stages import Stages
from megatron_vocabpar.pipeline.handlers.transfers import Transfers
from megatron_vocabpar.pipeline.iteration import Iteration
from megatron_vocabpar.pipeline.model.stage_model import PartitionedModel
from megatron_vocabpar.pipeline.split_w.weight_gradients import WeightGradients
from megatron_vocabpar.runtime.executor import Handlers
from megatron_vocabpar.schedule.words.methods import Method
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


def output_table(method: Method, chain: OutputChain, hidden: HiddenStates, losses: Losses) -> Table:
    """Handlers of the partitioned output layer, looked up from the method's chain.

    What a pass does follows from its name, what a collective carries from who waits for it.

    Raises:
        ValueError: for a chain with something new in it, naming it.
    """
    barriers = Barriers(chain)
    softmax = SoftmaxPasses(chain, hidden, losses)
    if chain.ranks_targets:
        run_t = losses.count_likelier
    else:
        run_t = softmax.weight_backward if chain.early else softmax.input_backward
    passes: Table = {
        PassType.S: InStep(softmax, barriers).output_layer if method.in_step else softmax.softmax,
        PassType.S2: softmax.exponential_sum,
        PassType.T: run_t,
        PassType.L: losses.gradient,
        PassType.TW: softmax.weight_backward,
    }
    carriers: dict[frozenset[PassType], Callable[[Any], None]] = {
        frozenset({PassType.S}): hidden.broadcast,
        frozenset({PassType.S2}): barriers.reduce_maximum,
        frozenset({PassType.T}): barriers.gather_statistics,
        frozenset({PassType.L}): barriers.sum_counts if chain.ranks_targets else barriers.gather_statistics,
        frozenset({PassType.B}): barriers.reduce_input_gradient,
        frozenset({PassType.B, PassType.T}): barriers.gather_statistics_and_input_gradient,
    }
    table: Table = {type_: passes[type_] for type_ in method.passes}
    for type_ in method.collectives:
        waiting = method.waiting_for(type_)
        if chain.training:  # L and TW take what B and T take
            waiting -= {PassType.L, PassType.TW}
        if type_ is CommType.CG:
            table[type_] = losses.broadcast_gradient
            continue
        if waiting not in carriers:
            names = " and ".join(sorted(pass_.value for pass_ in waiting)) or "nothing"
            raise ValueError(f"method {method.name}: no handler for {type_.value}, which {names} waits for")
        table[type_] = carriers[waiting]
    return table


def handlers_of(
    iteration: Iteration,
    model: PartitionedModel | None,
    weight_gradients: Sequence[WeightGradients] = (),
) -> tuple[Handlers, Callable[[], None]]:
    """The table for one forward-backward call, and what to call when its instructions have run.

    Args:
        iteration: the state of the call.
        model: the chunk that holds the vocabulary shards, unwrapped; None for baseline and redis.
        weight_gradients: one for each chunk if the schedule splits W from B.
    """
    if model is None and not iteration.rank.method.chain:
        return stage_table(_stages(iteration)(iteration, weight_gradients)), iteration.finish
    if model is None:
        loss = DistantLoss(iteration)
        stages = _stages(iteration)(iteration, weight_gradients, output_gradient=loss.of_losses)
        return stage_table(stages) | distant_table(loss), partial(_finish, loss, iteration)
    inputs, chain = InputLayer(iteration, model), OutputChain(iteration, model)
    hidden, losses = HiddenStates(chain), Losses(chain)
    stages = _stages(iteration)(iteration, weight_gradients, inputs.embedded_rows, hidden.gradient)
    table = stage_table(stages) | input_table(inputs)
    table |= output_table(iteration.rank.method, chain, hidden, losses)
    return table, partial(_finish, losses, inputs, iteration)


def _stages(iteration: Iteration) -> type[Stages]:
    """Those that run Megatron's plans of the layers, where training is to hide the experts' exchange."""
    call = iteration.call
    planned = getattr(call.config, "overlap_moe_expert_parallel_comm", False) and not call.forward_only
    return PlannedStages if planned else Stages


def _finish(*parts: Losses | InputLayer | DistantLoss | Iteration) -> None:
    for part in parts:
        part.finish()
