"""Asks all rules about a launch line, before any process group exists. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from megatron_vocabpar.megatron_lm.flag_config import FlagConfig
from megatron_vocabpar.megatron_lm.flags import spell
from megatron_vocabpar.megatron_lm.layouts import model_chunks
from megatron_vocabpar.megatron_lm.rules.flags import FLAGS
from megatron_vocabpar.megatron_lm.rules.layouts import CHUNKS, REDISTRIBUTION
from megatron_vocabpar.megatron_lm.rules.pairs import PAIRS
from megatron_vocabpar.megatron_lm.rules.stored import CHECKPOINTS
from megatron_vocabpar.pipeline.rules.facts import Facts
from megatron_vocabpar.pipeline.rules.graphs import GRAPHS
from megatron_vocabpar.pipeline.rules.model import HEADS, PLACED, SPLIT_W, WHOLE
from megatron_vocabpar.pipeline.rules.options import OPTIONS
from megatron_vocabpar.pipeline.rules.rule import IMPOSSIBLE, UNTESTED, Level, Table, ask
from megatron_vocabpar.schedule.words.methods import method_named

_OURS: tuple[Table, ...] = (GRAPHS, FLAGS, CHUNKS, PLACED, SPLIT_W, WHOLE, PAIRS)
"""Of launch lines with a schedule of ours."""

TABLES: tuple[Table, ...] = (*_OURS, HEADS, CHECKPOINTS, REDISTRIBUTION)
"""All but those on our own options."""


def facts_of(args: Any, config: FlagConfig) -> Facts:
    """What rules look at.

    Args:
        args: Megatron's arguments, parsed and not yet validated.
        config: the values of our flags.
    """
    chunks = model_chunks(args)
    n, known = chunks.numerator, Facts(settings=args)
    return replace(
        known,
        options=config.options,
        method=method_named(config.method),
        spell=spell,
        family=config.family,
        p=args.pipeline_model_parallel_size,
        chunks=chunks,
        splits_w=config.splits_w(n),
        has_pairs=config.has_pairs(n),
        in_v=any(family.shape == "vshape" for family in config.families(n)),
        redistributes=config.redistribute,
        final_stage_layers=config.final_stage_layers,
        profile_iterations=config.profile_iterations,
        # 0.16 and 0.17 have the setting's name of 0.16 alone; those from 0.19 on what came with that.
        graphs_are_wrong=known.since_0_19
        or (
            isinstance(getattr(args, "cuda_graph_scope", None), list) and not known.has("cuda_graph_modules")
        ),
    )


def said_of(args: Any, config: FlagConfig, more: Table = ()) -> dict[Level, list[str]]:
    """The sentences of all rules that apply to a launch line, by their level; ``more`` are the door's own."""
    facts = facts_of(args, config)
    ours = (*_OURS, OPTIONS) if facts.runs_ours else ()
    return ask(facts, more, REDISTRIBUTION, *ours, HEADS, CHECKPOINTS if facts.partitions else ())


def check(
    args: Any,
    config: FlagConfig,
    unread: Iterable[str] = (),
    *,
    title: str = "--enable-vocab-parallel",
    more: Table = (),
) -> str:
    """Check everything that depends on several flags, before process groups start.

    Args:
        unread: sentences on what else has not been read or run.
        title: of the door.
        more: rules of its own.

    Returns:
        A warning that lists what has not been run; empty if there is nothing to list.

    Raises:
        ValueError: naming every refused flag with its remedy; with ``--vocab-parallel-strict`` also what
            would only be a warning.
    """
    said = said_of(args, config, more)
    untested = [*unread, *said[UNTESTED]]
    if refused := said[IMPOSSIBLE] + (untested if config.strict else []):
        raise ValueError(f"{title} refuses these flags:\n  " + "\n  ".join(refused))
    if not untested:
        return ""
    return f"> {title}: not tested with partitioned vocabulary layers:\n  " + "\n  ".join(untested)
