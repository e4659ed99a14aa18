"""The options with which CUDA graphs of single layers have been tested; standard library only.

``docs/evidence.md`` says what was run. Next: ``layer_graphs.py``.
"""

from __future__ import annotations

from typing import Any

SCOPES = ("cuda_graph_scope", "cuda_graph_scope_deprecated", "cuda_graph_modules")
"""The attributes that name the captured parts of a layer; 0.18 has another name for them."""

_Row = tuple[str, tuple[str, ...], tuple[Any, ...]]
_OTHER_NUMBERS: tuple[_Row, ...] = (
    ("--rampup-batch-size", ("rampup_batch_size",), ()),
    ("--step-batch-size-schedule", ("step_batch_size_schedule",), ()),
)
"""An iteration of another number of microbatches has another plan than that which was captured."""

_ALONE: tuple[_Row, ...] = (
    ("--tensor-model-parallel-size", ("tensor_model_parallel_size",), (1,)),
    ("--context-parallel-size", ("context_parallel_size",), (1,)),
    ("--num-experts", ("num_experts", "num_moe_experts"), ()),
    ("--mtp-num-layers", ("mtp_num_layers",), (0,)),
    ("--hybrid-layer-pattern", ("hybrid_layer_pattern", "hybrid_override_pattern", "is_hybrid_model"), ()),
    ("--hidden-dropout other than 0", ("hidden_dropout",), (0,)),
    ("--attention-dropout other than 0", ("attention_dropout",), (0,)),
    ("--recompute-granularity", ("recompute_granularity",), ()),
    ("--fp8-format", ("fp8",), ()),
    ("--fp4-format", ("fp4",), ()),
    ("--cuda-graph-scope", SCOPES, ("full", ["full"])),
    ("--cpu-offloading", ("cpu_offloading",), ()),
    ("--overlap-param-gather", ("overlap_param_gather",), ()),
    *_OTHER_NUMBERS,
)
"""A flag, its attributes in Megatron's arguments or a TransformerConfig, and its values that were tested."""

_ALONE_IN_ENGINE: tuple[_Row, ...] = (
    ("--hybrid-layer-pattern", ("hybrid_layer_pattern", "hybrid_override_pattern"), ()),
    ("--cpu-offloading", ("cpu_offloading",), ()),
    *_OTHER_NUMBERS,
)
"""The same for graphs that Transformer Engine captures."""


def asks_for_graphs(options: Any) -> bool:
    """Whether single layers are captured: by ``--cuda-graph-impl local`` or ``--enable-cuda-graph``.

    Args:
        options: Megatron's arguments, or a TransformerConfig.
    """
    implementation = getattr(options, "cuda_graph_impl", None) or "none"
    return implementation == "local" or bool(getattr(options, "enable_cuda_graph", False))


def asks_for_engine_graphs(options: Any) -> bool:
    """Whether Transformer Engine captures layers: ``--cuda-graph-impl transformer_engine``, or its old name.

    Args:
        options: Megatron's arguments, or a TransformerConfig.
    """
    engine = getattr(options, "cuda_graph_impl", None) == "transformer_engine"
    return engine or bool(getattr(options, "external_cuda_graph", False))


def beside_graphs(options: Any) -> list[str]:
    """The flags among ``options`` with which graphs have not been shown to train as layers without them."""
    rows = _ALONE_IN_ENGINE if asks_for_engine_graphs(options) else _ALONE
    return [
        flag
        for flag, attributes, plain in rows
        if any(
            value and value not in plain for value in (getattr(options, name, None) for name in attributes)
        )
    ]
