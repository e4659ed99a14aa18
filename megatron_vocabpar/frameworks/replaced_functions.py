"""Which names of the frameworks are replaced: copies of Megatron's, and functions that take logits.

Read at verl v0.7.0 to v0.9.1, slime v0.3.1 and Megatron Bridge v0.6.0. What may change with a release, and
what says so:

    verl    FUNCTIONS, LABELS, REFUSED here, labels.py     an error before the first model
    slime   the same, the slime row of parameter_walks.py  the same
    all     SAVED here                                     an error when state by bucket is saved
    Bridge  WALKS of parameter_walks.py                    Bridge's error when it loads weights
            names and fields at the top of bridge.py       a warning for each field

Next: ``install.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron_vocabpar.frameworks.handle import LogitsError, LogitsHandle
from megatron_vocabpar.frameworks.labels import slime_labels, verl_forward
from megatron_vocabpar.megatron_lm.bindings import BINDINGS, Binding
from megatron_vocabpar.pipeline.model.stage_model import PartitionedModel

_COPIES = {
    "get_forward_backward_func": (
        "verl.workers.engine.megatron.transformer_impl",
        "verl.workers.actor.megatron_actor",
        "slime.backends.megatron_utils.model",
        "megatron.bridge.training.train",
        "megatron.bridge.training.eval",
        "swift.megatron.trainers.base",
    ),
    "GPTModel": (
        "slime.backends.megatron_utils.model",
        "slime.backends.megatron_utils.model_provider",
        "verl.models.mcore.model_initializer",
        "mbridge.core.llm_bridge",
        "megatron.bridge.models.gpt_provider:MCoreGPTModel",
        "megatron.bridge.training.mlm_compat.model",
    ),
    "HybridModel": (
        "megatron.bridge.models.hybrid.hybrid_provider:MCoreHybridModel",
        "megatron.bridge.training.mlm_compat.model",
    ),
    "convert_schedule_table_to_order": (),
    "get_overlap_moe_expert_parallel_comm_order": (),
    "DistributedOptimizer.sharded_state_dict": (),
}

MEGATRON = tuple(
    replace(binding, copies=(*binding.copies, *_COPIES[binding.name]))
    for binding in BINDINGS
    if binding.name in _COPIES
)
"""Megatron's names, with all modules that take them by value."""

_VERL = "verl.utils.megatron.tensor_parallel"
_VERL_COPIES = ("verl.workers.engine.megatron.transformer_impl", "verl.workers.actor.megatron_actor")
_REASON = "answers for a handle; logits go to the framework's own"

FUNCTIONS = (
    Binding(_VERL, "vocab_parallel_log_probs_from_logits", _VERL_COPIES, _REASON),
    Binding(_VERL, "vocab_parallel_entropy", _VERL_COPIES, _REASON),
    Binding(_VERL, "vocab_parallel_entropy_with_chunking", _VERL_COPIES[:1], _REASON),  # from v0.9
    Binding(
        "slime.utils.ppo_utils",
        "calculate_log_probs_and_entropy",
        ("slime.backends.megatron_utils.loss",),
        _REASON,
    ),
)
"""Functions of frameworks whose first argument is the model's output."""

_READ = "tokens that a framework never reads take no part"

LABELS: dict[Binding, Callable[..., Any]] = {
    Binding(
        "verl.models.mcore.registry", "get_mcore_forward_no_padding_fn", ("verl.models.mcore",), _READ
    ): verl_forward,
    # Its name from v0.8 on.
    Binding(
        "verl.models.mcore.registry", "get_mcore_engine_forward_fn", ("verl.models.mcore",), _READ
    ): verl_forward,
    Binding("slime.backends.megatron_utils.loss", "_build_shifted_tokens", (), _READ): slime_labels,
}
"""Functions of frameworks that make labels, and what makes our functions of them."""


_BUILDER = "_build_sharded_state_dict_metadata"
_SAVES = "names the kind of an optimizer's state; here also whose buckets hold it, if it is by bucket"

SAVED = (
    Binding("megatron.training.checkpointing", _BUILDER, (), _SAVES),  # for slime
    Binding("megatron.bridge.training.checkpointing", _BUILDER, (), _SAVES),
    Binding(
        "verl.utils.checkpoint.megatron_checkpoint_manager",
        f"MegatronCheckpointManager.{_BUILDER}",  # from v0.8 on; before, no state is by bucket
        (),
        _SAVES,
    ),
    Binding("swift.megatron.utils.megatron_lm_utils", "get_sharded_sd_metadata", (), _SAVES),
)
"""Functions that make the metadata of a checkpoint to save."""

_NO_PATCH = "gives the model another forward or loss"

REFUSED: dict[Binding, str] = {
    Binding("verl.models.mcore.model_forward_fused", "patch_fused_forward", (), _NO_PATCH): (
        "use_fused_kernels: vocabulary parallelism has its own output layer; set use_fused_kernels=False"
    ),
    Binding("verl.models.mcore.mtp_patch", "patch_postprocess", (), _NO_PATCH): (
        "multi-token prediction in verl: its loss is computed from logits; set mtp.enable=False, or train "
        "without vocabulary parallelism"
    ),
    Binding(
        "verl.workers.engine.megatron.delta_export",
        "build_export_index",
        (),
        "sends the rows of a rank as stock's layers",
    ): (
        "delta_sharded in verl: it sends each rank's own changes, and takes our rows for whole layers; set "
        "actor_rollout_ref.rollout.checkpoint_engine.backend to another one"
    ),
}
"""Functions of frameworks that change a model or read its shards, and why they may not have ours."""


def refusing(binding: Binding, original: Callable[..., Any]) -> Callable[..., Any]:
    """``original`` for models whose vocabulary is not partitioned."""

    @wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        for given in (*args, *kwargs.values()):
            chunk = given[0] if isinstance(given, list) and given else given
            if isinstance(unwrap_model(chunk), PartitionedModel):
                raise ValueError(REFUSED[binding])
        return original(*args, **kwargs)

    return function


def answering(binding: Binding, original: Callable[..., Any]) -> Callable[..., Any]:
    """``original`` for logits, our answer for a handle."""
    answer = _ANSWERS[binding.name]

    @wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        logits = args[0] if args else next(iter(kwargs.values()))
        return (answer if isinstance(logits, LogitsHandle) else original)(*args, **kwargs)

    return function


def _verl_log_probs(logits: LogitsHandle, labels: Tensor) -> Tensor:
    return logits.logprobs(labels)


def _verl_entropy(vocab_parallel_logits: LogitsHandle, chunk_size: int | None = None) -> Tensor:
    return vocab_parallel_logits.entropy()


def _slime_log_probs_and_entropy(
    logits: LogitsHandle,
    tokens: Tensor,
    tp_group: Any,
    with_entropy: bool = False,
    chunk_size: int = -1,
    log_prob_keep_mask: Tensor | None = None,
    with_entropy_grad: bool = True,
) -> tuple[Tensor, Tensor | None]:
    if log_prob_keep_mask is not None:
        raise LogitsError("log-probabilities of the kept ids alone (use --rollout-top-p 1)")
    entropy = logits.entropy(gradient=with_entropy_grad) if with_entropy else None
    return logits.logprobs(tokens).unsqueeze(-1), entropy


_ANSWERS: dict[str, Callable[..., Any]] = {
    "vocab_parallel_log_probs_from_logits": _verl_log_probs,
    "vocab_parallel_entropy": _verl_entropy,
    "vocab_parallel_entropy_with_chunking": _verl_entropy,
    "calculate_log_probs_and_entropy": _slime_log_probs_and_entropy,
}
