"""Reads a model and a job from Megatron's arguments, after ``--`` or in a launch script.

The plan lists the flags that nothing here reads, but for those that are known to change no count
(``Given.unread``).
Next: ``hardware.py``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_vocabpar.plan.decoder import check_layers
from megatron_vocabpar.plan.given import Given
from megatron_vocabpar.plan.job import Job
from megatron_vocabpar.plan.model import Model
from megatron_vocabpar.plan.pattern import check_pattern, layers_in

_NEEDED = ("hidden-size", "num-attention-heads", "seq-length")
# Flags that make a model, but change no count.
_COUNT_NOTHING = (
    "normalization", "norm-epsilon", "apply-layernorm-1p", "disable-bias-linear", "add-qkv-bias",
    "squared-relu", "rotary-base", "rotary-percent", "rotary-interleaved", "rotary-scaling-factor",
    "mscale", "mscale-all-dim", "rotary-seq-len-interpolation-factor", "use-rope-scaling",
    "rope-scaling-factor", "rope-type", "qk-layernorm", "qk-l2-norm", "softmax-type", "glu-linear-offset",
    "activation-func-clamp-value", "init-method-std", "attention-softmax-in-fp32",
    "moe-router-score-function", "moe-router-enable-expert-bias", "moe-router-bias-update-rate",
    "moe-router-num-groups", "moe-router-group-topk", "moe-router-pre-softmax",
    "moe-router-topk-scaling-factor", "moe-router-dtype", "moe-router-load-balancing-type",
    "moe-aux-loss-coeff", "moe-z-loss-coeff", "mtp-loss-scaling-factor", "no-rope-freq",
    "moe-shared-expert-gate", "linear-conv-kernel-dim", "spec",
)  # fmt: skip
# Flags of a job that the estimates take for granted, or that say no more than others.
_ASSUMED = (
    "bf16", "sequence-parallel", "max-position-embeddings", "use-mcore-models", "transformer-impl", "swiglu",
    "quick-geglu", "group-query-attention", "attention-dropout", "moe-grouped-gemm", "mock-data",
    "no-bias-dropout-fusion",
    "recompute-method", "recompute-num-layers", "optimizer-offload-fraction", "use-precision-aware-optimizer",
    "overlap-moe-expert-parallel-comm", "delay-wgrad-compute",
)  # fmt: skip
_UNKNOWN_LAYERS = (
    "experimental-attention-variant", "linear-attention-freq", "heterogeneous-layers-config-path",
    "heterogeneous-layers-config-encoded-json",
)  # fmt: skip
"""Flags that give layers other parts than those that the planner counts."""
_SIZES = {
    "mamba": ("mamba-num-heads", "mamba-head-dim", "mamba-num-groups", "mamba-state-dim"),
    "delta": (
        "linear-num-key-heads", "linear-key-head-dim", "linear-num-value-heads", "linear-value-head-dim",
    ),
    "indexer": ("dsa-indexer-n-heads", "dsa-indexer-head-dim", "dsa-indexer-topk"),
}  # fmt: skip
"""Megatron's flags for the sizes of a pattern's layers, by the names of ``Decoder``."""


def refuse_unknown_layers(given: Given) -> None:
    """Refuse flags that give a GPT's layers parts that the planner does not read from them, by ValueError.

    A running job is planned nevertheless, as the layers' parts change its schedule little.
    """
    written = given.text("hybrid-layer-pattern") or given.text("hybrid-override-pattern")
    unknown = next(filter(given.text, _UNKNOWN_LAYERS), "")
    if unknown and not written:
        raise ValueError(
            f"{given.source}: --{unknown} {given.text(unknown)} gives layers parts that the planner does not "
            "read from this flag; write them as a --hybrid-layer-pattern, or give --config"
        )


def model_from_arguments(given: Given) -> Model:
    """A model from Megatron's arguments."""
    vocabulary = next((name for name in ("padded-vocab-size", "vocab-size") if name in given), "")
    written = given.text("hybrid-layer-pattern") or given.text("hybrid-override-pattern")
    missing = [f"--{name}" for name in _NEEDED if name not in given]
    missing += [] if written or "num-layers" in given else ["--num-layers or --hybrid-layer-pattern"]
    missing += [] if vocabulary else ["--vocab-size"]
    if missing:
        raise ValueError(f"{given.source}: no {', '.join(missing)}; add them")
    for name in _COUNT_NOTHING:
        given.text(name)
    number = given.number
    hidden, heads = number("hidden-size"), number("num-attention-heads")
    gated = "swiglu" in given or "quick-geglu" in given
    ffn = number("ffn-hidden-size", int(4 * hidden * 2 / 3) // 64 * 64 if gated else 4 * hidden)
    experts = number("num-experts", 0) if "num-experts" in given else 0
    parts = layers_in(written)
    check_layers(len(parts) or number("num-layers"))
    window, windowed = _window(given, len(parts) or number("num-layers"))
    if written:
        check_pattern(written)
        given.text("num-layers")  # the pattern says it
    return Model(
        name=given.source,
        source=given.source,
        vocab=number(vocabulary),
        hidden=hidden,
        layers=len(parts) or number("num-layers"),
        seq_length=number("seq-length"),
        heads=heads,
        groups=number("num-query-groups", heads) if "group-query-attention" in given else heads,
        head_dim=number("kv-channels", hidden // heads),
        ffn=ffn,
        gated=gated,
        tied="untie-embeddings-and-output-weights" not in given,
        dropout=given.text("hidden-dropout", "0.1").strip("0.") != "",
        learned_positions=_positions(given) == "learned_absolute",
        experts=experts,
        top_k=number("moe-router-topk", 2) if experts else 0,
        expert_ffn=number("moe-ffn-hidden-size", ffn) if experts else 0,
        shared_ffn=number("moe-shared-expert-intermediate-size", 0) if experts else 0,
        routed_groups=number("moe-router-group-topk", 0),
        dense_layers=_dense_layers(given, len(parts) or number("num-layers")) if experts else 0,
        window=window,
        windowed=windowed,
        latent=_latent(given, written),
        mtp_depths=written.count("/") or number("mtp-num-layers", 0),
        **_of_pattern(given, written, hidden) if written else {},
        output_gate="attention-output-gate" in given,
        expert_hidden=number("moe-latent-size", 0),
    )


def _of_pattern(given: Given, written: str, hidden: int) -> dict[str, Any]:
    """What the layers of a pattern have, with Megatron's defaults."""
    main, _, heads = written.partition("/")
    width = given.number("mamba-head-dim", 64) if "M" in written else 64
    defaults = ((2 * hidden // width, 64, 8, 128), (16, 128, 32, 128), (None, None, None))
    sizes = {
        name: tuple(map(given.number, flags, usual))
        for (name, flags), usual, part in zip(_SIZES.items(), defaults, "MGD", strict=True)
        if part in written
    }
    head = "".join(layers_in(heads.partition("/")[0]))
    return {"pattern": main.replace("|", ""), "head": head, **sizes}


def _positions(given: Given) -> str:
    rotary = "use-rotary-position-embeddings" in given
    return given.text("position-embedding-type", "rope" if rotary else "learned_absolute")


def _latent(given: Given, written: str) -> tuple[int, ...]:
    if "multi-latent-attention" not in given and not set("+D") & set(written):
        return ()
    names = {
        "q-lora-rank": 0,
        "kv-lora-rank": 32,
        "qk-head-dim": 128,
        "qk-pos-emb-head-dim": 64,
        "v-head-dim": 128,
    }
    return tuple(given.number(name, default) for name, default in names.items())


def _window(given: Given, layers: int) -> tuple[int, float]:
    """Tokens that a windowed layer sees, and the share of such layers."""
    sizes = re.findall(r"-?\d+", given.text("window-size"))
    if not sizes:
        return 0, 0.0
    name = "window-attn-skip-freq"
    pattern = given.text(name)
    if "[" in pattern:
        return int(sizes[0]) + 1, 1.0 - _listed_zeros(given, name, layers) / layers
    return int(sizes[0]) + 1, 1.0 - 1.0 / given.number(name) if pattern else 1.0  # as configurations count


def _dense_layers(given: Given, layers: int) -> int:
    """Layers without experts: of ``[0]*3+[1]*58`` three, of 2, which gives every second layer some, half."""
    name = "moe-layer-freq"
    pattern = given.text(name, "1")
    if "[" not in pattern:
        return layers - -(-layers // given.number(name, 1))
    return _listed_zeros(given, name, layers)


def _listed_zeros(given: Given, name: str, layers: int) -> int:
    """The zeros of a flag that lists a number for each layer, in Megatron's grammar.

    Raises:
        ValueError: if it lists another number of layers.
    """
    pattern = given.text(name)
    try:
        zeros, listed = _zeros(ast.parse(pattern, mode="eval").body)
    except (SyntaxError, TypeError, RecursionError):
        listed = 0
    if listed != layers:
        raise ValueError(
            f"{given.source}: --{name} {pattern[:40]} is no list of {layers} layers; write one such as "
            f"[0]*1+[1]*{layers - 1}"
        )
    return zeros


def _zeros(pattern: ast.expr) -> tuple[int, int]:
    """The zeros, and all numbers, in lists that are added and repeated."""
    match pattern:
        case ast.List(elts=numbers):
            listed = [number.value for number in numbers if isinstance(number, ast.Constant)]
            return listed.count(0), len(listed)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            (zeros, length), (more, further) = _zeros(left), _zeros(right)
            return zeros + more, length + further
        case (
            ast.BinOp(left=repeated, op=ast.Mult(), right=ast.Constant(value=int(times)))
            | ast.BinOp(left=ast.Constant(value=int(times)), op=ast.Mult(), right=repeated)
        ):
            zeros, length = _zeros(repeated)
            return zeros * times, length * times
    raise TypeError


# The planner's options that replace a flag of Megatron's.
_OPTIONS = {
    "pp": "pipeline-model-parallel-size",
    "tp": "tensor-model-parallel-size",
    "cp": "context-parallel-size",
    "ep": "expert-model-parallel-size",
    "micro_batch_size": "micro-batch-size",
    "global_batch_size": "global-batch-size",
    "seq_length": "seq-length",
    "mtp_depths": "mtp-num-layers",
}


def overruled(given: Given, options: Mapping[str, Any]) -> list[str]:
    """A line for each argument that an option of the planner replaces."""
    lines = []
    for option, flag in _OPTIONS.items():
        value = options.get(option)
        if value is not None and flag in given and given.text(flag) != str(value):
            lines.append(f"--{option.replace('_', '-')} {value} instead of --{flag} {given.text(flag)}")
    if options.get("microbatches") and (batch := _batch(given, options)):
        lines.append(f"--microbatches {options['microbatches']} instead of --global-batch-size {batch}")
    asked, granularity = options.get("recompute"), given.text("recompute-granularity")
    if asked and granularity and asked != _recompute(given):
        lines.append(f"--recompute {asked} instead of --recompute-granularity {granularity}")
    return lines


def other_gpus(given: Given, gpus: int) -> list[str]:
    """A line if the script runs on another number of GPUs than the plan is for."""
    nodes, each = _nodes(given)
    return (
        [f"{gpus} GPUs instead of the {nodes * each} that are given"] if nodes * each not in (0, gpus) else []
    )


def job_of_processes(given: Given, processes: int, microbatches: int | None) -> Job:
    """The job of a training on so many processes, with Megatron's defaults where nothing is given.

    Args:
        given: Megatron's arguments.
        processes: of the whole job; those that model parallelism leaves over are replicas.
        microbatches: of an iteration; None: by the arguments.

    Raises:
        ValueError: as ``job_from_arguments``.
    """
    p, t, c = (given.number(_OPTIONS[option], 1) for option in ("pp", "tp", "cp"))
    sizes = {"pp": p, "dp": max(1, processes // (p * t * c)), "microbatches": microbatches}
    return job_from_arguments(given, sizes)


def job_from_arguments(given: Given, sizes: Mapping[str, Any]) -> Job:
    """A job from the planner's options, then from Megatron's arguments, then from defaults.

    Args:
        given: Megatron's arguments.
        sizes: the planner's options: pp, tp, dp, cp, ep, micro_batch_size, global_batch_size, microbatches,
            distributed_optimizer, recompute, offload, fp8 and fp4.

    Raises:
        ValueError: if GPUs or sequences cannot be divided; the message says what to give instead.
    """

    def size(option: str, default: int) -> int:
        return int(sizes.get(option) or given.number(_OPTIONS[option], default))

    p, t, c, b = size("pp", 8), size("tp", 1), size("cp", 1), size("micro_batch_size", 1)
    d = int(sizes.get("dp") or _replicas(given, p * t * c))
    for name in _ASSUMED:
        given.text(name)
    return Job(
        p=p,
        t=t,
        d=d,
        c=c,
        e=size("ep", 1),
        m=_microbatches(given, b, d, sizes),
        micro_batch=b,
        distributed_optimizer="use-distributed-optimizer" in given
        or bool(sizes.get("distributed_optimizer")),
        overlap=_overlap(given),
        recompute=str(sizes.get("recompute") or _recompute(given)),
        recomputed=1.0 if sizes.get("recompute") else _recomputed(given, p),
        offload=1.0 if sizes.get("offload") else _offload(given),
        precision_aware=given.text("exp-avg-dtype") == "bf16",
        tp_overlap="tp-comm-overlap" in given,
        fp8="fp8-format" in given or "fp8" in given or bool(sizes.get("fp8")),
        fp4="fp4-format" in given or bool(sizes.get("fp4")),
        flex_dispatcher=given.text("moe-token-dispatcher-type") == "flex",
    )


def _recomputed(given: Given, p: int) -> float:
    """The share of layers that ``--recompute-method block`` runs again: so many of every model chunk."""
    if given.text("recompute-method") != "block":
        return 1.0
    chunks = given.number("num-virtual-stages-per-pipeline-rank", 1)
    layers = given.number("num-layers", 0) / (p * chunks)
    return min(1.0, given.number("recompute-num-layers", 1) / layers) if layers else 1.0


def _offload(given: Given) -> float:
    """The share of optimizer states on the host."""
    if "optimizer-cpu-offload" not in given:
        return 0.0
    text = given.text("optimizer-offload-fraction", "1.0")
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0.0 <= share <= 1.0:
        raise ValueError(
            f"{given.source}: --optimizer-offload-fraction is {text[:40]!r}; give a number from 0 to 1"
        )
    return share


def _overlap(given: Given) -> bool:
    """True if a flag asks for overlap, or if no flag of overlap or of a distributed optimizer is given."""
    flags = ("overlap-grad-reduce" in given, "overlap-param-gather" in given)
    return any(flags) or "use-distributed-optimizer" not in given


def _recompute(given: Given) -> str:
    modules, asked = given.text("recompute-modules"), given.text("recompute-granularity", "none")
    # Selective by itself recomputes attention's scores. Kernels keep none, so nothing is left to recompute.
    if asked == "selective" or "recompute-activations" in given:
        asked = "none"
    return "selective" if modules and modules != "core_attn" else asked


def _nodes(given: Given) -> tuple[int, int]:
    """The nodes that the script runs on, 1 if it does not say, and the GPUs of each, 0 if it does not say."""
    nodes, each = (
        _said(given, names)
        for names in (("nnodes", "nodes"), ("nproc-per-node", "gpus-per-node", "ntasks-per-node"))
    )
    gres = re.search(r"gpu(?::\w+)?:(\d+)", given.text("gres"))
    return nodes or 1, each or (int(gres[1]) if gres else 0)


def _said(given: Given, names: Sequence[str]) -> int:
    """The first of these flags that is given, 0 if none is; those that say the same are read with it."""
    said = [name for name in names if name in given.values]
    for name in said:
        if given.values[name] == given.values[said[0]]:
            given.text(name)
    return given.number(said[0]) if said else 0


def _replicas(given: Given, model_parallel: int) -> int:
    """The data parallel size: the script's GPUs over ``model_parallel``."""
    nodes, each = _nodes(given)
    if nodes * each % model_parallel:
        raise ValueError(
            f"{given.source}: {nodes} nodes of {each} GPUs do not divide by p x t x c = {model_parallel}; "
            "give other sizes (--pp, --tp, --cp), or --dp"
        )
    return nodes * each // model_parallel or 1


def _batch(given: Given, sizes: Mapping[str, Any]) -> int:
    """Sequences of an iteration; 0 if nothing says it."""
    flag = "global-batch-size"
    return int(sizes.get("global_batch_size") or (flag in given and given.number(flag)))


def _microbatches(given: Given, micro_batch: int, d: int, sizes: Mapping[str, Any]) -> int:
    if sizes.get("microbatches"):
        return int(sizes["microbatches"])
    batch = _batch(given, sizes)
    if batch % (micro_batch * d):
        raise ValueError(
            f"a batch of {batch} sequences does not divide by the microbatch's {micro_batch} x d = "
            f"{micro_batch} x {d}; give another --global-batch-size, --micro-batch-size or --dp"
        )
    return batch // (micro_batch * d) or 128
