"""Parallel configurations of a model on some GPUs: each has a bound on its time, and the best are played.

Each configuration (t, p, c, e and the microbatch's size) has a bound: the work of the mean rank without any
waiting. The first ``MOST`` are played, in turn by their bounds and by expected times: our schedules with
vocab-1, our schedules with whole vocabulary layers and layers by hand, and Megatron's. For the best ten, the
families that come near the best are played with all layouts, and with our other methods. A configuration is
not played if its bound is above the best time of its kind, or above that of the tenth best kind. A schedule
that is neither faster than these nor near the best of all is not priced (``price.py``). ``choose`` then finds
the fastest of ours and of Megatron's.

What saves memory comes only where memory needs it (``variants.py``).
Megatron's FSDP, which has no pipeline, is worked out for all configurations (``fsdp.py``).

The same question always has the same answer: nothing depends on the clock.
Next: ``answer.py``, which prints them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import chain, islice, product
from math import inf
from typing import Any

from megatron_vocabpar.plan.choice import Choice, Request
from megatron_vocabpar.plan.choices import ONLY_1F1B, choices_of, fastest, mapping
from megatron_vocabpar.plan.fsdp import fsdp_choices
from megatron_vocabpar.plan.job import Job, in_whole_layers, refused
from megatron_vocabpar.plan.layer_counts import layouts_of
from megatron_vocabpar.plan.model import Model
from megatron_vocabpar.plan.plays import quick_stock_choices
from megatron_vocabpar.plan.stage_memory import evenly, parameters_of
from megatron_vocabpar.plan.times import can_pair, estimated_costs, longest_tail_ms, work_ms
from megatron_vocabpar.plan.variants import (
    Question,
    Variants,
    bound_ms,
    fits_with,
    memory_variants,
)
from megatron_vocabpar.schedule.make.families import family_named
from megatron_vocabpar.schedule.words.methods import (
    BASELINE,
    INTERLACED,
    VOCAB_1,
    VOCAB_2,
)

MOST = 128  # configurations that are played
_NEAR_BEST = 1.03  # estimates over their kind's best that are kept
BEST = 10
_MOST_FULL = 6  # full plays of ours, and of Megatron's
_ALIKE = 2  # of them, the most with the same configuration, method and family
_LAYOUTS = 1  # that every configuration is played with
OURS = (  # baseline is the quickest to work out; of equally fast ones the first, which holds least, stays
    *((BASELINE, family) for family in ("v-half", "v-zb", "dualpipev", "zb-h1")),
    *((VOCAB_1, family) for family in ("v-min", "v-half", "v-zb", "dualpipev", "zb-h1", "1f1b")),
)
OTHERS = (VOCAB_2, INTERLACED)  # methods that only the best configurations are played with
_BATCH_TOKENS = 2**22  # of an iteration by default: 4 M, as for the models of the presets
_TENSOR, _CONTEXT, _MICRO_BATCH = (1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4)
_SHARDED_MICRO_BATCH = (1, 2, 4, 8)  # with FSDP a larger microbatch gathers weights less often
_DEEPEST = 32  # ranks of a pipeline: longer ones are slow to play


def usual_batch(model: Model, gpus: int) -> int:
    """The default number of sequences of an iteration: 4 M tokens, and at least two for each GPU."""
    return max(_BATCH_TOKENS // model.seq_length, 2 * gpus)


def configurations(question: Question) -> list[tuple[float, Job]]:
    """Every parallel configuration that Megatron accepts and that can fit, with its bound.

    In turn come the next by the bound and the next by ``expected_ms``. Each order alone hides winners: on 512
    GPUs, of 881 for DeepSeek-V3 a good one is 47th by the bound, and of 882 for gpt-oss-120b the best is 91st
    by what is expected.
    """
    fitting = []
    for job in _jobs(question):
        variants = memory_variants(question, job)
        fits = next((variant for variant in variants if fits_with(question, variant, variant.p / 3)), None)
        if fits is not None:
            fitting.append((bound_ms(question, fits), expected_ms(question, fits), job))
    orders = (sorted(fitting, key=lambda row: (row[k], _sizes(row[2]))) for k in (0, 1))
    in_turn = dict.fromkeys(chain.from_iterable(zip(*orders, strict=True)))
    return [(bound, job) for bound, _, job in in_turn]


def _sizes(job: Job) -> tuple[int, ...]:
    return job.t, job.p, job.c, job.e, job.micro_batch


def _jobs(question: Question, micro_batches: Sequence[int] | None = None) -> Iterator[Job]:
    """Every job that Megatron accepts; ``micro_batches`` are other sizes than the usual ones."""
    model, fixed = question.model, question.fixed
    if micro_batches is None:
        # Larger ones help if the start of kernels limits the speed; else they hold more and fill worse.
        micro_batches = _MICRO_BATCH if question.hardware.rates.launch_ms and model.experts else (1,)

    def sizes(name: str, usual: Sequence[int]) -> Sequence[int]:
        return (int(fixed[name]),) if name in fixed else usual

    deepest = min(question.gpus, model.layers, _DEEPEST)
    experts = [2**power for power in range(10)] if model.experts else [1]
    of_all = (
        sizes("t", [t for t in _TENSOR if t <= question.hardware.per_node]),
        sizes("p", [p for p in range(1, deepest + 1) if question.gpus % p == 0]),
        sizes("c", _CONTEXT),
        sizes("e", [e for e in experts if e <= min(question.gpus, model.experts or 1)]),
        sizes("micro_batch", micro_batches),
    )
    for t, p, c, e, b in product(*of_all):
        d, left = divmod(question.gpus, t * p * c)
        if (
            left
            or not d
            or d * t * c % e
            or question.batch % (b * d)
            or (c > 1 and model.seq_length < 2048 * c)
        ):
            continue
        job = Job(
            p=p, t=t, c=c, d=d, e=e, m=question.batch // (b * d), micro_batch=b,
            distributed_optimizer=bool(fixed.get("distributed_optimizer", d * c > 1)),
            fp8=bool(fixed.get("fp8", False)),
            fp4=bool(fixed.get("fp4", False)),
            flex_dispatcher=bool(fixed.get("flex_dispatcher", e > 1 and question.hardware.flex_backend)),
            tp_overlap=bool(fixed.get("tp_overlap", t > 1 and question.hardware.userbuffers)),
        )  # fmt: skip
        if next(refused(model, job), None) is None:
            yield job


def expected_ms(question: Question, job: Job) -> float:
    """About what the best schedule takes: also a quarter of 1F1B's idle time, and what gradients add."""
    model, gpu = question.model, question.hardware
    parameters = parameters_of(model, job, *evenly(model, job.p))
    costs = estimated_costs(model, job, gpu)
    after = longest_tail_ms(job, gpu, parameters, costs, w_chunks=2)
    return (job.m + (job.p - 1) / 4) * work_ms(model, job, gpu, costs) + after


def quick_plays(
    question: Question, job: Job, ours_ms: float = inf, stock_ms: float = inf, best_ms: float = inf
) -> list[Choice]:
    """Our schedules that fit and the best of Megatron's, in this configuration.

    Ours are left out if they take ``ours_ms`` or longer, and Megatron's if they take ``stock_ms``. With
    ``best_ms``, the least known of all configurations, what comes near it stays.
    """
    ours: list[Choice] = []
    possible = OURS if job.p > 1 else ()
    variants = Variants(question, job)
    for method, family in possible:
        if can_pair(question.model, job) or not family_named(family).pairs:
            least = min(map(_ms, ours), default=inf)
            limits = min(ours_ms, least), _NEAR_BEST * min(best_ms, least)
            ours += _fitting(variants, method, family, limits, _LAYOUTS)
    stock: list[Choice] = []
    bound = cache(partial(bound_ms, question))
    for overlaps in (False, True) if can_pair(question.model, job) else (False,):  # which holds more
        fitted: dict[_Placed, float] = {}  # the least bound of a variant in which a layout fits

        def played(
            request: Request,
            below_ms: float,
            overlaps: bool = overlaps,
            fitted: dict[_Placed, float] = fitted,
        ) -> list[Choice]:
            further = [
                layout
                for layout in layouts_of(request)
                if layout.overlaps == overlaps
                and bound(in_whole_layers(request.job, layout.layers))
                < fitted.get((layout.name, layout.layers), inf)
            ]
            choices = quick_stock_choices(request, further, below_ms)
            done = (choice for choice in choices if choice.fits or choice.problem)
            fitted.update({(choice.family, choice.layers): bound(choice.request.job) for choice in done})
            return choices

        below_ms = min([stock_ms, *map(_ms, stock)])
        found = variants.fastest(None, played, below_ms)
        stock += found[1] if found else []
    return [*_near_best(ours), *(choice for choice in sorted(stock, key=_ms)[:1] if _ms(choice) < stock_ms)]


_Placed = tuple[str, tuple[int, ...]]
"""A layout's name and its layers: two by hand have the same name."""


def _near_best(choices: list[Choice]) -> list[Choice]:
    """Those that may be the fastest, if estimates are a little too high."""
    least = min(map(_ms, choices), default=inf)
    return [choice for choice in choices if _ms(choice) <= _NEAR_BEST * least]


def _fitting(
    variants: Variants,
    method: str,
    family: str,
    limits: tuple[float, float],
    most: int | None = None,
) -> list[Choice]:
    """One method in one family with its layouts, or the ``most`` likeliest, unless one takes too long.

    ``limits`` are ``below_ms`` and ``near_ms`` of ``choices_of``.
    """
    below_ms, near_ms = limits

    def played(request: Request, below_ms: float) -> list[Choice]:
        return choices_of(request, method, family, below_ms=below_ms, near_ms=near_ms, most=most)

    found = variants.fastest(family_named(family), played, below_ms)
    return found[1] if found else []


def _ms(choice: Choice) -> float:
    return choice.iteration_ms


def best_configurations(
    question: Question, *, workers: int = 1, progress: Callable[[int, int], None] = lambda done, of: None
) -> list[Choice]:
    """The best choice of each kind, fastest first; Megatron's best is among them, or comes last.

    ``progress`` is called with the number of configurations that have been played, and the most that will be.
    """
    jobs = [job for _, job in configurations(question)[:MOST]]
    best: dict[Kind, Choice] = {}
    played: list[Choice] = []
    waiting, done = iter(jobs), 0
    with mapping(workers) as mapper:
        while batch := list(islice(waiting, 2 * workers)):
            limits = ([_known_ms(best, job, stock) for job in batch] for stock in (False, True))
            least = [_times(best, False)[0]] * len(batch)
            for of_job in mapper(quick_plays, [question] * len(batch), batch, *limits, least):
                played += of_job
                for choice in of_job:
                    kind = kind_of(choice)
                    if kind not in best or _ms(choice) < _ms(best[kind]):
                        best[kind] = choice
            done += len(batch)
            progress(done, len(jobs))
        ours = sorted((choice for choice in best.values() if not choice.stock), key=_ms)[:BEST]
        kinds = [kind_of(choice) for choice in _near_best(ours)]
        of_kinds = [[choice for choice in played if kind_of(choice) == kind] for kind in kinds]
        for further in mapper(_other_plays, [question] * len(of_kinds), of_kinds):
            played += further
    in_full = [*_play_side_in_full(played, False), *_play_side_in_full(played, True)]
    return _best_of_kinds([*in_full, *sharded(question)])  # whose times are whole, and take no play's place


def sharded(question: Question) -> list[Choice]:
    """Megatron's FSDP in every configuration of one stage in which it fits; the fastest of each kind."""
    best: dict[Kind, Choice] = {}
    for job in _jobs(question, _SHARDED_MICRO_BATCH):
        if job.p > 1:
            continue
        for variant in memory_variants(question, replace(job, distributed_optimizer=True)):
            if variant.offload or variant.precision_aware:
                continue
            request = Request(question.model, variant, question.hardware, question.limit_gib)
            for choice in fsdp_choices(request):
                kind = kind_of(choice)
                if choice.fits and (kind not in best or _ms(choice) < _ms(best[kind])):
                    best[kind] = choice
    return list(best.values())


def _other_plays(question: Question, played: list[Choice]) -> list[Choice]:
    """The families that came near the best of one kind, with our other methods and layouts."""
    further: list[Choice] = []
    near, asked = _near_best(played), set()
    for choice in near:
        family, job = choice.family, choice.request.job
        for method in dict.fromkeys((choice.method, *OTHERS)):
            if family == "1f1b" or method not in ONLY_1F1B:
                plain: dict[str, Any] = {"offload": 0.0, "precision_aware": False, "recompute": "none"}
                key = method, family, replace(job, recomputed=1.0, **plain)
                if key not in asked:
                    asked.add(key)
                    least = min(map(_ms, [*near, *further]))
                    limits = least, _NEAR_BEST * least
                    further += _fitting(Variants(question, job), method, family, limits)
    return further


Kind = tuple[int, int, int, bool]
"""How weights are divided, t, p and e, and whether Megatron runs it by itself: the best of each is kept."""


def kind_of(choice: Choice) -> Kind:
    """The key of which the fastest choice is kept."""
    return _kind(choice.request.job, choice.stock)


def _kind(job: Job, stock: bool) -> Kind:
    return job.t, job.p, job.e, stock


def _known_ms(best: Mapping[Kind, Choice], job: Job, stock: bool) -> float:
    """The least ms known of a job's kind, or the tenth of all kinds, if that is less."""
    fastest_of_kind = best.get(_kind(job, stock))
    return min(_ms(fastest_of_kind) if fastest_of_kind else inf, _times(best, stock)[BEST - 1])


def _times(best: Mapping[Kind, Choice], stock: bool) -> list[float]:
    """The ms of the ten best kinds of ours or of Megatron's; of those not known yet, infinite."""
    return sorted([*(_ms(choice) for choice in best.values() if choice.stock == stock), *[inf] * BEST])[:BEST]


def _play_side_in_full(played: list[Choice], stock: bool) -> list[Choice]:
    """Ours or Megatron's, with what could be the fastest of them played in full.

    What then does not fit, or is estimated below the best and was not played in full, is left out. Of choices
    that take equally long with the same layout, such as with experts over four and over eight GPUs of a node,
    only the first stays.
    """
    alike, lasting = Counter[tuple[object, ...]](), set[tuple[object, ...]]()
    side = []
    for choice in sorted((choice for choice in played if choice.stock == stock), key=_ms):
        schedule = choice.method, choice.family
        same, equal = (choice.request.job, *schedule), (*schedule, choice.layers, _ms(choice))
        alike[same] += 1
        if alike[same] <= _ALIKE and equal not in lasting:
            lasting.add(equal)
            side.append(choice)
    ranked = fastest(side, most=_MOST_FULL)
    least = min((choice.known_ms for choice in ranked if choice.is_full), default=inf)
    return [choice for choice in ranked if choice.fits and (choice.is_full or _ms(choice) >= least)]


def _best_of_kinds(choices: list[Choice]) -> list[Choice]:
    """The fastest of each kind, in order; one that was played in full comes before one that was not."""
    best: dict[Kind, Choice] = {}
    for choice in sorted(choices, key=lambda choice: (_ms(choice), not choice.exact)):
        best.setdefault(kind_of(choice), choice)
    return list(best.values())
