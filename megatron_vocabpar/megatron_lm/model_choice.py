"""What ``auto`` and ``search`` build the model for: whole or partitioned vocabulary layers, and a layout.

The schedule is chosen once the model is there. Which ranks have its layers is settled before, of what is then
known: the command line, the same on every rank. The planner reads it, with an H100 in place of the device.

Next: ``first_plan.py``, which chooses the schedule.
"""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf
from types import SimpleNamespace
from typing import Any

from megatron_vocabpar.megatron_lm.flag_config import AUTO, FlagConfig
from megatron_vocabpar.megatron_lm.layouts import layers_of, model_chunks, written_out
from megatron_vocabpar.megatron_lm.rules.check import facts_of
from megatron_vocabpar.megatron_lm.rules.layout_rules import PLACING
from megatron_vocabpar.pipeline.rules.facts import Facts
from megatron_vocabpar.pipeline.rules.model_rules import WHOLE
from megatron_vocabpar.pipeline.rules.option_rules import OPTIONS
from megatron_vocabpar.pipeline.rules.rule import IMPOSSIBLE, ask, flags
from megatron_vocabpar.plan.choice import Choice, Request
from megatron_vocabpar.plan.choice_flags import placing_flags
from megatron_vocabpar.plan.choices import choices_of
from megatron_vocabpar.plan.given import Given, read_words
from megatron_vocabpar.plan.hardware import hardware_presets
from megatron_vocabpar.plan.layer_counts import layout_of
from megatron_vocabpar.plan.pattern import layers_in, with_bars
from megatron_vocabpar.plan.plays import play_in_full
from megatron_vocabpar.plan.read_arguments import job_of_processes, model_from_arguments
from megatron_vocabpar.schedule.make.choose import choose
from megatron_vocabpar.schedule.make.families import SEARCH, Family, families, family_named
from megatron_vocabpar.schedule.times.costs import PassCosts
from megatron_vocabpar.schedule.words.methods import BASELINE, VOCAB_1, VOCAB_2, Method, method_named

_DEVICE = "H100"
_COMPARED = (BASELINE, VOCAB_1, VOCAB_2)
_LEAST_GAIN = 0.01  # that a layout is recommended for


def decided(
    config: FlagConfig, argv: Sequence[str], world_size: int, *, prints: bool = True
) -> tuple[FlagConfig, list[str]]:
    """The flags with which the model is built, the same on every rank, and lines to print.

    Playing schedules takes seconds. So where the flags leave nothing open, only the rank that prints looks
    for layers by hand to recommend.

    Args:
        config: our flags.
        argv: the command line.
        world_size: processes of the job.
        prints: whether this rank prints the lines.

    Raises:
        ValueError: if a layout is asked for that cannot be found, with the reason.
    """
    if not config.runs_our_schedule or config.redistribute:
        return config, []
    given = Given(read_words(argv), "the command line")
    args = _as_arguments(given)
    try:
        chunks = model_chunks(args).numerator
        return _decided(config, args, _request(config, given, world_size, chunks), chunks, prints)
    except (ValueError, ZeroDivisionError) as error:
        if config.layout:
            raise ValueError(f"--vocab-parallel-layout {config.layout}: {error}") from error
        return config, [f"{config.family} leaves out {BASELINE}: {error}"] if config.leaves_open else []


def _decided(
    config: FlagConfig, args: Any, request: Request, chunks: int, prints: bool
) -> tuple[FlagConfig, list[str]]:
    pattern = request.model.pattern and Facts(settings=args).pattern
    layout = pattern if "|" in pattern else written_out(args)
    placing = [name for name in PLACING if getattr(args, name, None) and not (pattern and "hybrid" in name)]
    if placing and (config.layout or not layout):
        raise ValueError(f"{flags(placing)} places the layers; leave it out")
    both = list(_left_open(config, args, request.measured, request.job.p, chunks))
    if not both:  # the rules say what the family needs
        return replace(config, layout=None), []
    names = [(method.name, family.name) for method, family in both]
    is_settled = names == [(config.method, config.family)] and not config.layout
    if is_settled and (layout or not prints):
        return config, []
    stages, layers = request.job.p * chunks, request.model.layers
    even = [] if layers % stages else [(layers // stages,) * stages]
    segments = layout.partition("/")[0].split("|")
    given = tuple(len(layers_in(part)) for part in segments) if pattern else layers_of(layout)
    as_given = _ranked(request, both, [given] if layout else even)
    wanted = not layout and (config.layout or prints)
    by_hand = _ranked(request, both) if wanted else []
    ranked = by_hand if config.layout else as_given
    if not ranked:
        raise ValueError(f"{layers} layers fit no schedule of {stages} stages")
    lines = [_comparison(config.family, ranked)] if len(both) > 1 else []
    best = ranked[0]
    if config.layout:
        depths = request.model.mtp_depths
        placed = with_bars(pattern, best.layers) if pattern else layout_of(best.layers, depths)
        config = replace(config, layout=placed)
        lines.append(f"layers are placed by {config.layout}")
    elif by_hand and (gain := best.iteration_ms / by_hand[0].iteration_ms - 1.0) >= _LEAST_GAIN:
        lines.append(f"layers by hand, {gain:.1%} faster: {' '.join(placing_flags(by_hand[0]))}")
    return _built_for(config, best, chunks, request.max_activations), lines


def _request(config: FlagConfig, given: Given, world_size: int, chunks: int) -> Request:
    """The question to the planner."""
    job = job_of_processes(given, world_size, None if "global-batch-size" in given else 1)
    return Request(
        model_from_arguments(given),
        job,
        hardware_presets()[_DEVICE],
        limit_gib=inf,
        measured=None if config.costs is None else PassCosts.load(config.costs),
        max_activations=config.open_schedules(job.p, chunks).most_activations,
    )


def _as_arguments(given: Given) -> SimpleNamespace:
    """Flags as Megatron's parser names them, with numbers and lists as such."""

    def value(text: str) -> Any:
        try:
            return literal_eval(text)
        except (ValueError, SyntaxError):
            return text or True

    return SimpleNamespace(
        **{"pipeline_model_parallel_size": 1, "position_embedding_type": "learned_absolute"}
        | {name.replace("-", "_"): value(text) for name, text in given.values.items()}
    )


def _left_open(
    config: FlagConfig, args: Any, measured: PassCosts | None, p: int, chunks: int
) -> Iterator[tuple[Method, Family]]:
    """What the flags leave open, with the families that these model chunks allow."""
    if config.family in (AUTO, SEARCH) and p > 1:
        known = tuple(f for f in families().values() if config.hides_exchange or not f.pairs)
    else:
        known = config.open_schedules(p, chunks).families
    for name in [name for name in config.methods if name in _COMPARED] or [config.method]:
        if name == BASELINE != config.method and not _may_be_whole(config, args, measured):
            continue
        for family in known:
            if family.allows(chunks):
                yield method_named(name), replace(family, chunks=chunks)


def _may_be_whole(config: FlagConfig, args: Any, measured: PassCosts | None) -> bool:
    """Whether the vocabulary layers may be whole, and measured costs, if any, say what they take."""
    facts = facts_of(args, replace(config, method=BASELINE))
    return not ask(facts, WHOLE, OPTIONS)[IMPOSSIBLE] and (measured is None or bool(measured.last_rank_extra))


def _ranked(
    request: Request,
    both: Sequence[tuple[Method, Family]],
    layouts: Sequence[tuple[int, ...]] | None = None,
) -> list[Choice]:
    """Those that can run, by quick plays, the fastest first; by default with the layouts of each family."""
    choices = [choice for each in both for choice in choices_of(request, *each, layouts=layouts)]
    return [choice for choice in choose(choices, play_in_full, most=0) if not choice.problem]


def _comparison(asked: str, ranked: Sequence[Choice]) -> str:
    """A line on each method in its fastest family."""
    best, fastest = ranked[0], {ranked[0].method: ranked[0]}
    for choice in ranked:
        fastest.setdefault(choice.method, choice)
    others = ", ".join(
        f"{choice.name} {choice.iteration_ms / best.iteration_ms - 1:+.1%}"
        for choice in fastest.values()
        if choice is not best
    )
    return f"{asked} builds the model for {best.name}, as estimated for {_DEVICE}; others: {others or 'none'}"


def _built_for(config: FlagConfig, best: Choice, chunks: int, cap: float | None) -> FlagConfig:
    """The flags for the fastest choice; they leave open what can be chosen with the model that it needs."""
    if best.method == BASELINE:
        config = replace(config, method=BASELINE)
    found = config.open_schedules(best.request.job.p, chunks)
    if family_named(best.family) not in found.families:
        config = replace(config, method=best.method, family=best.family, max_activations=cap)
    return config
