"""Asks all rules about a launch line, and lists its arguments whose effect is not known.

Arguments of Megatron that have been read have a row in ``data/arguments.txt``. An argument without a row
comes from a Megatron that is newer than the table. At its default it passes; where it is set, the warning
names it, as it does those that were read and not run. What the training script itself adds passes. Rows of
a new version are added by hand, name by name.

All is asked before any process group exists. Standard library only.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any, Literal

from megatron_vocabpar.megatron_lm.flag_config import FlagConfig
from megatron_vocabpar.megatron_lm.flags import spell
from megatron_vocabpar.megatron_lm.layouts import model_chunks
from megatron_vocabpar.megatron_lm.rules.flag_rules import CHECKPOINTS, FLAGS, PAIRS
from megatron_vocabpar.megatron_lm.rules.layout_rules import CHUNKS, REDISTRIBUTION
from megatron_vocabpar.pipeline.rules.facts import Facts
from megatron_vocabpar.pipeline.rules.graph_rules import GRAPHS
from megatron_vocabpar.pipeline.rules.model_rules import HEADS, PLACED, SPLIT_W, WHOLE
from megatron_vocabpar.pipeline.rules.option_rules import OPTIONS
from megatron_vocabpar.pipeline.rules.rule import IMPOSSIBLE, UNTESTED, Level, Table, ask
from megatron_vocabpar.schedule.words.methods import method_named

Verdict = Literal["works", "ruled", "not run", "cannot matter"]
WORKS: Verdict = "works"
RULED: Verdict = "ruled"
NOT_RUN: Verdict = "not run"
CANNOT_MATTER: Verdict = "cannot matter"
_VERDICTS: Mapping[str, Verdict] = {verdict: verdict for verdict in (WORKS, RULED, NOT_RUN, CANNOT_MATTER)}
UNREAD = "its effect on partitioned vocabulary layers is not known; leave it out"


@dataclass(frozen=True, slots=True)
class Review:
    """The verdict on some arguments.

    Attributes:
        verdict: ``works``, as a run beside stock has shown; ``ruled``, if a rule looks at it; ``cannot
            matter`` to embedding, output layer, loss, batch, gradients or checkpoint; ``not run``, if it may
            matter and has not been tried.
        reason: of what was not run, what it would touch; else empty.
        arguments: their names in Megatron's parsed arguments.
    """

    verdict: Verdict
    reason: str
    arguments: tuple[str, ...]


def _read(text: str) -> tuple[Review, ...]:
    """Rows of the file: a line ``verdict``, or ``not run: reason``, then indented ones with the arguments."""
    rows: list[Review] = []
    for line in text.splitlines():
        if line.startswith(" "):
            rows[-1] = replace(rows[-1], arguments=(*rows[-1].arguments, *line.split()))
        else:
            verdict, _, reason = line.partition(": ")
            rows.append(Review(_VERDICTS[verdict], reason, ()))
    return tuple(rows)


_FILE = resources.files("megatron_vocabpar.megatron_lm").joinpath("data/arguments.txt")

REVIEWS = _read(_FILE.read_text("utf-8"))

REVIEW_OF: Mapping[str, Review] = {name: row for row in REVIEWS for name in row.arguments}
"""The row of each argument."""


@dataclass(frozen=True, slots=True)
class Declared:
    """An argument of a parser: its first spelling, and its default."""

    flag: str
    default: Any


def declared(parser: argparse.ArgumentParser) -> dict[str, Declared]:
    """The arguments of ``parser``, by their names in its result."""
    arguments: dict[str, Declared] = {}
    for action in parser._actions:  # argparse has no public list of them
        default = parser.get_default(action.dest)
        if isinstance(default, str) and callable(action.type):
            default = action.type(default)  # as parsing does
        if action.option_strings and action.dest != "help":
            arguments.setdefault(action.dest, Declared(action.option_strings[0], default))
    return arguments


def not_run(arguments: Mapping[str, Declared], args: Any) -> Iterator[str]:
    """A sentence for each argument of Megatron's that a user set and that has not been read or run."""
    for name, each in arguments.items():
        value = getattr(args, name, each.default)
        if value != each.default:
            row = REVIEW_OF.get(name)
            if row is None:
                yield f"{each.flag} {value}: {UNREAD}"
            elif row.verdict == NOT_RUN:
                yield f"{each.flag}: {row.reason}"


_OURS: tuple[Table, ...] = (GRAPHS, FLAGS, CHUNKS, PLACED, SPLIT_W, WHOLE, PAIRS)
"""Rules about launch lines with one of our schedules."""

TABLES: tuple[Table, ...] = (*_OURS, HEADS, CHECKPOINTS, REDISTRIBUTION)
"""All rules but those about our own options."""


def facts_of(args: Any, config: FlagConfig) -> Facts:
    """The facts about a launch line that rules read.

    Args:
        args: Megatron's arguments, parsed and not yet validated.
        config: the values of our flags.
    """
    chunks = model_chunks(args)
    p, megatron = args.pipeline_model_parallel_size, Facts(settings=args)
    schedules = config.open_schedules(p, chunks.numerator)
    return replace(
        megatron,
        options=config.options,
        method=method_named(config.method),
        spell=spell,
        family=config.family,
        p=p,
        chunks=chunks,
        splits_w=schedules.splits_w,
        has_pairs=schedules.has_pairs,
        in_v=schedules.shape == "vshape",
        redistributes=config.redistribute,
        final_stage_layers=config.final_stage_layers,
        profile_iterations=config.profile_iterations,
        # 0.16 and 0.17 have the setting's name of 0.16 alone; those from 0.19 on what came with that.
        graphs_are_wrong=megatron.since_0_19
        or (
            isinstance(getattr(args, "cuda_graph_scope", None), list)
            and not megatron.has("cuda_graph_modules")
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
        title: the name of the flag or variable that the error and the warning begin with.
        more: further rules, of a framework.

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
