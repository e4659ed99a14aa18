"""``GRAPHS``: where CUDA graphs of layers are wrong, and beside what they have not been run.

Megatron's own graphs (``--cuda-graph-impl local``) and those of Transformer Engine are captured in the order
of one iteration, and share memory by it. ``docs/megatron.md`` says what was run. Standard library only.
"""

from __future__ import annotations

from typing import Any

from megatron_vocabpar.pipeline.rules.facts import Facts, plain
from megatron_vocabpar.pipeline.rules.rule import UNTESTED, Rule

_SCOPES = ("cuda_graph_scope", "cuda_graph_scope_deprecated", "cuda_graph_modules")
"""The settings that name the captured parts of a layer; 0.18 has another name for them."""

_Row = tuple[str, tuple[str, ...], tuple[Any, ...]]
"""A flag, its settings, and their values that do not count."""

_OTHER_PLANS: tuple[_Row, ...] = (
    ("--rampup-batch-size", ("rampup_batch_size",), ()),
    ("--step-batch-size-schedule", ("step_batch_size_schedule",), ()),
)
_DROPOUT: tuple[_Row, ...] = (
    ("--hidden-dropout other than 0", ("hidden_dropout",), (0,)),
    ("--attention-dropout other than 0", ("attention_dropout",), (0,)),
)
_NOT_IN_ENGINE: tuple[_Row, ...] = (("--cpu-offloading", ("cpu_offloading",), ()),)
_NOT_IN_MEGATRONS: tuple[_Row, ...] = (
    ("--tensor-model-parallel-size", ("tensor_model_parallel_size",), (1,)),
    ("--context-parallel-size", ("context_parallel_size",), (1,)),
    ("--num-experts", ("num_experts", "num_moe_experts"), ()),
    ("--mtp-num-layers", ("mtp_num_layers",), (0,)),
    ("--hybrid-layer-pattern", ("is_hybrid_model", "hybrid_layer_pattern", "hybrid_override_pattern"), ()),
    ("--recompute-granularity", ("recompute_granularity",), ()),
    ("--fp8-format", ("fp8",), ()),
    ("--fp4-format", ("fp4",), ()),
    ("--cuda-graph-scope", _SCOPES, ("full", ["full"])),
    ("--overlap-param-gather", ("overlap_param_gather",), ()),
    *_NOT_IN_ENGINE,
)


def _set(facts: Facts, rows: tuple[_Row, ...]) -> str:
    """The flags of the rows whose settings are set."""
    flags = [
        flag
        for flag, names, unset in rows
        if any(facts.is_set(name) and getattr(facts.settings, name) not in unset for name in names)
    ]
    return ", ".join(dict.fromkeys(flags))


def whole_iteration(facts: Facts) -> bool:
    """Whether graphs of more than single layers are asked for."""
    scopes = [plain(getattr(facts.settings, name, None) or []) for name in _SCOPES]
    return facts.cuda_graph_impl not in ("", "none", "local", "transformer_engine") or any(
        "full_iteration" in ([scope] if isinstance(scope, str) else scope) for scope in scopes
    )


_LOCAL = "--cuda-graph-impl local, --enable-cuda-graph"
_GRAPHS = "CUDA graphs of layers"
_BESIDE = "leave out the one or the other"

GRAPHS = (
    Rule("--cuda-graph-impl full_iteration, --cuda-graph-scope full_iteration", whole_iteration,
        "waits of the host and side streams cannot be in one graph",
        "leave it out, or capture single layers"),
    Rule("--external-cuda-graph with Megatron before 0.16",
        lambda f: f.external_cuda_graph and not f.has("cuda_graph_impl"),
        "its training script captures in the order of Megatron's own schedule", "use --enable-cuda-graph"),
    Rule(f"{_LOCAL} with Megatron 0.16, 0.17, 0.19 or later",
        lambda f: f.graphs_by_megatron and f.graphs_are_wrong, "emulated, its graphs gave wrong gradients: "
        "before B reads it, a stage's first input was overwritten, or memory was freed"),
    Rule(lambda f, _: f"{_GRAPHS} with {f.family_flag}", lambda f: f.captures_layers and f.splits_w,
        "a graph of B holds the weight gradients, which it may split off",
        "use 1f1b, interleaved or 1f1b-overlap, or leave the graphs out"),
    Rule(f"{_GRAPHS} with --pipeline-model-parallel-size 1", lambda f: f.captures_layers and f.p == 1,
        "without a pipeline Megatron has one graph for microbatches that are under way together here",
        "use a pipeline, or leave the graphs out"),
    Rule(lambda _, found: f"{_GRAPHS} with --vocab-parallel-profile-iterations {found}",
        lambda f: f.captures_layers and f.profile_iterations,
        "they are replayed in the order in which they were captured",
        "give --vocab-parallel-profile-iterations 0"),
    Rule(lambda _, found: f"{_GRAPHS} with {found}", lambda f: f.captures_layers and _set(f, _OTHER_PLANS),
        "an iteration of another number of microbatches has another plan than that which was captured",
        _BESIDE),
    Rule("--cuda-graph-warmup-steps 0", lambda f: f.graphs_by_engine and f.cuda_graph_warmup_steps == 0,
        "layers are captured in the order of an iteration that has run", "give 1 or more"),
    Rule(lambda _, found: f"{_LOCAL} with {found}",
        lambda f: f.graphs_by_megatron and not f.graphs_by_engine and _set(f, _DROPOUT),
        "Megatron replays training's dropout in evaluation", _BESIDE),
    Rule(lambda _, found: f"{_GRAPHS} with {found}",
        lambda f: f.captures_layers and _set(f, _NOT_IN_ENGINE if f.graphs_by_engine else _NOT_IN_MEGATRONS),
        "they have not been shown to train as layers without graphs", _BESIDE, UNTESTED),
)  # fmt: skip
