"""Where the layers of the model go: the chunks and layers that Megatron's flags give each stage.

Standard library only.
"""

from __future__ import annotations

import re
from fractions import Fraction
from itertools import groupby
from typing import Any, NamedTuple

from megatron_vocabpar.megatron_lm.flag_config import FlagConfig
from megatron_vocabpar.pipeline.rules.facts import Facts
from megatron_vocabpar.plan.given import Given
from megatron_vocabpar.plan.layer_counts import redistributed
from megatron_vocabpar.plan.pattern import with_bars
from megatron_vocabpar.plan.read_arguments import model_from_arguments
from megatron_vocabpar.schedule.times.redistribution import layout, redistribute_by_flops, with_final_stage


def model_chunks(args: Any) -> Fraction:
    """Model chunks on each rank that Megatron's flags ask for; no whole number if layers don't divide."""
    p = args.pipeline_model_parallel_size
    layout = written_out(args)
    pattern = Facts(settings=args).pattern.partition("/")[0]
    if layout or "|" in pattern:
        return Fraction((layout or pattern).count("|") + 1, p)
    layers = getattr(args, "num_layers_per_virtual_pipeline_stage", None)
    if layers:
        return Fraction(layers_to_divide(args), p * layers)
    return Fraction(getattr(args, "num_virtual_stages_per_pipeline_rank", None) or 1)


def layers_to_divide(args: Any) -> int:
    ends = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    return (getattr(args, "num_layers", None) or 0) + sum(bool(getattr(args, end, None)) for end in ends)


def written_out(args: Any) -> str:
    """The layout of the pipeline, such as ``Et*3|(t*2|)*2L``, its repetitions written out; empty if none."""
    layout = getattr(args, "pipeline_model_parallel_layout", None)
    return expanded(layout) if isinstance(layout, str) else ""


def layers_of(layout: str) -> tuple[int, ...]:
    """The transformer layers of each stage of a layout: 2, 3 and 1 of ``Ett|t*3|tL``."""
    return tuple(stage.count("t") for stage in expanded(layout).split("|"))


def expanded(layout: str) -> str:
    """A layout with its repetitions written out: ``(t*2|)*2`` is ``tt|tt|``.

    Groups are not nested, as in Megatron: what it cannot read stays as it is, and so does a repetition of
    10,000 or more.
    """
    layout = layout.replace(",", "")
    for repeated in (r"\(([^()]+)\)\*(\d{1,4})(?!\d)", r"(\w|\|)\*(\d{1,4})(?!\d)"):
        layout = re.sub(repeated, lambda match: match[1] * int(match[2]), layout)
    return layout


class Order(NamedTuple):
    """The layers of a layout in order, and those of the model: ``E t*7 L`` and ``E t*8 L``."""

    given: str
    wanted: str


def other_order(layout: str, layers: int, heads: int) -> Order | None:
    """What a layout has in the place of the model's layers and heads; None if it has these."""
    given, wanted = expanded(layout).replace("|", ""), f"E{'t' * layers}{'m' * heads}L"
    return None if given == wanted else Order(_counted(given), _counted(wanted))


def _counted(letters: str) -> str:
    runs = [(letter if letter.strip() else "a blank", len(list(same))) for letter, same in groupby(letters)]
    return " ".join(f"{letter}*{count}" if count > 1 else letter for letter, count in runs) or "nothing"


def heads_elsewhere(layout: str, p: int) -> bool:
    """Whether heads are on several stages, or on one that is not its rank's last chunk."""
    stages = expanded(layout).split("|")
    holding = [stage for stage, layers in enumerate(stages) if "m" in layers]
    return bool(holding) and (len(holding) > 1 or holding[0] < len(stages) - p)


def has_separate_heads(args: Any) -> bool:
    """Whether layers of multi-token prediction stand before the last stage, as in ``Et|tt|m|L``."""
    return "m" in written_out(args).rpartition("|")[0]


def evened_out(args: Any) -> str | None:
    """The layout with its layers spread evenly, if it leaves room for the vocabulary layers.

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


def known_vocab_size(args: Any) -> int | None:
    return getattr(args, "padded_vocab_size", None) or getattr(args, "vocab_size", None)


def place(args: Any, layout: str) -> None:
    """Give Megatron a layout, or for a pattern the same with bars."""
    args.num_virtual_stages_per_pipeline_rank = args.num_layers_per_virtual_pipeline_stage = None
    if Facts(settings=args).pattern:
        args.hybrid_layer_pattern, args.hybrid_override_pattern = layout, None
    else:
        args.pipeline_model_parallel_layout = layout


def place_layers(args: Any, config: FlagConfig) -> None:
    """Write the redistributed transformer layers into Megatron's own ``pipeline_model_parallel_layout``.

    A pattern gets bars instead, by the operations of each of its layers.

    Raises:
        ValueError: if the layers do not fill the stages.
    """
    stages = args.pipeline_model_parallel_size * model_chunks(args).numerator
    if pattern := Facts(settings=args).pattern:
        counts = redistributed(model_from_arguments(Given.of(args)), stages, config.final_stage_layers)
        place(args, with_bars(pattern, counts))
        return
    if config.final_stage_layers is not None:
        counts = with_final_stage(args.num_layers, stages, config.final_stage_layers)
    else:
        vocab_size = known_vocab_size(args)
        assert vocab_size is not None
        counts = redistribute_by_flops(args.num_layers, stages, args.hidden_size, args.seq_length, vocab_size)
    place(args, layout(counts))
