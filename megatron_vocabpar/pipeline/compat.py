"""The pieces of megatron-core's schedules that our handlers reuse, with one signature for all versions.

Loss scaling, MoE and autocast settings, timers and activation recomputation stay Megatron's own code; only
the order of passes and the vocabulary layers are ours. Versions are told apart by signatures (the table in
``megatron_lm/bindings.py``), never by version strings.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import parallel_state, process_groups_config
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.pipeline_parallel import schedules
from megatron.core.rerun_state_machine import RerunStateMachine
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.utils import make_viewless_tensor

from megatron_vocabpar.layers.terms import LossTerms
from megatron_vocabpar.pipeline.call import Call
from megatron_vocabpar.pipeline.options import METRICS

_BACKWARD_PARAMETERS = tuple(inspect.signature(schedules.backward_step).parameters)
_GROUPS: Any = getattr(process_groups_config, "ProcessGroupCollection", None) or getattr(
    process_groups_config, "ModelCommProcessGroups", SimpleNamespace
)
GROUPS_ARGUMENT = list(inspect.signature(LanguageModule).parameters)[1]
"""The argument by which a model takes its process groups: ``pg_collection``; in 0.14 ``model_comm_pgs``."""

COUNTS_LAYERS_BY_GROUP = "pp_rank" in inspect.signature(get_transformer_layer_offset).parameters
"""Whether megatron-core counts the layers of a chunk from its process groups; 0.14 asks global state."""

_CASTS_IF_ASKED = "fp32_output" in inspect.signature(Float16Module.forward).parameters
_FINALIZE_PARAMETERS = tuple(inspect.signature(finalize_model_grads).parameters)


def backward_step(
    input_tensor: torch.Tensor | None,
    output_tensor: torch.Tensor,
    output_grad: torch.Tensor | None,
    config: Any,
) -> torch.Tensor | None:
    """One stage's backward as in Megatron; returns the gradient of its input.

    The gradient is zero if the output has no graph, such as a loss that is a constant.
    """
    model_type = [ModelType.encoder_or_decoder] if "model_type" in _BACKWARD_PARAMETERS else []
    grad = schedules.backward_step([input_tensor], [output_tensor], [output_grad], *model_type, config)[0]
    return torch.zeros_like(input_tensor) if grad is None and input_tensor is not None else grad


def released(output_tensor: torch.Tensor, config: Any) -> torch.Tensor:
    """Free the storage of an output that the next stage has; its graph stays.

    Megatron does not free views, and the losses of a microbatch of one sequence are one.
    """
    output = make_viewless_tensor(output_tensor, requires_grad=True, keep_graph=True)
    schedules.deallocate_output_tensor(output, config.deallocate_pipeline_outputs)
    return output


def in_half_precision(model: Any) -> dict[str, bool]:
    """The argument by which a wrapped model keeps a last stage's output in 16 bits, where there is one."""
    while hasattr(model, "module"):
        if isinstance(model, Float16Module):
            return {"fp32_output": False} if _CASTS_IF_ASKED else {}
        model = model.module
    return {}


def loss_and_gradient(
    call: Call,
    *,
    token_losses: torch.Tensor,
    values: Mapping[str, torch.Tensor],
    main_loss: Callable[[torch.Tensor], torch.Tensor],
    loss_func: Callable[..., Any],
    collect_non_loss_data: bool = False,
) -> tuple[list[Any], torch.Tensor, torch.Tensor | None, dict[str, torch.Tensor]]:
    """Megatron's loss scaling around ``loss_func``, and the gradient that it gives every token.

    Args:
        call: the loss is that of its last chunk, and has a gradient unless the call is forward-only.
        token_losses: ``[1 + D, b, s]`` float32, of all heads.
        values: further arguments of ``loss_func``, ``[b, s]`` float32, of the first head.
        main_loss: from ``token_losses`` to the losses ``[b, s]`` for ``loss_func`` (``heads.py``).

    Returns:
        What ``loss_func`` reported, the number of tokens, and gradients, loss scale included: of
        ``token_losses``, ``[1 + D, b, s]`` float32, and by name of the values that have one and on which the
        loss depends, ``[b, s]``. A forward-only call has none (None). The first is zero for a loss without a
        graph, such as a constant, as in Megatron's own backward.
    """
    config, with_gradient = call.config, not call.forward_only
    store: list[Any] = []
    leaf = token_losses.detach().requires_grad_(with_gradient)
    values = {name: value.detach().clone() for name, value in values.items()}
    names = [name for name in values if name in METRICS and METRICS[name].has_gradient]
    leaves = [leaf, *(values[name].requires_grad_(with_gradient) for name in names)]
    loss_func = partial(loss_func, **values)
    if config.timers is not None:
        config.timers("forward-compute", log_level=2).start()
    with torch.set_grad_enabled(with_gradient):
        # Megatron divides the loss in place, so it must be neither a leaf nor the softmax's own.
        loss, num_tokens = schedules.forward_step_calc_loss(
            call.chunks[-1],
            main_loss(leaf.clone()),
            loss_func,
            config,
            None,
            collect_non_loss_data,
            call.num_microbatches,
            store,
            call.cp_group_size,
            True,
        )
        if not with_gradient:
            return store, num_tokens, None, {}
        if config.grad_scale_func is not None:
            loss = config.grad_scale_func(loss)
    if not loss.requires_grad:
        return store, num_tokens, torch.zeros_like(leaf), {}
    grad, *more = torch.autograd.grad(loss, leaves, allow_unused=len(leaves) > 1)
    of_values = {name: slope for name, slope in zip(names, more, strict=True) if slope is not None}
    return store, num_tokens, torch.zeros_like(leaf) if grad is None else grad, of_values


@contextmanager
def unvalidated() -> Iterator[None]:
    """In this context Megatron's validation of losses does nothing.

    The loss function of ``pretrain_gpt.py`` has its loss checked for NaN, for which the host waits. A second
    call, on values of our own, must not wait too.
    """
    validate = RerunStateMachine.validate_result
    RerunStateMachine.validate_result = lambda *_, **__: None
    try:
        yield
    finally:
        RerunStateMachine.validate_result = validate


def report_gradient(chunk: Any, parameter: torch.nn.Parameter) -> None:
    """Tell an overlapping DDP ``chunk`` that the gradient of one of its parameters is complete."""
    bucket_groups = getattr(chunk, "param_to_bucket_group", {})
    if parameter in bucket_groups and chunk.ddp_config.overlap_grad_reduce:
        forced = [chunk.force_all_reduce] if hasattr(chunk, "force_all_reduce") else []
        bucket_groups[parameter].register_grad_ready(parameter, *forced)


@contextmanager
def without_hooks(chunk: Any, parameters: Iterable[torch.nn.Parameter]) -> Iterator[None]:
    """In this context the hooks of a DDP ``chunk`` find no bucket for these parameters, and skip them."""
    buckets = getattr(chunk, "param_to_bucket_group", None)
    if buckets is None:
        yield
        return
    hidden = set(parameters)
    chunk.param_to_bucket_group = {p: bucket for p, bucket in buckets.items() if p not in hidden}
    try:
        yield
    finally:
        chunk.param_to_bucket_group = buckets


def call_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a forward-backward call, without what only older Megatron versions pass."""
    return {name: value for name, value in arguments.items() if name != "grad_finalize_pgs"}


def process_groups() -> Any:
    """megatron-core's default process groups, as its own schedules collect them."""
    groups = getattr(process_groups_config, "ProcessGroupCollection", SimpleNamespace)()
    groups.tp = parallel_state.get_tensor_model_parallel_group()
    groups.pp = parallel_state.get_pipeline_model_parallel_group()
    groups.embd = parallel_state.get_embedding_group(check_initialized=False)
    groups.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    groups.cp = parallel_state.get_context_parallel_group()
    groups.dp_cp = parallel_state.get_data_parallel_group(
        with_context_parallel=True, partial_data_parallel=False
    )
    # From 0.18 on, routers count tokens over this group for their biases.
    groups.tp_dp_cp = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    return groups


def finalize_gradients(
    config: Any,
    chunks: Sequence[torch.nn.Module],
    num_tokens: torch.Tensor | None,
    pg_collection: Any,
    force_all_reduce: bool | None,
) -> None:
    """Call ``config.finalize_model_grads_func`` with the arguments that this version takes."""
    options = {"pg_collection": pg_collection, "force_all_reduce": force_all_reduce}
    accepted = {name: value for name, value in options.items() if name in _FINALIZE_PARAMETERS}
    config.finalize_model_grads_func(chunks, num_tokens, **accepted)


def tensor_parallel_group(model: Any) -> Any:
    """The tensor-parallel group that a model was built with."""
    return getattr(model, GROUPS_ARGUMENT).tp


def model_groups() -> Any:
    """The process groups that a model takes, from megatron-core's parallel state."""
    return _GROUPS.use_mpu_process_groups()


def uses_mup(config: Any) -> bool:
    """Whether the model is parametrised by muP (``use_mup``, from 0.17)."""
    return getattr(config, "use_mup", False)


def with_mup_scale(terms: LossTerms, config: Any) -> LossTerms:
    """The terms with muP's factor of the logits, which stock applies after its output layer."""
    if not uses_mup(config):
        return terms
    return replace(terms, logit_scale=terms.logit_scale * config.mup_output_mult)
