"""The order in which Transformer Engine captures layers for CUDA graphs: that of the schedule that runs.

Megatron's ``TECudaGraphHelper`` has one function make it, from its own table of passes. It captures after
``--cuda-graph-warmup-steps`` iterations, when our plan is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

from megatron.core.pipeline_parallel import schedules

from megatron_vocabpar.megatron_lm.flag_config import FlagConfig
from megatron_vocabpar.pipeline.forward_backward import ForwardBackward
from megatron_vocabpar.pipeline.graphs import layer_order


def capture_order_of(run: ForwardBackward | None, num_microbatches: int) -> list[int]:
    """F and B of this rank as ``run`` runs them: the number of the chunk from 1 on, negative for B.

    Raises:
        ValueError: before the first iteration, which makes ``run``; or as ``ForwardBackward.capture_order``.
    """
    if run is None:
        raise ValueError(
            "CUDA graphs of layers are captured before an iteration has run; give --cuda-graph-warmup-steps "
            "1 or more"
        )
    return run.capture_order(num_microbatches)


def order_of_the_schedule(original: Callable[..., list[int]], _: FlagConfig) -> Callable[..., list[int]]:
    """Instead of ``original``, which makes the order of Megatron's schedule."""

    @wraps(original)
    def convert_schedule_table_to_order(
        num_warmup_microbatches: int, num_model_chunks: int, schedule_table: Sequence[Any]
    ) -> list[int]:
        runner: Any = schedules.get_forward_backward_func()
        if isinstance(runner, partial):  # that of frameworks, with Megatron's own
            runner = runner.func
        return runner.capture_order(len(schedule_table) // num_model_chunks)

    return convert_schedule_table_to_order


def order_of_the_layers(original: Callable[..., Any], _: FlagConfig) -> Callable[..., Any]:
    """Instead of ``original``, which expects F and B in turns; ``order`` is what the function above gave."""

    @wraps(original)
    def get_overlap_moe_expert_parallel_comm_order(
        order: Any, num_layers_per_chunk: Sequence[int], capture_wgrad_graph: bool
    ) -> Any:
        return layer_order(order, num_layers_per_chunk, capture_wgrad_graph)

    return get_overlap_moe_expert_parallel_comm_order
