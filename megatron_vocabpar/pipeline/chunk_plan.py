"""Megatron's plan of a model chunk: its layers cut at the exchanges between experts, to run F and B together.

A model's ``build_schedule_plan`` takes the arguments of ``forward`` and returns a list of layers, each cut
into attention and router, dispatch, experts, combine. ``run(F's plan, B's plan)`` runs one layer's F beside
another's B:

    computation    F attention   B experts                F experts   B attention
    exchange       B combine     F dispatch, B dispatch   F combine

The place of the final norm is corrected. Megatron 0.14 and 0.15 have it before the output layer, which our
plans leave out. Later versions have it after the last layer's combine, and nowhere if that layer has no
experts. Here it always belongs to the decoder's last layer. Megatron's plans leave out the contexts of
``--fp4-format``, so that they would train in 16 bits; here each layer of the decoder has its own.

Source: Megatron-LM, ``models/common/model_chunk_schedule_plan.py``. Used by ``handlers/planned_stages.py``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import fp8_utils
from megatron.core.enums import Fp8Recipe
from megatron.core.pipeline_parallel import utils

from megatron_vocabpar.pipeline.model.chunks import shown_as_rank
from megatron_vocabpar.schedule.words.passes import PassType


@dataclass(frozen=True)
class BackwardRun:
    """A B to run: its plan, and the gradient ``[s, b, H]`` of its F's output."""

    plan: ChunkPlan
    grad: torch.Tensor


class ChunkPlan:
    """The plan of one microbatch in one model chunk; ``forward`` runs its F, and ``backward`` its B.

    Args:
        model: the chunk, unwrapped.
        args, kwargs: the arguments of the chunk's ``forward``.
        leaves_weight_gradients: a pass W computes the weight gradients that layers delay; otherwise B does,
            as in Megatron.
        ended: told when a layer of F or B has ended, with the share of the layers that are done.

    Raises:
        ValueError: for an argument that Megatron's plans ignore.
    """

    def __init__(
        self,
        model: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        leaves_weight_gradients: bool,
        ended: Callable[[PassType, float], None],
    ) -> None:
        if kwargs.get("padding_mask") is not None:
            raise ValueError(
                "forward_step passed a padding_mask to the model, which Megatron's schedule plans hide from "
                "the routers; leave it out, or leave out --overlap-moe-expert-parallel-comm"
            )
        _make_streams(model.config)
        self._model = model
        # Megatron 0.14 looks in its global state whether the chunk has the layers of multi-token prediction.
        shown = shown_as_rank(model.shown_rank) if hasattr(model, "shown_rank") else nullcontext()
        with shown:
            self._plan = model.build_schedule_plan(*args, **kwargs)
        if getattr(model.config, "fp4", None):
            self._multiply_in_4_bits()
        if leaves_weight_gradients:
            self._leave_weight_gradients()
        self._tell_of_layers(ended)
        self.output: Any = None

    def forward(self, beside: BackwardRun | None = None) -> torch.Tensor:
        """Run F, and beside it B of another microbatch; returns the result of the chunk's ``forward``."""
        b_plan, b_grad = (beside.plan._plan, beside.grad) if beside else (None, None)
        with self._norm_in_the_last_layer(), _scales_of_fp8(self._model.config):
            self.output = type(self._plan).run(self._plan, b_plan, b_grad=b_grad)
        return self.output

    def backward(self, grad: torch.Tensor) -> None:
        """Run B alone; the gradients of the chunk's input and weights are then where autograd puts them."""
        with _scales_of_fp8(self._model.config):
            type(self._plan).run(None, self._plan, b_grad=grad)

    @contextmanager
    def _norm_in_the_last_layer(self) -> Iterator[None]:
        """In this context the final norm ends the last node of the decoder's last layer, and no other."""
        decoder = self._model.decoder
        name = "final_norm" if hasattr(decoder, "final_norm") else "final_layernorm"  # the former by pattern
        norm = getattr(decoder, name, None)
        if norm is None:
            yield
            return
        layers = len(decoder.layers)
        if layers == 0:
            node = self._plan.pre_process
            node.forward_func = _then(node.forward_func, norm)
        else:
            layer = self._plan.get_layer(layers - 1)
            dense = isinstance(layer.moe_combine, utils.NoopScheduleNode)
            node = layer.mlp if dense else layer.moe_combine
            node.submodule = _then(node.submodule, norm)
        setattr(decoder, name, None)
        try:
            yield
        finally:
            setattr(decoder, name, norm)

    def _multiply_in_4_bits(self) -> None:
        context = importlib.import_module("megatron.core.fp4_utils").get_fp4_context  # from 0.16 on
        for number in range(len(self._model.decoder.layers)):  # as without plans, no layer of further heads
            layer = self._plan.get_layer(number)
            layer.get_fp8_context = partial(context, self._model.config, layer.layer.layer_number - 1)

    def _tell_of_layers(self, ended: Callable[[PassType, float], None]) -> None:
        """A layer's F ends with its combine, and its B begins with it, when the layer above has ended."""
        layers = self._plan.num_layers()
        for number in range(layers):
            node = self._plan.get_layer(number).moe_combine
            forward_ended = partial(ended, PassType.F, (number + 1) / layers)
            above_ended = partial(ended, PassType.B, 1 - (number + 1) / layers)
            node.forward = partial(_call_then, node.forward, forward_ended)
            node.backward = partial(_call_behind, above_ended, node.backward)

    def _leave_weight_gradients(self) -> None:
        for number in range(self._plan.num_layers()):
            for node in vars(self._plan.get_layer(number)).values():
                if isinstance(node, utils.ScheduleNode):
                    node.delay_wgrad_compute = False


def _make_streams(config: Any) -> None:
    """Make Megatron's stream for exchanges, a global of Megatron's; from 0.18 on it may have a priority."""
    if getattr(config, "high_priority_a2a_comm_stream", False):
        utils.set_streams(high_priority=True)
    else:
        utils.set_streams()


def _call_then(function: Callable[..., Any], then: Callable[[], None], *args: Any) -> Any:
    result = function(*args)
    then()
    return result


def _call_behind(first: Callable[[], None], function: Callable[..., Any], *args: Any) -> Any:
    first()
    return function(*args)


def _then(function: Callable[..., Any], norm: torch.nn.Module) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        return norm(function(*args))

    return run


def _scales_of_fp8(config: Any) -> AbstractContextManager[Any]:
    """The context of 8-bit scales around a whole plan; only delayed scaling needs one."""
    if getattr(config, "fp8", None) and config.fp8_recipe == Fp8Recipe.delayed:
        return fp8_utils.get_fp8_context(config)
    return nullcontext()
