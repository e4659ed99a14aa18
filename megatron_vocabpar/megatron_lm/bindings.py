"""Every name of Megatron that is replaced: where it is, which modules have a copy of it, and why.

Versions are recognised by signatures, since tags and wheels disagree on version strings. ``SIGNATURES`` has
the parameters, in each version, of the functions that we replace or call; a signature in no row stops the
run. Standard library only. Next: ``patch.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from megatron_vocabpar.megatron_lm.flag_config import FlagConfig

VERSIONS = ("0.14", "0.15", "0.16", "0.17", "0.18", "0.19", "main")
"""Versions of megatron-core, oldest first; ``main`` is the development branch after 0.19.

``SIGNATURES`` lists them one by one: a row claims a version only once somebody has read the function.
"""

Parameters = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Binding:
    """A replaced name.

    Attributes:
        module, name: where it is defined; ``class.name`` for a method.
        copies: modules that take it by value (``from ... import``); ``module:name`` if they rename it.
        reason: why it is replaced.
        when: which flags need the replacement.
        versions: those that have the name; a version that is not in the table counts as the newest.
    """

    module: str
    name: str
    copies: tuple[str, ...]
    reason: str
    when: Literal["any of our options", "a schedule of ours", "a V placement"] = "a schedule of ours"
    versions: tuple[str, ...] = VERSIONS

    @property
    def places(self) -> tuple[tuple[str, str], ...]:
        """Modules, and the name that each has for it."""
        pairs = (copy.partition(":") for copy in (self.module, *self.copies))
        return tuple((module, alias or self.name) for module, _, alias in pairs)

    def is_in(self, version: str) -> bool:
        return (version if version in VERSIONS else VERSIONS[-1]) in self.versions

    def is_needed(self, config: FlagConfig) -> bool:
        """Whether these flags need the replacement."""
        if self.when == "a V placement":
            return config.is_placed
        return self.when == "any of our options" or config.runs_our_schedule


_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_CUDA_GRAPHS = "megatron.core.transformer.cuda_graphs"
_GPT_MODEL = "megatron.core.models.gpt.gpt_model"
_HYBRID = "megatron.core.models.hybrid"
_LAYER_SPECS = "megatron.core.models.gpt.gpt_layer_specs"
_PARALLEL_STATE = "megatron.core.parallel_state"
_ARGUMENTS = "megatron.training.arguments"
_TRAINING = "megatron.training.training"
_CACHED_LOGITS = "megatron.training.distillation.cached_logits_loss"

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
        versions=("0.16", "0.17", "0.18", "0.19", "main"),
    ),
    Binding(
        _CUDA_GRAPHS,
        "get_overlap_moe_expert_parallel_comm_order",
        (),
        "makes of it the order of layers where F and B run together; expects them in turns",
        versions=("0.16", "0.17", "0.18", "0.19", "main"),
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
        versions=("0.16", "0.17", "0.18", "0.19", "main"),
    ),
    Binding(
        f"{_HYBRID}.hybrid_model",
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
        versions=("0.18", "0.19", "main"),
    ),
    Binding(
        f"{_HYBRID}.hybrid_layer_allocation",
        "select_pipeline_segment",
        (),
        "takes the layers of a pipeline rank; here those of the stage that is built",
        when="a V placement",
        versions=("0.18", "0.19", "main"),
    ),
    Binding(
        "megatron.core.models.mamba.mamba_model",
        "MambaModel",
        ("megatron.core.models.mamba", "mamba_builders", "model_provider", "__main__"),
        "as GPTModel; later a subclass of HybridModel",
        versions=("0.14", "0.15", "0.16", "0.17"),
    ),
    Binding(
        _CACHED_LOGITS,
        "StudentLogitsCapture.attach_hooks",
        (),
        "hooks the output layer for logits, which no rank holds; the pipeline hands the divergence over",
        versions=("0.19", "main"),
    ),
    Binding(
        "megatron.training.distillation.logits_saver",
        "LogitsSaverHooks.attach_hooks",
        (),
        "hooks the output layer for logits, which no rank holds; the pipeline hands the most likely ids over",
        versions=("0.19", "main"),
    ),
    Binding(
        _CACHED_LOGITS,
        "CachedLogitsKDLoss.__call__",
        (),
        "compares a teacher with those logits; the pipeline has computed the divergence",
        versions=("0.19", "main"),
    ),
    Binding(
        _TRAINING,
        "training_log",
        (),
        "reports zeros in gradients, among them those of the rows that pad our shards; here without these",
    ),
    Binding(
        _ARGUMENTS,
        "parse_args",
        ("megatron.training.initialize",),
        "adds our options after the script's own extra_args_provider",
        when="any of our options",
    ),
    Binding(
        _ARGUMENTS,
        "validate_args",
        ("megatron.training.initialize",),
        "checks all flags together before process groups start, and places redistributed layers",
        when="any of our options",
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
# Somebody has read the code of each of these; a new version comes in by hand, row by row.
_ALL = _names("0.14 0.15 0.16 0.17 0.18 0.19 main")
_BACKWARD = "input_tensor output_tensor output_tensor_grad"

SIGNATURES: Mapping[tuple[str, str], Mapping[Parameters, tuple[str, ...]]] = {
    (_SCHEDULES, "get_forward_backward_func"): {
        (): ("0.14", "0.15"),
        _names("pp_size vp_size"): ("0.16", "0.17", "0.18"),
        _names("pp_size vp_size schedule_pg_collection"): ("0.19", "main"),
    },
    (_SCHEDULES, "forward_step"): {
        _names(
            "forward_step_func data_iterator model num_microbatches input_tensor forward_data_store config "
            "cp_group_size collect_non_loss_data checkpoint_activations_microbatch is_first_microbatch "
            "current_microbatch vp_stage is_last_stage"
        ): _ALL,
    },
    (_SCHEDULES, "forward_step_calc_loss"): {
        _names(
            "model output_tensor loss_func config vp_stage collect_non_loss_data num_microbatches "
            "forward_data_store cp_group_size is_last_stage"
        ): _ALL,
    },
    (_SCHEDULES, "backward_step"): {
        _names(f"{_BACKWARD} model_type config pipeline_model_parallel_size"): ("0.14",),
        _names(f"{_BACKWARD} model_type config"): ("0.15", "0.16"),
        _names(f"{_BACKWARD} config"): ("0.17", "0.18", "0.19", "main"),
    },
    (_SCHEDULES, "deallocate_output_tensor"): {_names("out deallocate_pipeline_outputs"): _ALL},
    ("megatron.core.distributed.finalize_model_grads", "finalize_model_grads"): {
        _names("model num_tokens grad_finalize_pgs"): ("0.14",),
        _names("model num_tokens pg_collection"): ("0.15",),
        _names("model num_tokens pg_collection force_all_reduce"): _names("0.16 0.17 0.18 0.19 main"),
    },
    (_GPT_MODEL, "GPTModel.__init__"): {
        _names(_MODEL.format("", "model_comm_pgs")): ("0.14",),
        _names(_MODEL.format("", "pg_collection")): _names("0.15 0.16 0.17 0.18 0.19"),
        _names(_MODEL.format("logit_dtype ", "pg_collection")): ("main",),
    },
    (_GPT_MODEL, "GPTModel.forward"): {
        _names(_FORWARD): ("0.14", "0.15"),
        _names(f"{_FORWARD} padding_mask"): ("0.16",),
        _names(f"{_FORWARD} padding_mask is_spec_decode"): ("0.17",),
        _names(f"{_FORWARD} padding_mask output_processor output_processor_context"): _names(
            "0.18 0.19 main"
        ),
    },
    (_LAYER_SPECS, "get_gpt_decoder_block_spec"): {
        _names("config use_transformer_engine normalization qk_l2_norm vp_stage"): ("0.14",),
        _names("config use_transformer_engine normalization qk_l2_norm vp_stage pp_rank"): _names(
            "0.15 0.16 0.17 0.18 0.19 main"
        ),
    },
    (_PARALLEL_STATE, "set_pipeline_model_parallel_rank"): {("rank",): _ALL},
    (_ARGUMENTS, "parse_args"): {_names("extra_args_provider ignore_unknown_args"): _ALL},
    (_ARGUMENTS, "validate_args"): {_names("args defaults"): _ALL},
}

NEEDED: Mapping[tuple[str, str], Parameters] = {
    key: tuple(sorted(set.intersection(*(set(parameters) for parameters in rows))))
    for key, rows in SIGNATURES.items()
}
"""The parameters that all known versions share, which an unknown version must have, too."""


def find_version(
    signature_of: Callable[[str, str], Parameters | None],
    allow_unknown: bool = False,
    package: str = "megatron",
) -> str:
    """Which version of Megatron has these signatures.

    Args:
        signature_of: from module and name to parameter names; None if the name is missing.
        allow_unknown: accept a version that is in no row if it has every parameter in ``NEEDED``.
        package: whose names are looked at; the wheels of megatron-core have ``megatron.core`` alone.

    Returns:
        The newest version whose row all signatures match, or ``unknown``.

    Raises:
        ValueError: naming every missing or changed name and what to do.
    """
    signatures = {key: signature_of(*key) for key in SIGNATURES if key[0].startswith(package)}
    missing = [".".join(key) for key, signature in signatures.items() if signature is None]
    if missing:
        raise ValueError(
            f"Megatron has no {', '.join(missing)}; this is none of the supported versions "
            f"{', '.join(VERSIONS)}: use one of them"
        )
    common = set(VERSIONS)
    changed = []
    for key, signature in signatures.items():
        versions = SIGNATURES[key].get(signature or ())
        if versions is None:
            changed.append(f"{'.'.join(key)}({', '.join(signature or ())})")
        else:
            common &= set(versions)
    if common and not changed:
        return max(common, key=VERSIONS.index)
    what = "; ".join(changed) or "signatures of several versions beside each other"
    if not allow_unknown:
        raise ValueError(
            f"unknown version of Megatron: {what}. Use one of {', '.join(VERSIONS)}, or try this one with "
            "--vocab-parallel-allow-unknown-megatron"
        )
    lacking = [
        f"{'.'.join(key)} lacks {', '.join(sorted(set(NEEDED[key]) - set(signature or ())))}"
        for key, signature in signatures.items()
        if not set(NEEDED[key]) <= set(signature or ())
    ]
    if lacking:
        raise ValueError(f"this version of Megatron cannot be used: {'; '.join(lacking)}")
    return "unknown"
