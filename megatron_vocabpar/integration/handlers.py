"""The table: which method of which layer runs an instruction, for each algorithm.

    IF -> CI -> F(first) ... F(last) -> C0 -> S -> C1 [-> S2 -> C2] -> T -> [C2 | C3]
       -> B(last) ... B(first) -> CIB -> IB

Handlers hand tensors to each other through buffers, launch communication on side streams, and wait for what
they consume. They never decide an order: that is the schedule's (``schedule/dependencies.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megatron_vocabpar.integration.input_layer import InputLayer
from megatron_vocabpar.integration.iteration import Iteration
from megatron_vocabpar.integration.model import VocabParallelGPTModel
from megatron_vocabpar.integration.output_layer import OutputLayer
from megatron_vocabpar.integration.stages import Stages
from megatron_vocabpar.integration.weight_gradients import WeightGradients
from megatron_vocabpar.runtime.executor import Handlers
from megatron_vocabpar.schedule.passes import CommType, PassType

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


def vocabulary_table(algorithm: str, inputs: InputLayer, output: OutputLayer) -> Table:
    """Handlers of the partitioned vocabulary layers."""
    around: Table = {
        PassType.IF: inputs.input_forward,
        CommType.CI: inputs.gather_rows,
        CommType.CIB: inputs.scatter_gradient,
        PassType.IB: inputs.input_backward,
        CommType.C0: output.broadcast_hidden,
    }
    algorithms: dict[str, Table] = {
        "naive": {
            PassType.S: output.output_forward,
            CommType.C1: output.reduce_maximum,
            PassType.S2: output.exponential_sum,
            CommType.C2: output.gather_statistics,
            PassType.T: output.output_backward,
            CommType.C3: output.reduce_input_gradient,
        },
        "vocab-1": {
            PassType.S: output.output_forward,
            CommType.C1: output.gather_statistics,
            PassType.T: output.output_backward,
            CommType.C2: output.reduce_input_gradient,
        },
        "vocab-2": {
            PassType.S: output.output_forward,
            CommType.C1: output.gather_statistics_and_input_gradient,
            PassType.T: output.output_backward,
        },
        "interlaced": {PassType.S: output.synchronous_output},
    }
    return around | algorithms[algorithm]


def handlers_of(
    iteration: Iteration,
    model: VocabParallelGPTModel | None,
    weight_gradients: Sequence[WeightGradients] = (),
) -> tuple[Handlers, Callable[[], None]]:
    """The table for one forward-backward call, and what to call when its instructions have run.

    Args:
        iteration: the state of the call.
        model: the chunk that holds the vocabulary shards, unwrapped; None for baseline and redis.
        weight_gradients: of each chunk, where the schedule splits them from B.
    """
    if model is None:
        return stage_table(Stages(iteration, weight_gradients)), iteration.finish
    inputs, output = InputLayer(iteration, model), OutputLayer(iteration, model)
    stages = Stages(iteration, weight_gradients, inputs.embedded_rows, output.hidden_gradient)

    def finish() -> None:
        output.finish()
        inputs.finish()
        iteration.finish()

    return stage_table(stages) | vocabulary_table(iteration.rank.algorithm, inputs, output), finish
