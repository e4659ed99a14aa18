"""Every name of Megatron that is replaced: where it is, which modules have a copy of it, and why.

Versions are recognised by signatures, since tags and wheels disagree on version strings. ``SIGNATURES`` has
the parameters of the functions that we replace or call, from each version on that changed them. Standard
library only. Next: ``patch.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

from megatron_vocabpar.megatron_lm.flag_config import FlagConfig

VERSIONS = ("0.14", "0.15", "0.16", "0.17", "0.18", "0.19", "main")
"""Versions of megatron-core, oldest first; ``main`` is the development branch after the last.

The functions of ``SIGNATURES`` have been read in each. One that is not here runs with a warning. To add
it, put its name before ``main``, and give each function whose parameters are new a row from it on.
"""

Parameters = tuple[str, ...]


def versions(since: str, until: str = VERSIONS[-1]) -> tuple[str, ...]:
    """The known versions from ``since`` to ``until``, both included."""
    return VERSIONS[VERSIONS.index(since) : VERSIONS.index(until) + 1]


@dataclass(frozen=True, slots=True)
class Binding:
    """A replaced name.

    Attributes:
        module, name: where it is defined; ``class.name`` for a method.
        copies: modules that take it by value (``from ... import``); ``module:name`` if they rename it.
        reason: why it is replaced.
        when: which flags need the replacement.
        since, until: the first and the last version that have the name.
    """

    module: str
    name: str
    copies: tuple[str, ...]
    reason: str
    when: Literal["any of our flags", "a schedule of ours", "a V placement"] = "a schedule of ours"
    since: str = VERSIONS[0]
    until: str = VERSIONS[-1]

    @property
    def places(self) -> tuple[tuple[str, str], ...]:
        """Modules, and the name that each has for it."""
        pairs = (copy.partition(":") for copy in (self.module, *self.copies))
        return tuple((module, alias or self.name) for module, _, alias in pairs)

    def is_in(self, version: str) -> bool:
        """Whether a version has this name; an unknown version counts as the newest."""
        return (
            version in versions(self.since, self.until) if version in VERSIONS else self.until == VERSIONS[-1]
        )

    def is_needed(self, config: FlagConfig) -> bool:
        """Whether these flags need the replacement."""
        if self.when == "a V placement":
            return config.is_placed
        return self.when == "any of our flags" or config.runs_our_schedule


_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_CUDA_GRAPHS = "megatron.core.transformer.cuda_graphs"
_GPT_MODEL = "megatron.core.models.gpt.gpt_model"
_LAYER_SPECS = "megatron.core.models.gpt.gpt_layer_specs"
_HYBRID = "megatron.core.models.hybrid.hybrid_model"
_HYBRID_LAYERS = "megatron.core.models.hybrid.hybrid_layer_allocation"
MODELS = {
    "megatron.core.models.gpt.": (_GPT_MODEL, "GPTModel.__init__"),
    "megatron.core.models.hybrid.": (_HYBRID, "HybridModel.__init__"),
}
"""Packages of a model class each, and the class. A Megatron needs one of them, whichever it is."""


def of_a_model(module: str) -> bool:
    """Whether a Megatron with another model class can do without this module."""
    return module.startswith(tuple(MODELS))


_PARALLEL_STATE = "megatron.core.parallel_state"
_ARGUMENTS = "megatron.training.arguments"
_TRAINING = "megatron.training.training"
_CHECKPOINTING = "megatron.training.checkpointing"
_DISTRIBUTED_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer"

BINDINGS = (
    Binding(
        _SCHEDULES,
        "get_forward_backward_func",
        (
            "megatron.core.pipeline_parallel",
            "megatron.training.training",
            "megatron.rl.rl_utils",
            "megatron.post_training.generate",
        ),
        "runs our schedules; megatron-core has no hook for another schedule (`patches/upstream` has one)",
    ),
    Binding(
        _CUDA_GRAPHS,
        "convert_schedule_table_to_order",
        (),
        "gives Transformer Engine, which captures layers, the order of Megatron's schedule; here ours",
        since="0.16",
    ),
    Binding(
        _CUDA_GRAPHS,
        "get_overlap_moe_expert_parallel_comm_order",
        (),
        "makes of it the order of layers where F and B run together; expects them in turns",
        since="0.16",
    ),
    Binding(
        _GPT_MODEL,
        "GPTModel",
        (
            "megatron.core.models.gpt",
            "megatron.training.models.gpt",
            "megatron.post_training.loss_func",
            "megatron.rl.inference.megatron",
            "gpt_builders",
            "model_provider",
            "__main__",
        ),
        "a subclass whose stages hold their rows of both vocabulary layers, and stand where the schedule "
        "places them",
    ),
    Binding(
        _LAYER_SPECS,
        "get_gpt_decoder_block_spec",
        ("megatron.training.models.gpt", "gpt_builders", "__main__"),
        "asks megatron-core's global state for the pipeline rank, to know which layers have experts",
        when="a V placement",
    ),
    Binding(
        _LAYER_SPECS,
        "get_gpt_mtp_block_spec",
        ("megatron.training.models.gpt", "gpt_builders", "__main__"),
        "likewise, to know whether it has the layers of multi-token prediction",
        when="a V placement",
    ),
    Binding(
        "megatron.core.models.gpt.experimental_attention_variant_module_specs",
        "get_transformer_block_with_experimental_attention_variant_spec",
        ("megatron.training.models.gpt", "gpt_builders", "__main__"),
        "likewise, to know which layers have another attention or experts",
        when="a V placement",
        since="0.16",
    ),
    Binding(
        _HYBRID,
        "HybridModel",
        (
            "megatron.core.models.mamba",
            "megatron.core.models.mamba.mamba_model",
            "megatron.training.models.hybrid",
            "hybrid_builders",
            "model_provider",
            "__main__",
        ),
        "as GPTModel",
        since="0.18",
    ),
    Binding(
        _HYBRID_LAYERS,
        "select_pipeline_segment",
        (),
        "takes the layers of a pipeline rank; here those of the stage that is built",
        when="a V placement",
        since="0.18",
    ),
    Binding(
        "megatron.core.models.mamba.mamba_model",
        "MambaModel",
        ("megatron.core.models.mamba", "mamba_builders", "model_provider", "__main__"),
        "as GPTModel; later a subclass of HybridModel",
        until="0.17",
    ),
    Binding(
        "megatron.core.distributed.distributed_data_parallel",
        "DistributedDataParallel.__init__",
        (),
        "has buckets of gradients on the first pipeline rank alone; with W split off all ranks need them",
    ),
    Binding(
        _CHECKPOINTING,
        "_build_sharded_state_dict_metadata",
        (),
        "names the kind of an optimizer's state; here also whose buckets hold it, if it is by bucket",
    ),
    Binding(
        _DISTRIBUTED_OPTIMIZER,
        "DistributedOptimizer.sharded_state_dict",
        (),
        "reads that name; here refuses state of other buckets",
    ),
    Binding(
        "megatron.core.optimizer.optimizer",
        "ChainedOptimizer.sharded_state_dict",
        (),
        "likewise; later it asks whether the state is by bucket",
        until="0.14",
    ),
    Binding(
        _TRAINING,
        "training_log",
        (),
        "reports zeros in gradients, among them those of the rows that pad our shards, and acceptance rates, "
        "counted or not; here without these",
    ),
    Binding(
        _ARGUMENTS,
        "parse_args",
        ("megatron.training.initialize",),
        "adds our flags after the script's own extra_args_provider",
        when="any of our flags",
    ),
    Binding(
        _ARGUMENTS,
        "validate_args",
        ("megatron.training.initialize",),
        "checks all flags together before process groups start, and places redistributed layers",
        when="any of our flags",
    ),
)


def _names(text: str) -> Parameters:
    return tuple(text.split())


_FORWARD = (
    "self input_ids position_ids attention_mask decoder_input labels inference_context packed_seq_params "
    "extra_block_kwargs runtime_gather_output inference_params loss_mask"
)
_MODEL = (
    "self config transformer_layer_spec vocab_size max_sequence_length pre_process post_process "
    "fp16_lm_cross_entropy {}parallel_output share_embeddings_and_output_weights position_embedding_type "
    "rotary_percent rotary_base rope_scaling rope_scaling_factor scatter_embedding_sequence_parallel "
    "seq_len_interpolation_factor mtp_block_spec {} vp_stage"
)
_HYBRID_MODEL = (
    "self config hybrid_stack_spec vocab_size max_sequence_length hybrid_layer_pattern "
    "hybrid_attention_ratio hybrid_mlp_ratio hybrid_override_pattern pre_process post_process "
    "fp16_lm_cross_entropy {}parallel_output share_embeddings_and_output_weights position_embedding_type "
    "rotary_percent rotary_base scatter_embedding_sequence_parallel seq_len_interpolation_factor "
    "pg_collection vp_stage"
)
_HYBRID_FORWARD = (
    "self input_ids position_ids attention_mask decoder_input labels inference_context runtime_gather_output "
    "inference_params loss_mask packed_seq_params padding_mask"
)
_SEGMENT = "main_pattern pp_group vp_stage first_stage_layers last_stage_layers"
_BACKWARD = "input_tensor output_tensor output_tensor_grad"

SIGNATURES: Mapping[tuple[str, str], Mapping[str, Parameters]] = {
    (_SCHEDULES, "get_forward_backward_func"): {
        "0.14": (),
        "0.16": _names("pp_size vp_size"),
        "0.19": _names("pp_size vp_size schedule_pg_collection"),
    },
    (_SCHEDULES, "forward_step"): {
        "0.14": _names(
            "forward_step_func data_iterator model num_microbatches input_tensor forward_data_store config "
            "cp_group_size collect_non_loss_data checkpoint_activations_microbatch is_first_microbatch "
            "current_microbatch vp_stage is_last_stage"
        ),
    },
    (_SCHEDULES, "forward_step_calc_loss"): {
        "0.14": _names(
            "model output_tensor loss_func config vp_stage collect_non_loss_data num_microbatches "
            "forward_data_store cp_group_size is_last_stage"
        ),
    },
    (_SCHEDULES, "backward_step"): {
        "0.14": _names(f"{_BACKWARD} model_type config pipeline_model_parallel_size"),
        "0.15": _names(f"{_BACKWARD} model_type config"),
        "0.17": _names(f"{_BACKWARD} config"),
    },
    (_SCHEDULES, "deallocate_output_tensor"): {"0.14": _names("out deallocate_pipeline_outputs")},
    ("megatron.core.distributed.finalize_model_grads", "finalize_model_grads"): {
        "0.14": _names("model num_tokens grad_finalize_pgs"),
        "0.15": _names("model num_tokens pg_collection"),
        "0.16": _names("model num_tokens pg_collection force_all_reduce"),
    },
    (_GPT_MODEL, "GPTModel.__init__"): {
        "0.14": _names(_MODEL.format("", "model_comm_pgs")),
        "0.15": _names(_MODEL.format("", "pg_collection")),
        "main": _names(_MODEL.format("logit_dtype ", "pg_collection")),
    },
    (_GPT_MODEL, "GPTModel.forward"): {
        "0.14": _names(_FORWARD),
        "0.16": _names(f"{_FORWARD} padding_mask"),
        "0.17": _names(f"{_FORWARD} padding_mask is_spec_decode"),
        "0.18": _names(f"{_FORWARD} padding_mask output_processor output_processor_context"),
    },
    (_HYBRID, "HybridModel.__init__"): {
        "0.18": _names(_HYBRID_MODEL.format("")),
        "main": _names(_HYBRID_MODEL.format("logit_dtype ")),
    },
    (_HYBRID, "HybridModel.forward"): {
        "0.18": _names(_HYBRID_FORWARD),
        "main": _names(f"{_HYBRID_FORWARD} compute_mtp_loss"),
    },
    (_HYBRID_LAYERS, "select_pipeline_segment"): {
        "0.18": _names(_SEGMENT),
        "0.19": _names(f"{_SEGMENT} tp_group dp_cp_group"),
    },
    (_LAYER_SPECS, "get_gpt_decoder_block_spec"): {
        "0.14": _names("config use_transformer_engine normalization qk_l2_norm vp_stage"),
        "0.15": _names("config use_transformer_engine normalization qk_l2_norm vp_stage pp_rank"),
    },
    (_DISTRIBUTED_OPTIMIZER, "DistributedOptimizer.sharded_state_dict"): {
        "0.14": _names("self model_sharded_state_dict is_loading sharding_type metadata"),
    },
    (_CHECKPOINTING, "_build_sharded_state_dict_metadata"): {
        "0.14": ("args",),
        "0.16": _names("args dp_cp_group"),
    },
    (_PARALLEL_STATE, "set_pipeline_model_parallel_rank"): {"0.14": ("rank",)},
    (_ARGUMENTS, "parse_args"): {"0.14": _names("extra_args_provider ignore_unknown_args")},
    (_ARGUMENTS, "validate_args"): {"0.14": _names("args defaults")},
}
"""By module and name: parameters, by the first version that has them."""

NEEDED: Mapping[tuple[str, str], Parameters] = {
    key: tuple(sorted(set.intersection(*(set(parameters) for parameters in rows.values()))))
    for key, rows in SIGNATURES.items()
}
"""The parameters that all known versions share, which an unknown version must have, too."""


def versions_with(key: tuple[str, str], parameters: Parameters) -> tuple[str, ...]:
    """The versions in which a function has these parameters."""
    starts = [*SIGNATURES[key], None]
    found: tuple[str, ...] = ()
    for since, after in pairwise(starts):
        assert since is not None
        if SIGNATURES[key][since] == parameters:
            found += versions(since) if after is None else versions(since, after)[:-1]
    return found


class DetectedMegatron(NamedTuple):
    """A Megatron: its version, and a sentence on what has not been read of it, empty without."""

    version: str
    unread: str = ""


def recognise(
    signature_of: Callable[[str, str], Parameters | None], package: str = "megatron"
) -> DetectedMegatron:
    """Which version of Megatron has these signatures.

    Args:
        signature_of: from module and name to parameter names; None if the name is missing. Names of a model
            class may be, if another one is there.
        package: whose names are looked at; the wheels of megatron-core have ``megatron.core`` alone.

    Returns:
        The newest version whose row all signatures match, or ``unknown``.

    Raises:
        ValueError: naming every name, or parameter of it, that every version we know has and this one lacks.
    """
    signatures = {key: signature_of(*key) for key in SIGNATURES if key[0].startswith(package)}
    gone = tuple(part for part, key in MODELS.items() if signatures[key] is None)
    if len(gone) < len(MODELS):
        signatures = {key: found for key, found in signatures.items() if not key[0].startswith(gone)}
    lacking = [
        f"{'.'.join(key)} lacks {', '.join(sorted(set(NEEDED[key]) - set(signature)))}"
        if signature is not None
        else f"it has no {'.'.join(key)}"
        for key, signature in signatures.items()
        if signature is None or not set(NEEDED[key]) <= set(signature)
    ]
    if lacking:
        raise ValueError(
            f"this version of Megatron cannot be used: {'; '.join(lacking)}; use one of {', '.join(VERSIONS)}"
        )
    matching = {
        key: versions_with(key, signature) for key, signature in signatures.items() if signature is not None
    }
    if common := set(VERSIONS).intersection(*matching.values()):
        return DetectedMegatron(max(common, key=VERSIONS.index))
    changed = [_news(key, signatures[key] or ()) for key, rows in matching.items() if not rows]
    what = "; ".join(changed) or "signatures of several versions beside each other"
    return DetectedMegatron(
        "unknown",
        f"this version of Megatron: {what}, which has not been read; use one of {', '.join(VERSIONS)}",
    )


def _news(key: tuple[str, str], signature: Parameters) -> str:
    """Names a changed function and its new parameters, or all of them if only their order is new."""
    read = {parameter for parameters in SIGNATURES[key].values() for parameter in parameters}
    new = [parameter for parameter in signature if parameter not in read]
    return f"{'.'.join(key)} with {', '.join(new or signature)}"
