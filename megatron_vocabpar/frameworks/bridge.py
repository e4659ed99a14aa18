"""Megatron Bridge's configuration, read as Megatron's arguments, and what of it is refused.

Bridge has no command line: its ``ConfigContainer`` holds sections, whose fields have the names of Megatron's
arguments but for a few. So the same rules decide, on the container of a run (``Checks``) and on those of
its recipes (``docs/frameworks.md``). Read at Megatron Bridge v0.6.0. Standard library only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import wraps
from types import SimpleNamespace
from typing import Any

from megatron_vocabpar.frameworks.settings import judge, unread
from megatron_vocabpar.megatron_lm.bindings import Binding
from megatron_vocabpar.megatron_lm.flag_config import FlagConfig
from megatron_vocabpar.pipeline.rules.facts import plain
from megatron_vocabpar.pipeline.rules.rule import UNTESTED, Rule

UPDATE = Binding(
    "megatron.bridge.training.config",
    "runtime_config_update",
    ("megatron.bridge.training.pretrain",),
    "refuses what cannot be run, before process groups start",
)
PROVIDE = Binding(
    "megatron.bridge.models.model_provider",
    "ModelProviderMixin.provide_distributed_model",
    (),
    "refuses what cannot be run, before a model is made",
)
ADAPT = Binding("megatron.bridge.peft.utils", "create_peft_hook", (), "tells of an adapter")
_SECTIONS = (
    *("rng", "logger", "validation", "scheduler", "train", "rerun_state_machine", "dist", "checkpoint"),
    *("optimizer", "ddp", "model"),
)
"""Where two sections have a field of one name, the later one's value counts if it is set."""

_NAMES = {
    "num_moe_experts": "num_experts",
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "grad_reduce_in_fp32": "accumulate_allreduce_grads_in_fp32",
    "average_in_collective": "ddp_average_in_collective",
    "bucket_size": "ddp_bucket_size",
    "fp8_param": "fp8_param_gather",
    "fp4_param": "fp4_param_gather",
    "enable_megatron_core_experimental": "enable_experimental",
}
"""Fields of Bridge whose arguments have another name."""

_LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}

_FIELDS = """
    activation_func gated_linear_unit bias_activation_fusion init_method output_layer_init_method
    embedding_init_method transformer_layer_spec scatter_embedding_sequence_parallel parallel_output
    should_pad_vocab vocab_size seq_length persist_layer_norm num_moe_experts rotary_percent hf_model_id
    hf_model_revision mtp_enabled use_te_rng_tracker generation_config beta_fast beta_slow
    original_max_position_embeddings yarn_rotary_scaling_factor params_dtype
    share_embeddings_and_output_weights pipeline_dtype autocast_dtype fp8_dot_product_attention
    disable_parameter_transpose_cache hetereogenous_dist_checkpoint moe_a2a_overlap
    deallocate_pipeline_outputs batch_p2p_comm batch_p2p_sync cuda_graph_modules cuda_graph_scope
    rope_scaling yarn_mscale yarn_mscale_all_dim timers finalize_model_grads_func grad_scale_func
    no_sync_func grad_sync_func param_sync_func external_gpu_device_map perform_initialization
    variable_seq_lengths hybrid_stack_spec mamba_chunk_size keep_mtp_spec_in_bf16
"""
_READ = frozenset(_FIELDS.split())
"""Fields of the model, the optimizer and its buffers that no argument of Megatron has, and that were read."""


BRIDGE = (
    Rule(
        "model: a provider with a model of its own",
        lambda f: f.is_set("own_model"),
        "only the model that GPTModelProvider.provide or HybridModelProvider.provide builds is partitioned",
        "train without vocabulary parallelism",
    ),
    Rule(
        "model: HybridModelProvider with several model chunks",
        lambda f: f.pattern and (f.chunks > 1 or f.family == "interleaved"),
        "it builds one on each rank",
        "use 1f1b or zb-h1, and neither virtual stages nor further | in its pattern",
    ),
    Rule(
        "model: HybridModelProvider outside Bridge's own training",
        lambda f: f.pattern and not f.has("ckpt_format"),  # of a container's section
        "such a model has not been trained with verl",
        "train without vocabulary parallelism",
        UNTESTED,
    ),
    Rule(
        "peft other than LoRA",
        lambda f: f.is_set("peft") and f.settings.peft != "LoRA",
        "other adapters have not been read",
        "use LoRA, or train without vocabulary parallelism",
        UNTESTED,
    ),
    Rule(
        "peft",
        lambda f: f.is_set("peft") and f.splits_w,
        lambda f, _: f"{f.family_flag} splits off weight gradients, which frozen layers do not have",
        "use 1f1b or interleaved",
    ),
)
"""Rules about settings of Bridge that Megatron's arguments do not have."""


def as_arguments(container: Any) -> SimpleNamespace:
    """The values of a ``ConfigContainer`` by the names of Megatron's parsed arguments.

    Args:
        container: after Bridge's own ``runtime_config_update``; or ``model``, ``peft`` and other sections.

    Returns:
        Also ``peft``, the name of an adapter's class, and ``own_model``, that of a model provider which does
        not build a plain ``GPTModel`` or ``HybridModel``; both may be None.
    """
    values: dict[str, Any] = {}
    sections = [getattr(container, section, None) for section in _SECTIONS]
    for section in (getattr(container.model, "transformer", None), *sections):  # HybridModelConfig nests it
        for name, value in vars(section or SimpleNamespace()).items():
            name = _NAMES.get(name, name)
            if not name.startswith("_") and (value or name not in values):
                values[name] = plain(value)
    model = container.model
    values["pipeline_model_parallel_layout"] = _layout(getattr(model, "pipeline_model_parallel_layout", None))
    tied = getattr(model, "share_embeddings_and_output_weights", True)
    values["untie_embeddings_and_output_weights"] = not tied
    values["peft"] = None if container.peft is None else type(container.peft).__name__
    values["own_model"] = None if _is_plain(type(model)) else type(model).__name__
    return SimpleNamespace(**values)


def unread_in(container: Any) -> Iterator[str]:
    """Fields of the model, its buffers and the optimizer that a user changed and that have not been read."""
    own = () if _is_plain(type(container.model)) else ("model",)
    for section in {"optimizer", "ddp", "model"}.difference(own):
        config = getattr(container, section, None)
        for field in unread(config, dataclasses.fields(config), _READ, _NAMES) if config else ():
            yield f"{section}.{field}"


class Checks:
    """Checks a process's settings just before Bridge uses them.

    Bridge's own training has a container, which is checked on every rank before any process group exists.
    verl makes only a provider, which is checked before it makes a model, together with the adapter that verl
    created just before.
    """

    def __init__(self, config: FlagConfig) -> None:
        self._config = config
        self._checked: Any = None  # the model of a container
        self._adapter: Any = None  # for the next model

    def updating(self, original: Callable[..., None]) -> Callable[..., None]:
        """Bridge's ``runtime_config_update``, followed by the check of the container."""

        @wraps(original)
        def update(cfg: Any, *args: Any, **kwargs: Any) -> None:
            original(cfg, *args, **kwargs)
            self._check(cfg)
            self._checked = cfg.model

        return update

    def adapting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Bridge's ``create_peft_hook``, which also keeps its adapter for the check of the next model."""

        @wraps(original)
        def create(peft: Any, *args: Any, **kwargs: Any) -> Any:
            self._adapter = peft
            return original(peft, *args, **kwargs)

        return create

    def providing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A provider's ``provide_distributed_model``, preceded by a check of its settings.

        A provider whose container has been checked is not checked again.
        """

        @wraps(original)
        def provide(provider: Any, ddp_config: Any = None, *args: Any, **kwargs: Any) -> Any:
            adapter, self._adapter = self._adapter, None
            if provider is not self._checked:
                self._check(SimpleNamespace(model=provider, ddp=ddp_config, peft=adapter))
            return original(provider, ddp_config, *args, **kwargs)

        return provide

    def _check(self, container: Any) -> None:
        judge(as_arguments(container), self._config, unread_in(container), BRIDGE)


def _is_plain(provider: type) -> bool:
    """Whether a provider's ``provide`` is that of ``GPTModelProvider`` or ``HybridModelProvider``."""
    owner = next((base for base in provider.__mro__ if "provide" in vars(base)), None)
    return owner is not None and owner.__name__ in ("GPTModelProvider", "HybridModelProvider")


def _layout(value: Any) -> str | None:
    """``Et|tL`` of a text, of rows such as ``[["embedding", "decoder"], …]``, or of Megatron's object."""
    value = getattr(value, "input_data", value)
    if not isinstance(value, list):
        return value
    return "|".join("".join(_LETTERS[plain(layer)] for layer in row) for row in value)
