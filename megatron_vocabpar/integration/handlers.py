"""The table: which method of which layer runs an instruction.

    IF -> CI -> F(first) ... F(last) -> C0 -> S -> C1 [-> S2 -> C2] -> T -> [C2 | C3]
       -> B(last) ... B(first) -> CIB -> IB

Handlers hand tensors to each other through buffers, launch communication on side streams, and wait for what
they consume. They never decide an order: that is the schedule's (``schedule/words/dependencies.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from megatron_vocabpar.integration.input_layer import InputLayer
from megatron_vocabpar.integration.iteration import Iteration
from megatron_vocabpar.integration.loss_reports import DistantLoss
from megatron_vocabpar.integration.model import PartitionedModel
from megatron_vocabpar.integration.output_layer import OutputLayer
from megatron_vocabpar.integration.stages import Stages
from megatron_vocabpar.integration.weight_gradients import WeightGradients
from megatron_vocabpar.runtime.executor import Handlers
from megatron_vocabpar.schedule.words.methods import Method
from megatron_vocabpar.schedule.words.passes import CommType, PassType

Table = dict[PassType | CommType, Callable[[Any], None]]


def stage_table(stages: Stages) -> Table:
    """Handlers of the transformer layers and of point-to-point: all of baseline and redis."""
    return {
        PassType.F: stages.forward,
        PassType.B: stages.backward,
        PassType.W: stages.weight_backward,
        CommType.SEND_F: stages.send_forward,
        CommType.RECV_F: stages.receive_forward,
        CommType.SEND_B: stages.send_backward,
        CommType.RECV_B: stages.receive_backward,
    }


def vocabulary_table(method: Method, inputs: InputLayer, output: OutputLayer) -> Table:
    """Handlers of the partitioned vocabulary layers, looked up from the method's chain.

    What a pass does follows from its name, what a collective carries from who waits for it.

    Raises:
        ValueError: for a chain with something new in it, naming it.
    """
    both_halves = output.input_backward if output.late_gradient else output.output_backward
    passes: Table = {
        PassType.S: output.synchronous_output if method.in_step else output.output_forward,
        PassType.S2: output.exponential_sum,
        PassType.T: output.weight_backward if output.early_gradient else both_halves,
        PassType.L: output.loss_gradient,
        PassType.TW: output.weight_backward,
    }
    carriers: dict[frozenset[PassType], Callable[[Any], None]] = {
        frozenset({PassType.S}): output.broadcast_hidden,
        frozenset({PassType.S2}): output.reduce_maximum,
        frozenset({PassType.T}): output.gather_statistics,
        frozenset({PassType.B}): output.reduce_input_gradient,
        frozenset({PassType.B, PassType.T}): output.gather_statistics_and_input_gradient,
    }
    table: Table = {
        PassType.IF: inputs.input_forward,
        CommType.CI: inputs.gather_rows,
        CommType.CIB: inputs.scatter_gradient,
        PassType.IB: inputs.input_backward,
        **{type_: passes[type_] for type_ in method.passes},
    }
    for type_ in method.collectives:
        waiting = method.waiting_for(type_) - {PassType.L, PassType.TW}
        if type_ is CommType.CG:
            table[type_] = output.broadcast_gradient
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
        weight_gradients: of each chunk, where the schedule splits them from B.
    """
    if model is None:
        distant_loss = DistantLoss(iteration) if iteration.microbatches.shapes else None
        stages = Stages(iteration, weight_gradients, distant_loss=distant_loss)
        return stage_table(stages), partial(_finish, distant_loss, iteration)
    inputs, output = InputLayer(iteration, model), OutputLayer(iteration, model)
    stages = Stages(iteration, weight_gradients, inputs.embedded_rows, output.hidden_gradient)
    table = stage_table(stages) | vocabulary_table(iteration.rank.method, inputs, output)
    return table, partial(_finish, output, inputs, iteration)


def _finish(*parts: OutputLayer | InputLayer | DistantLoss | Iteration | None) -> None:
    for part in parts:
        if part is not None:
            part.finish()
