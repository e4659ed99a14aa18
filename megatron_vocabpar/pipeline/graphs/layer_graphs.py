"""CUDA graphs of single transformer layers, which megatron-core records, captures and replays by itself.

Each layer has one graph for the F and one for the B of every microbatch. They share memory in the order of
the first iteration: a graph's output is valid until the next graph runs. In another order a graph would
silently overwrite what is still needed. So all calls from the first training call on run one plan, and
``handlers/stages.py`` copies what leaves a stage. Passes of the vocabulary layers and communication are not
captured: graphs are captured when an iteration is over, and Megatron waits for the device before each of
them.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer import cuda_graphs

from megatron_vocabpar.schedule.plan import Plan

_NAMES = vars(cuda_graphs)
OF_THIS_VERSION_ARE_WRONG = "alloc_tensor_from_graph_mempool" in _NAMES or (
    "TensorReusePool" in _NAMES
    and "cache_key" not in inspect.signature(cuda_graphs.CudaGraphManager.__call__).parameters
)
"""Whether emulated graphs of this Megatron gave wrong gradients: those of 0.16, 0.17, 0.19 and main did."""


class LayerGraphs:
    """Checks that graphs are recorded, captured and replayed in one order."""

    def __init__(self) -> None:
        self._plan: Plan | None = None

    def check(self, plan: Plan, chunks: Sequence[torch.nn.Module], forward_only: bool) -> None:
        """Check, before a call, that it may run ``plan`` or its evaluation.

        Raises:
            ValueError: for another plan than that of the first training call; for an evaluation of a model in
                training mode, which would be recorded.
        """
        if self._plan is None and forward_only and chunks[0].training:
            raise ValueError(
                "CUDA graphs of layers: an evaluation before the first training call would be recorded in "
                "its place; call model.eval() before it"
            )
        if self._plan is not None and plan is not self._plan:
            raise ValueError(
                f"CUDA graphs of layers were captured in the order of a plan of {self._plan.schedule.m} "
                f"microbatches, this call has another of {plan.schedule.m}; keep the number of "
                "microbatches, in evaluation too, and the plan"
            )

    def capture(self, plan: Plan, forward_only: bool) -> None:
        """After a call: make graphs of what the first training call recorded."""
        schedules.create_cudagraphs()
        if not forward_only:
            self._plan = plan
