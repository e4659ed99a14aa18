"""Checks Megatron's flags for schedules with pairs, which hide the exchange between experts.

Megatron asserts most of this when it makes the model's configuration, or in the first iteration. Here one
error lists everything before any process group exists. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_vocabpar.megatron_lm.flag_config import FlagConfig
from megatron_vocabpar.megatron_lm.layouts import has_separate_heads, model_chunks
from megatron_vocabpar.pipeline.graphs.graph_options import asks_for_engine_graphs
from megatron_vocabpar.schedule.make.families import families

OVERLAP = "--overlap-moe-expert-parallel-comm"
DELAY = "--delay-wgrad-compute"
_INSTEAD = {"standard": "interleaved", "vshape": "v-zb"}
"""The family of the same placement without pairs."""


def exchange_problems(args: Any, config: FlagConfig) -> list[str]:
    """The problems of flags that ask for a schedule with pairs, or to hide the exchange."""
    asked, delays = _is_set(args, "overlap_moe_expert_parallel_comm"), _is_set(args, "delay_wgrad_compute")
    schedule, has_pairs = f"--vocab-parallel-family {config.schedule}", config.has_pairs(_chunks(args))
    if has_pairs and not asked:
        instead = _INSTEAD[config.families(2)[0].shape]
        return [
            f"{schedule}: its pairs hide the exchange between experts; give {OVERLAP}, or use {instead}, "
            "which is the same without pairs"
        ]
    flags = [flag for flag, is_given in ((OVERLAP, asked), (DELAY, delays)) if is_given]
    if flags and not has_pairs:
        named = " or ".join(name for name, family in families().items() if family.pairs)
        return [
            f"{', '.join(flags)}: {schedule} runs F and B one after the other; use {named}, or leave it out"
        ]
    if not asked:
        return []
    problems = [f"{OVERLAP}: {remedy}" for is_wrong, remedy in _CONDITIONS if is_wrong(args)]
    if delays:
        problems += [f"{DELAY}: {remedy}" for is_wrong, remedy in _DELAY_CONDITIONS if is_wrong(args)]
    return problems


def _chunks(args: Any) -> int:
    return model_chunks(args).numerator


def _is_set(args: Any, name: str) -> bool:
    return bool(getattr(args, name, None))


def _dense_last_layer(args: Any) -> bool:
    """Whether the decoder's last layer, which multi-token prediction's layers copy, has no experts."""
    frequency = getattr(args, "moe_layer_freq", None) or 1
    if isinstance(frequency, int):
        return (args.num_layers - 1) % frequency != 0
    return not list(frequency)[-1]


_CONDITIONS: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (
        lambda args: not (_is_set(args, "bf16") or _is_set(args, "fp16")),
        "Megatron wants a model of 16 bits for it; give --bf16 or --fp16",
    ),
    (
        lambda args: (
            not _is_set(args, "num_experts") or (getattr(args, "expert_model_parallel_size", 1) or 1) < 2
        ),
        "there is no exchange to hide; give --num-experts and --expert-model-parallel-size of at least 2, or "
        "leave it out",
    ),
    (
        lambda args: getattr(args, "moe_token_dispatcher_type", None) not in ("alltoall", "flex"),
        "Megatron hides the exchange of two dispatchers; give --moe-token-dispatcher-type alltoall or flex",
    ),
    (
        lambda args: (
            getattr(args, "recompute_granularity", None) == "full"
            or getattr(args, "recompute_method", None) is not None
            or getattr(args, "recompute_num_layers", None) is not None
        ),
        "whole layers cannot be computed again, for F and B are played against each other in parts of them; "
        "use --recompute-granularity selective",
    ),
    (
        lambda args: (
            getattr(args, "recompute_granularity", None) == "selective"
            and "moe" in (getattr(args, "recompute_modules", None) or ())
        ),
        "a whole mixture of experts cannot be computed again; leave moe out of --recompute-modules",
    ),
    (
        lambda args: _is_set(args, "moe_shared_expert_overlap"),
        "it hides the same exchange as --moe-shared-expert-overlap; leave out the one or the other",
    ),
    (
        lambda args: (getattr(args, "mtp_num_layers", None) or 0) > 1,
        "Megatron cuts one layer of multi-token prediction at most; use --mtp-num-layers 1",
    ),
    (
        lambda args: _is_set(args, "mtp_num_layers") and _dense_last_layer(args),
        "Megatron cuts a layer of multi-token prediction only if it has experts, as the last layer of "
        "--moe-layer-freq says",
    ),
    (
        has_separate_heads,
        "layers of multi-token prediction before the last stage have not been run in pairs; put m before L "
        "in --pipeline-model-parallel-layout",
    ),
    (
        lambda args: _is_set(args, "hybrid_layer_pattern") or _is_set(args, "hybrid_override_pattern"),
        "layers by pattern have not been run in pairs; use pretrain_gpt.py, or leave it out",
    ),
    (
        lambda args: (
            _is_set(args, "enable_cuda_graph")
            or getattr(args, "cuda_graph_impl", None) not in (None, "none", "transformer_engine")
        ),
        "of CUDA graphs those of --cuda-graph-impl transformer_engine alone have been run in pairs; use that "
        "or leave out the one or the other",
    ),
    (
        lambda args: _is_set(args, "fp4") and asks_for_engine_graphs(args),
        "CUDA graphs of layers in 4 bits have not been run in pairs; leave out --cuda-graph-impl or "
        "--fp4-format",
    ),
    (
        lambda args: _is_set(args, "cpu_offloading") or _is_set(args, "cpu_offloading_num_layers"),
        "Megatron's plans of layers move no activations to the host; leave out --cpu-offloading-num-layers",
    ),
)
_DELAY_CONDITIONS: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (
        lambda args: getattr(args, "transformer_impl", None) != "transformer_engine",
        "layers of Transformer Engine alone delay their weight gradients; give --transformer-impl "
        "transformer_engine, or leave it out",
    ),
    (
        lambda args: _is_set(args, "moe_use_legacy_grouped_gemm"),
        "Megatron's older grouped products delay none; leave out --moe-use-legacy-grouped-gemm",
    ),
)


def leave_to_w(args: Any, config: FlagConfig) -> None:
    """If W is a separate pass, let it compute the gradients that ``--delay-wgrad-compute`` delays.

    Otherwise Megatron's plan would. Call this after Megatron's own checks; the layers themselves are told to
    delay when they are built.
    """
    chunks = _chunks(args)
    if config.has_pairs(chunks) and config.splits_w(chunks):
        args.delay_wgrad_compute = False
