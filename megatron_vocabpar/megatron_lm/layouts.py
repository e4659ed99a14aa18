"""Where the layers of the model go: the chunks and layers that Megatron's flags give each stage.

Standard library only.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from megatron_vocabpar.megatron_lm.flag_config import AUTO, FlagConfig
from megatron_vocabpar.schedule.make.families import SEARCH, families, family_named
from megatron_vocabpar.schedule.times.redistribution import layout, redistribute_by_flops, with_final_stage

_CHUNK_FLAGS = (
    "--num-layers-per-virtual-pipeline-stage, --num-virtual-stages-per-pipeline-rank, "
    "--pipeline-model-parallel-layout or --hybrid-layer-pattern"
)


def model_chunks(args: Any) -> Fraction:
    """Model chunks on each rank that Megatron's flags ask for; no whole number if layers don't divide."""
    p = args.pipeline_model_parallel_size
    layout = written_out(args)
    pattern = hybrid_pattern(args).partition("/")[0]
    if layout or "|" in pattern:
        return Fraction((layout or pattern).count("|") + 1, p)
    layers = getattr(args, "num_layers_per_virtual_pipeline_stage", None)
    if layers:
        return Fraction(_layers_to_divide(args), p * layers)
    return Fraction(getattr(args, "num_virtual_stages_per_pipeline_rank", None) or 1)


def hybrid_pattern(args: Any) -> str:
    """``--hybrid-layer-pattern``, or by its former name; empty in versions whose patterns have no stages."""
    if not hasattr(args, "hybrid_layer_pattern"):
        return ""
    return args.hybrid_layer_pattern or getattr(args, "hybrid_override_pattern", None) or ""


def _asking_for(chunks: int, args: Any) -> str:
    """How to ask for that many model chunks on each rank beside the layers that the flags place."""
    bars = f"write {args.pipeline_model_parallel_size * chunks - 1} | into"
    if hybrid_pattern(args):
        return f"{bars} --hybrid-layer-pattern"
    if written_out(args):
        return f"{bars} --pipeline-model-parallel-layout"
    return f"give --num-virtual-stages-per-pipeline-rank {chunks}"


def _layers_to_divide(args: Any) -> int:
    ends = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    return (getattr(args, "num_layers", None) or 0) + sum(bool(getattr(args, end, None)) for end in ends)


def written_out(args: Any) -> str:
    """The layout of the pipeline, such as ``Et*3|(t*2|)*2L``, its repetitions written out; empty if none."""
    layout = (getattr(args, "pipeline_model_parallel_layout", None) or "").replace(",", "")
    repeated = re.compile(r"(?:\(([^()*]*)\)|(\w|\|))\*(\d+)")
    while "*" in layout:  # innermost first: (t*2|)*2 is (tt|)*2 is tt|tt|
        longer = repeated.sub(lambda match: (match[1] or match[2]) * int(match[3]), layout)
        if longer == layout:
            break
        layout = longer
    return layout.replace("(", "").replace(")", "")


def has_separate_heads(args: Any) -> bool:
    """Whether layers of multi-token prediction stand before the last stage, as in ``Et|tt|m|L``."""
    return "m" in written_out(args).rpartition("|")[0]


def evened_out(args: Any) -> str | None:
    """The layout with as many layers on every stage as can be, for one that leaves room for the vocabulary.

    ``Ett|tttt|tttt|ttL`` has 12 layers on 4 stages and becomes ``Ettt|ttt|ttt|tttL``. A layer of multi-token
    prediction counts as a layer. Where layers do not divide, earlier stages have more.

    Returns:
        None if there is no layout, or none that is more even.
    """
    stages = [stage.strip("EL") for stage in written_out(args).split("|")]
    counts = [len(stage) for stage in stages]
    if len(counts) < 2 or max(counts) - min(counts) <= 1 or has_separate_heads(args):
        return None
    share, longer = divmod(sum(counts), len(counts))
    even = tuple(share + (stage < longer) for stage in range(len(counts)))
    heads = stages[-1].count("m")
    if heads > even[-1]:
        return None
    first, _, last = layout(even).rpartition("|")
    return f"{first}|{last[heads:-1]}{'m' * heads}L"


def layout_notice(args: Any) -> str:
    """A sentence on a layout that leaves room for the vocabulary layers; empty if there is none to say."""
    even = evened_out(args)
    if even is None:
        return ""
    return (
        f"> --pipeline-model-parallel-layout {args.pipeline_model_parallel_layout} leaves room for the "
        f"vocabulary layers, which are spread over all stages here; as even as can be: {even}"
    )


def chunk_problems(args: Any, config: FlagConfig) -> list[str]:
    p, chunks = args.pipeline_model_parallel_size, model_chunks(args)
    flag = f"--vocab-parallel-family {config.schedule}"
    if chunks.denominator != 1:
        return [f"{_CHUNK_FLAGS}: they give {chunks} model chunks on each of {p} ranks; choose what divides"]
    fitting = [name for name, family in families().items() if family.allows(chunks.numerator)]
    if config.schedule not in (*fitting, SEARCH, AUTO):
        needed = family_named(config.schedule).chunks
        return [
            f"{flag}: needs {needed} model chunks per rank, not {chunks}; {_asking_for(needed, args)}, "
            f"or use one of {', '.join(fitting)}"
        ]
    if chunks > 1 and p == 1:
        return [f"{flag}: needs --pipeline-model-parallel-size of at least 2"]
    if chunks > 1 and p == 2 and not getattr(args, "overlap_p2p_comm", True):
        return [
            "--no-overlap-p2p-communication: Megatron refuses it with model chunks on two ranks; leave it out"
        ]
    in_v = config.families(chunks.numerator)[0].shape == "vshape"
    if in_v and has_separate_heads(args):
        return [
            f"m before the last stage of --pipeline-model-parallel-layout: {flag} has Megatron's stages in "
            "another order than it gives out batches; use 1f1b, zb-h1 or interleaved, or put m before L"
        ]
    problems = [
        *_document_problems(args, p * chunks.numerator),
        *_skipping_problems(args, p, chunks.numerator),
        *(_heterogeneous_problems(args) if chunks > 1 else []),
    ]
    return problems + ([] if config.redistribute else _layer_problems(args, chunks.numerator))


def _document_problems(args: Any, stages: int) -> list[str]:
    """Megatron asks every stage's data for the ends of documents; stages in between have those of --sft."""
    if stages <= 2 or not getattr(args, "dataloader_inter_document_masking", False):
        return []
    if getattr(args, "sft", False):
        return []
    return [
        f"--dataloader-inter-document-masking: all {stages} stages take the ends of documents from the data, "
        "which Megatron reads on the first and the last alone; use 2 stages of one model chunk, or --sft"
    ]


def _skipping_problems(args: Any, p: int, chunks: int) -> list[str]:
    """Megatron skips an iteration by reading its data on every rank, from one iterator."""
    if chunks == 1 and (p <= 2 or getattr(args, "sft", False)):
        return []
    skipped = " ".join(map(str, getattr(args, "iterations_to_skip", None) or ()))
    tracker = getattr(args, "result_rejected_tracker_filename", None)
    flags = {"--iterations-to-skip": skipped, "--result-rejected-tracker-filename": tracker}
    return [
        f"{flag} {value}: Megatron skips data on ranks that have some, of one model chunk each; use 1f1b or "
        "zb-h1 on 2 stages at most, or leave it out"
        for flag, value in flags.items()
        if value
    ]


def _heterogeneous_problems(args: Any) -> list[str]:
    names = ("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json")
    if not any(getattr(args, name, None) for name in names):
        return []
    return [
        "--heterogeneous-layers-config-path: Megatron makes its layers for one model chunk a rank alone; use "
        "1f1b or zb-h1"
    ]


def _layer_problems(args: Any, chunks: int) -> list[str]:
    layers = _layers_to_divide(args)
    if written_out(args) or hybrid_pattern(args) or not layers:
        return []
    names = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
    fixed = [count for count in (getattr(args, name, None) for name in names) if count is not None]
    rest, ranks = layers - sum(fixed), args.pipeline_model_parallel_size - len(fixed)
    even = rest % ranks == 0 if ranks > 0 else rest == ranks == 0
    if even and all(count % chunks == 0 for count in (*fixed, rest // max(ranks, 1))):
        return []
    return [
        f"--num-layers {args.num_layers}: {rest} layers do not divide into {chunks} model chunks on each of "
        f"{ranks} ranks; choose another number, or place them with --pipeline-model-parallel-layout"
    ]


def redistribution_problems(args: Any, config: FlagConfig) -> list[str]:
    if not config.redistribute:
        return []
    problems = []
    if args.pipeline_model_parallel_size < 2:
        problems.append("--enable-layer-redistribution: needs --pipeline-model-parallel-size of at least 2")
    fixed = [
        "--" + name.replace("_", "-")
        for name in (
            "decoder_first_pipeline_num_layers",
            "decoder_last_pipeline_num_layers",
            "pipeline_model_parallel_layout",
            "account_for_embedding_in_pipeline_split",
            "account_for_loss_in_pipeline_split",
            "hybrid_layer_pattern",
            "hybrid_override_pattern",
        )
        if getattr(args, name, None)
    ]
    if fixed or (model_chunks(args) != 1 and not config.runs_our_schedule):
        problems.append(
            f"--enable-layer-redistribution: places the layers itself; leave out {', '.join(fixed)}"
            if fixed
            else "--enable-layer-redistribution: needs one model chunk per rank on 1f1b"
        )
    if config.final_stage_layers is None and not _known_vocab_size(args):
        problems.append(
            "--enable-layer-redistribution: give --final-stage-num-layers N, or --vocab-size to compute it"
        )
    return problems


def _known_vocab_size(args: Any) -> int | None:
    return getattr(args, "padded_vocab_size", None) or getattr(args, "vocab_size", None)


def place_layers(args: Any, config: FlagConfig) -> None:
    """Write the redistributed transformer layers into Megatron's own ``pipeline_model_parallel_layout``.

    Raises:
        ValueError: if the layers do not fill the stages.
    """
    stages = args.pipeline_model_parallel_size * model_chunks(args).numerator
    if config.final_stage_layers is not None:
        counts = with_final_stage(args.num_layers, stages, config.final_stage_layers)
    else:
        vocab_size = _known_vocab_size(args)
        assert vocab_size is not None
        counts = redistribute_by_flops(args.num_layers, stages, args.hidden_size, args.seq_length, vocab_size)
    args.num_virtual_stages_per_pipeline_rank = args.num_layers_per_virtual_pipeline_stage = None
    args.pipeline_model_parallel_layout = layout(counts)
