"""The layout of layers that a script's flags or ``--check`` name, as the planner plays it."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_vocabpar.megatron_lm.layouts import heads_elsewhere, layers_of, other_order
from megatron_vocabpar.plan.choice import Request
from megatron_vocabpar.plan.given import Given
from megatron_vocabpar.plan.job import OVERLAP, Job, repeated_share
from megatron_vocabpar.plan.layer_counts import StockLayout
from megatron_vocabpar.plan.times import can_pair

_SIZE = "pipeline-model-parallel-size"
_LAYOUT = "pipeline-model-parallel-layout"
_CHUNKS, _EACH = "num-virtual-stages-per-pipeline-rank", "num-layers-per-virtual-pipeline-stage"
_FIRST, _LAST = "decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers"
_COUNTED = tuple(f"account-for-{end}-in-pipeline-split" for end in ("embedding", "loss"))


def layout_of_arguments(given: Given, request: Request) -> StockLayout | None:
    """The layout that Megatron's arguments place layers with; None if they say nothing of it.

    Numbers of chunks count, too. Flags for another pipeline size than the job's stay unread.

    Raises:
        ValueError: if Megatron would refuse it; the message says what to give instead.
    """
    model, p = request.model, request.job.p
    if given.number(_SIZE, p) != p or model.pattern or p == 1:
        return None
    named = [name for name in (_FIRST, _LAST) if name in given]
    counted = [name for name in _COUNTED if name in given]
    _check_together(given, named, counted)
    together = tuple(flag for flag in OVERLAP if flag.removeprefix("--") in given)
    overlaps = OVERLAP[0] in together and can_pair(model, request.job)
    if _LAYOUT in given:
        text = given.text(_LAYOUT)
        layout = checked_layout(request, text, f"--{_LAYOUT}")
        overlaps = overlaps and layout.chunks > 1
        flags = (f"--{_LAYOUT} '{text}'", *(together if overlaps else ()))
        return layout._replace(name="as given", flags=flags, overlaps=overlaps)
    if not (named or counted or _CHUNKS in given or _EACH in given):
        return None
    ends = [given.number(name) if name in given else None for name in (_FIRST, _LAST)]
    ranks = _of_ranks(model.layers + len(counted), p, ends, given.source, bool(counted))
    chunks = _chunks(given, ranks[0])
    if not (named or counted or chunks > 1):
        return None
    if left := [count for count in ranks if count % chunks]:
        raise ValueError(
            f"{given.source}: {left[0]} layers of a rank do not divide into {chunks} model chunks; give "
            f"another --{_CHUNKS}"
        )
    _check_rounds(request, chunks, given.source, f"leave out --{_EACH if _EACH in given else _CHUNKS}")
    words = [f"--{name} {given.text(name)}" for name in named]
    words += [f"--{name}" for name in counted]
    words += [f"--{_CHUNKS} {chunks}"] if chunks > 1 else []
    overlaps = overlaps and chunks > 1
    words += together if overlaps else ()
    counts = [count // chunks for _ in range(chunks) for count in ranks]
    counts[0] -= _COUNTED[0] in counted
    counts[-1] -= _COUNTED[1] in counted
    return StockLayout("as given", chunks, tuple(counts), tuple(words), overlaps)


def recomputed_with(given: Given, job: Job, layers: Sequence[int]) -> float:
    """The share of layers that a job runs again, if these are the layers of its stages."""
    if job.recompute != "full" or given.text("recompute-method") != "block":
        return job.recomputed
    return repeated_share(given.number("recompute-num-layers", 1), layers)


def _check_together(given: Given, named: Sequence[str], counted: Sequence[str]) -> None:
    """Refuse flags that Megatron does not take together, by ValueError."""
    placing = [name for name in (_LAYOUT, _CHUNKS, _EACH) if name in given]
    if placing == [_LAYOUT]:
        placing += [*named, *counted]
    if placing == [_EACH] and named:
        raise ValueError(
            f"{given.source}: Megatron does not take --{_EACH} with --{named[0]}; give --{_CHUNKS} instead"
        )
    if len(placing) > 1:
        raise ValueError(
            f"{given.source}: Megatron does not take --{placing[0]} with --{placing[1]}; leave one out"
        )
    if named and counted:
        raise ValueError(
            f"{given.source}: --{named[0]} counts layers, so embedding and loss cannot count as some; "
            "leave out --account-for-…-in-pipeline-split"
        )


def _chunks(given: Given, layers: int) -> int:
    """The model chunks of a rank that has so many layers."""
    if _EACH not in given:
        return given.number(_CHUNKS, 1)
    each = given.number(_EACH)
    if layers % each:
        raise ValueError(
            f"{given.source}: {layers} layers of a rank do not divide by --{_EACH} {each}; give another"
        )
    return layers // each


def _of_ranks(layers: int, p: int, ends: list[int | None], source: str, counted: bool) -> list[int]:
    """The layers of each rank: those given for the first and the last one, the others even."""
    first, last = ends
    others = p - sum(end is not None for end in ends)
    rest = layers - sum(end or 0 for end in ends)
    if rest < 0 or bool(rest) != bool(others) or (others and rest % others):
        which = "other --account-for-…-in-pipeline-split" if counted else f"another --{_FIRST} or --{_LAST}"
        raise ValueError(
            f"{source}: {rest} layers do not divide over {others} pipeline ranks; give {which}, or "
            f"a --{_LAYOUT}{' instead' if counted else ''}"
        )
    even = rest // others if others else 0
    return [even if first is None else first, *[even] * (p - 2), even if last is None else last]


def checked_layout(request: Request, layout: str, flag: str) -> StockLayout:
    """The layout that ``flag`` names, if Megatron takes it.

    Raises:
        ValueError: if it has other layers, has them where Megatron does not, or cannot run the microbatches.
    """
    model, p = request.model, request.job.p
    counts = layers_of(layout)
    chunks, left = divmod(len(counts), p)
    if model.pattern:
        raise ValueError(
            f"{flag} {layout}: bars in its pattern place the layers of {model.name}; leave it out"
        )
    if order := other_order(layout, model.layers, model.mtp_depths):
        raise ValueError(
            f"{flag} {layout}: in order it has {order.given}, but {model.name} has {order.wanted}; write "
            "these letters, with | between stages"
        )
    if left:
        raise ValueError(f"{flag} {layout}: {len(counts)} stages; give a multiple of {p}")
    _check_rounds(request, chunks, f"{flag} {layout}", f"write {p} stages")
    if heads_elsewhere(layout, p):
        raise ValueError(
            f"{flag} {layout}: Megatron keeps all m together, in the last model chunk of a rank; write them "
            f"into one of the last {p} stages"
        )
    return StockLayout("the given layout", chunks, counts, ())


def _check_rounds(request: Request, chunks: int, words: str, remedy: str) -> None:
    """Refuse what Megatron has no schedule for, by ValueError."""
    p, m = request.job.p, request.job.m
    if chunks > 1 and (p == 1 or m % p):
        raise ValueError(
            f"{words}: Megatron has no schedule of {chunks} model chunks on each of {p} ranks with {m} "
            f"microbatches; {remedy}, or give --microbatches that --pp divides"
        )
