"""CUDA graphs of layers, captured by Megatron (``LayerGraphs``) or Transformer Engine (``EngineGraphs``).

Both kinds share memory in the order in which they are captured: in another order a graph would silently
overwrite what is still needed. So all later calls run one plan, and ``handlers/stages.py`` copies what leaves
a stage, because its readers may run after graphs that take its memory: S and T after B, a message beside the
next pass. Passes of the vocabulary layers and communication are not captured.

megatron-core records each layer's F and B of every microbatch in the first iteration, and captures them when
it is over; it waits for the device before each. Transformer Engine is handed the order of F and B of a rank's
chunks, that of our row, and captures between two iterations; an evaluation replays nothing. The F and B of a
pair run layer beside layer. There Megatron makes every layer a chunk of its own, numbered through the rank's
chunks; the F of a layer is captured before the B beside it.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import zip_longest

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer import cuda_graphs

from megatron_vocabpar.schedule.plan import Plan
from megatron_vocabpar.schedule.words.passes import PassType

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
        _check_same(plan, self._plan, ", in evaluation too,")

    def capture(self, plan: Plan, forward_only: bool) -> None:
        """After a call: make graphs of what the first training call recorded."""
        schedules.create_cudagraphs()
        if not forward_only:
            self._plan = plan


class CaptureOrder(list[int]):
    """F and B of a rank in order: the number of the chunk from 1 on, negative for B.

    Attributes:
        pairs: the positions of Fs that run beside the B that follows.
    """

    def __init__(self, chunks: Sequence[int], pairs: frozenset[int] = frozenset()) -> None:
        super().__init__(chunks)
        self.pairs = pairs


def capture_order(plan: Plan, rank: int) -> CaptureOrder:
    """F and B of a rank in the order of its row.

    Args:
        plan: of a training iteration; F and B of a chunk run microbatch by microbatch.
        rank: of the pipeline.
    """
    schedule = plan.schedule
    sign = {PassType.F: 1, PassType.B: -1}
    passes = [item for item in schedule.ranks[rank] if item.type in sign]
    beside = {pair.forward for pair in schedule.pairs}
    return CaptureOrder(
        [sign[item.type] * (schedule.placement.chunk_of(item.stage) + 1) for item in passes],
        frozenset(position for position, item in enumerate(passes) if item in beside),
    )


def layer_order(
    order: CaptureOrder, layers: Sequence[int], captures_w: bool
) -> tuple[list[float], list[list[int] | None]]:
    """The same layer by layer, as Megatron's plans run pairs.

    Args:
        order: of chunks.
        layers: of each chunk, how many are captured.
        captures_w: whether weight gradients have graphs of their own, which follow the layer's B at once, and
            those of the last layer the whole pair; -2.5 stands for those of -2.

    Returns:
        Numbers of layers, as of chunks; and for each F ``[chunk, layer of the chunk]`` from 0 on, else None.
    """
    numbers: list[float] = []
    places: list[list[int] | None] = []

    def add(number: float, place: list[int] | None = None) -> None:
        numbers.append(number)
        places.append(place)

    position = 0
    while position < len(order):
        together = order[position : position + (2 if position in order.pairs else 1)]
        forwards = [(c - 1, layer) for c in together if c > 0 for layer in range(layers[c - 1])]
        backwards = [(-c - 1, layer) for c in together if c < 0 for layer in reversed(range(layers[-c - 1]))]
        for count, (f, b) in enumerate(zip_longest(forwards, backwards), 1):
            if f is not None:
                add(sum(layers[: f[0]]) + f[1] + 1, list(f))
            if b is not None:
                number = -(sum(layers[: b[0]]) + b[1] + 1)
                add(number)
                if captures_w and count < len(backwards):
                    add(number - 0.5)
        if captures_w and backwards:
            add(-(sum(layers[: backwards[-1][0]]) + backwards[-1][1] + 1) - 0.5)
        position += len(together)
    return numbers, places


class EngineGraphs:
    """Remembers in which plan's order graphs were captured."""

    def __init__(self) -> None:
        self._plan: Plan | None = None

    def order(self, plan: Plan, rank: int) -> CaptureOrder:
        """What Transformer Engine is to capture; from now on ``plan`` must be run."""
        order = capture_order(plan, rank)
        self._plan = plan
        return order

    def check(self, plan: Plan) -> None:
        """Check, before a training call, that it may run ``plan``.

        Raises:
            ValueError: for another plan than that in whose order graphs were captured.
        """
        _check_same(plan, self._plan)


def _check_same(plan: Plan, captured: Plan | None, when: str = "") -> None:
    """Raise a ValueError unless ``plan`` is the plan in whose order graphs were captured, if any were."""
    if captured is not None and plan is not captured:
        raise ValueError(
            f"CUDA graphs of layers were captured in the order of a plan of {captured.schedule.m} "
            f"microbatches, this call has another of {plan.schedule.m}; keep the number of "
            f"microbatches{when} and the plan"
        )
