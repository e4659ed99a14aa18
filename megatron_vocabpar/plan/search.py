"""Searches how to spread a model over some GPUs: it lists every way to divide it, and plays the best ones.

Each way (t, p, c, e and the microbatch's size) has a bound: the work of the mean rank without any waiting.
The first ``MOST`` are played, in turn by their bounds and by what is expected of them: our schedules with
vocab-1, those with whole vocabulary layers and layers by hand, and Megatron's. For the best ten, what comes
near the best is played with all layouts, and with our other methods. What cannot be faster than the known
best of its kind or the tenth best kind, by its bound, is not played; what is not and comes not near the best
of all is not priced (``price.py``).

Estimates are mostly too high, by up to 7 % at few microbatches. So of ours and of Megatron's at least
``LEAST_WHOLE`` are simulated in full, in the order of their estimates, until no estimate is below the best.

Recomputation and an optimizer on the host save memory and cost time. A schedule takes the first rung of
``LADDER`` with which it fits, in the order of their bounds.

The same question always has the same answer: nothing depends on the clock.
Next: ``search_tables.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice, product
from math import inf
from statistics import fmean

from megatron_vocabpar.plan.choice import Choice, Request, longest_after_ms
from megatron_vocabpar.plan.choices import LEAST_WHOLE, ONLY_1F1B, choices_of, in_full
from megatron_vocabpar.plan.hardware import Hardware
from megatron_vocabpar.plan.job import Job, can_pair, refused
from megatron_vocabpar.plan.memory import GIB, RESERVED, Held, parameters_of, stage_memory
from megatron_vocabpar.plan.model import Model
from megatron_vocabpar.plan.stock_choices import quick_stock_choices
from megatron_vocabpar.plan.times import estimated_costs, layer_ms, step_ms
from megatron_vocabpar.plan.workers import mapping
from megatron_vocabpar.schedule.make.families import family_named
from megatron_vocabpar.schedule.times.costs import PassCosts
from megatron_vocabpar.schedule.words.methods import (
    BASELINE,
    INTERLACED,
    VOCAB_1,
    VOCAB_2,
    Method,
    method_named,
)
from megatron_vocabpar.schedule.words.placement import Placement

MOST = 128  # ways to divide a model that are played
_NEAR = 1.03  # estimates over their kind's best that are kept
BEST = 10
_MOST_WHOLE = 8  # simulated in full
_ALIKE = 2  # of them, the most with the same sizes, method and family
_LAYOUTS = 1  # that every way is played with
OURS = (  # baseline is the quickest to work out; of equally fast ones the first, which holds least, stays
    *((BASELINE, family) for family in ("v-half", "v-zb", "dualpipev", "zb-h1")),
    *((VOCAB_1, family) for family in ("v-min", "v-half", "v-zb", "dualpipev", "zb-h1", "1f1b")),
)
OTHERS = (VOCAB_2, INTERLACED)  # methods that only the best ways are played with
LADDER = tuple(product((False, True), ("none", "selective", "full")))
"""(The optimizer is on the host, what is recomputed)."""
_BATCH_TOKENS = 2**22  # of an iteration by default: 4 M, as for the models of the presets
_TENSOR, _CONTEXT, _MICRO_BATCH = (1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4)
# Larger microbatches help if the start of kernels limits the speed; otherwise they hold more and fill worse.
_DEEPEST = 32  # ranks of a pipeline: longer ones are slow to play
_LEAST_HELD = {
    "1f1b": 0.9, "zb-h1": 0.9, "v-min": 0.33, "v-half": 0.5, "v-zb": 0.8, "dualpipev": 0.9, "stock": 0.5
}  # fmt: skip
"""The least microbatches that a schedule holds, over the ranks; without that room it is not played."""


@dataclass(frozen=True)
class Question:
    """The question to a search: a model to spread over some GPUs.

    Attributes:
        batch: sequences of an iteration.
        fixed: sizes that the user has decided, by the names of ``Job``'s fields.
    """

    model: Model
    hardware: Hardware
    gpus: int
    batch: int
    limit_gib: float
    fixed: Mapping[str, int | bool | str] = field(default_factory=dict)


@dataclass(frozen=True)
class Found:
    """One way to divide the model, with one schedule that fits.

    Attributes:
        needed_gib: the GiB that the rung before needed, or the limit if they are unknown; 0 on the first.
    """

    request: Request
    choice: Choice
    needed_gib: float = 0.0

    @property
    def kind(self) -> tuple[object, ...]:
        """The key of which a search keeps the fastest result."""
        return _kind(self.request.job, self.choice.stock)


def usual_batch(model: Model, gpus: int) -> int:
    """The default number of sequences of an iteration: 4 M tokens, and at least two for each GPU."""
    return max(_BATCH_TOKENS // model.seq_length, 2 * gpus)


def candidates(question: Question) -> list[tuple[float, Job]]:
    """Every way to divide the model that Megatron accepts and that can fit, with its bound.

    In turn come the next by the bound and the next by ``expected_ms``. Each order alone hides winners: on 512
    GPUs, of 881 ways for DeepSeek-V3 a good one is 47th by the bound, and of 882 for gpt-oss-120b the best is
    91st by what is expected.
    """
    ways = []
    for job in _jobs(question):
        rung = next((one for one in rungs(question, job) if _fits_with(question, one, one.p / 3)), None)
        if rung is not None:
            ways.append((bound_ms(question, rung), expected_ms(question, rung), job))
    orders = (sorted(ways, key=lambda way: (way[k], _sizes(way[2]))) for k in (0, 1))
    return [(bound, job) for bound, _, job in dict.fromkeys(chain.from_iterable(zip(*orders, strict=True)))]


def _sizes(job: Job) -> tuple[int, ...]:
    return job.t, job.p, job.c, job.e, job.micro_batch


def _jobs(question: Question) -> Iterator[Job]:
    model, fixed = question.model, question.fixed

    def sizes(name: str, usual: Sequence[int]) -> Sequence[int]:
        return (int(fixed[name]),) if name in fixed else usual

    deepest = min(question.gpus, model.layers, _DEEPEST)
    experts = [2**power for power in range(10)] if model.experts else [1]
    of_all = (
        sizes("t", [t for t in _TENSOR if t <= question.hardware.per_node]),
        sizes("p", [p for p in range(1, deepest + 1) if question.gpus % p == 0]),
        sizes("c", _CONTEXT),
        sizes("e", [e for e in experts if e <= min(question.gpus, model.experts or 1)]),
        sizes("micro_batch", _MICRO_BATCH if question.hardware.rates.launch_ms and model.experts else (1,)),
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
            fp8=bool(fixed.get("fp8", False)), flex_dispatcher=bool(fixed.get("flex_dispatcher", False)),
        )  # fmt: skip
        if next(refused(model, job), None) is None:
            yield job


def bound_ms(question: Question, job: Job) -> float:
    """The ms that no schedule can undercut: the passes of the mean rank, and the optimizer's step."""
    model, gpu = question.model, question.hardware
    replicas = job.d * job.c if job.distributed_optimizer else 1
    step = step_ms(model.parameters / (job.p * job.t * replicas), gpu, offload=job.offload)
    return job.m * _work_ms(question, job, estimated_costs(model, job, gpu)) + step


def expected_ms(question: Question, job: Job) -> float:
    """About what the best schedule takes: also a quarter of 1F1B's idle time, and what gradients add."""
    model, gpu = question.model, question.hardware
    costs, parameters = estimated_costs(model, job, gpu), parameters_of(model, job, *_evenly(model, job.p))
    after = longest_after_ms(job, gpu, parameters, costs, w_chunks=2)
    return (job.m + (job.p - 1) / 4) * _work_ms(question, job, costs) + after


def _work_ms(question: Question, job: Job, costs: PassCosts) -> float:
    """The ms of the mean rank's passes of a microbatch."""
    layer = layer_ms(question.model, job, question.hardware)
    output = sum(costs.last_rank_extra.values()) + sum(costs.last_stage_extra.values())
    hidden = layer.hidden if can_pair(question.model, job) else 0.0
    each = layer.forward + layer.backward + layer.weights - hidden
    return (each * question.model.layers + output) / job.p


def _fits_with(question: Question, job: Job, held: float, *, mean: bool = False) -> bool:
    """Whether memory fits if layers are spread evenly and each rank holds ``held`` microbatches.

    Only the rank with the least memory is checked, or the mean rank without the buffers of vocabulary layers,
    which no layout or method makes lighter. So a job that could fit is never left out.
    """
    model, p = question.model, job.p
    stages = stage_memory(model, job, *_evenly(model, p), [Held(max(1.0, held))] * p)
    needed = min(stage.total for stage in stages)
    if mean:
        needed = fmean(one.total - (1.0 + RESERVED) * (one.output + one.inputs) for one in stages)
    return needed <= question.limit_gib * GIB


def _evenly(model: Model, p: int) -> tuple[Method, Placement, tuple[int, ...]]:
    """The lightest way to spread a model: vocabulary layers over all stages, layers as even as can be."""
    layers = tuple(model.layers // p + (stage < model.layers % p) for stage in range(p))
    return method_named(VOCAB_1 if p > 1 else BASELINE), Placement(p, 1, "standard"), layers


def rungs(question: Question, job: Job) -> list[Job]:
    """The job on each rung, by their bounds; only a distributed optimizer can move to the host."""
    fixed = question.fixed
    wanted = [
        replace(job, offload=offload, recompute=recompute)
        for offload, recompute in LADDER
        if (fixed.get("recompute", recompute), fixed.get("offload", offload)) == (recompute, offload)
        and (job.distributed_optimizer or not offload)
    ]
    return sorted(wanted, key=partial(bound_ms, question))


def tried(
    question: Question, job: Job, ours_ms: float = inf, stock_ms: float = inf, best_ms: float = inf
) -> list[Found]:
    """Our schedules that fit and the best of Megatron's, for this way to divide the model.

    Ours are left out if they take ``ours_ms`` or longer, and Megatron's if they take ``stock_ms``. With
    ``best_ms``, the least known of all ways, what comes near it stays.
    """
    ours: list[Found] = []
    for method, family in OURS if job.p > 1 else ():
        if can_pair(question.model, job) or not family_named(family).pairs:
            least = min(map(_ms, ours), default=inf)
            limits = min(ours_ms, least), _NEAR * min(best_ms, least)
            ours += _fitting(question, job, method, family, limits, _LAYOUTS)
    played = partial(quick_stock_choices, below_ms=stock_ms)
    stock = _cheapest(question, job, "stock", played, stock_ms)
    return [*_near(ours), *(one for one in sorted(stock, key=_ms)[:1] if _ms(one) < stock_ms)]


def _near(found: list[Found]) -> list[Found]:
    """Those that may be the fastest, if estimates are a little too high."""
    least = min(map(_ms, found), default=inf)
    return [one for one in found if _ms(one) <= _NEAR * least]


def _fitting(
    question: Question,
    job: Job,
    method: str,
    family: str,
    limits: tuple[float, float],
    most: int | None = None,
) -> list[Found]:
    """One method in one family with its layouts, or the ``most`` likeliest, unless one takes too long.

    ``limits`` are ``below_ms`` and ``near_ms`` of ``choices_of``.
    """
    below_ms, near_ms = limits

    def played(request: Request) -> list[Choice]:
        return choices_of(request, method, family, below_ms=below_ms, near_ms=near_ms, most=most)

    return _cheapest(question, job, family, played, below_ms)


def _cheapest(
    question: Question, job: Job, family: str, played: Callable[[Request], list[Choice]], below_ms: float
) -> list[Found]:
    """The choices that fit on the first rung on which any fits; none if all take ``below_ms`` or longer."""
    before = 0.0
    for rung in rungs(question, job):
        if bound_ms(question, rung) >= below_ms:
            return []
        if not _fits_with(question, rung, _LEAST_HELD[family] * job.p, mean=True):
            before = before or question.limit_gib
            continue
        request = Request(question.model, rung, question.hardware, question.limit_gib)
        choices = [one for one in played(request) if not one.problem]
        fitting = [Found(request, one, before) for one in choices if one.fits(request)]
        if fitting or not choices:
            return fitting
        before = min(one.peak_gib for one in choices)
    return []


def _ms(found: Found) -> float:
    return found.choice.iteration_ms


def search(
    question: Question, *, workers: int = 1, progress: Callable[[int, int], None] = lambda done, of: None
) -> list[Found]:
    """The best of each kind, fastest first; Megatron's best is among them, or comes last.

    ``progress`` is called with the number of ways that have been played, and the most that will be.
    """
    ways = candidates(question)
    best: dict[tuple[object, ...], Found] = {}
    found: list[Found] = []
    waiting, done, most = iter(ways[:MOST]), 0, min(MOST, len(ways))
    with mapping(workers) as each:
        while batch := list(islice(waiting, 2 * workers)):
            limits = ([_known_ms(best, job, stock) for _, job in batch] for stock in (False, True))
            least = [_times(best, False)[0]] * len(batch)
            for of_way in each(tried, [question] * len(batch), [job for _, job in batch], *limits, least):
                found += of_way
                for one in of_way:
                    if one.kind not in best or _ms(one) < _ms(best[one.kind]):
                        best[one.kind] = one
            done += len(batch)
            progress(done, most)
        few = sorted((one for one in best.values() if not one.choice.stock), key=_ms)[:BEST]
        of_kinds = [[one for one in found if one.kind == kind] for kind in (one.kind for one in _near(few))]
        for more in each(_in_other_ways, [question] * len(of_kinds), of_kinds):
            found += more
    return _best_of_kinds(_whole(found))


def _in_other_ways(question: Question, found: list[Found]) -> list[Found]:
    """The families that came near the best of one kind, with our other methods and layouts."""
    more: list[Found] = []
    near, known = _near(found), set()
    for one in near:
        family, job = one.choice.family, one.request.job
        for method in dict.fromkeys((one.choice.method, *OTHERS)):
            if family == "1f1b" or method not in ONLY_1F1B:
                key = method, family, replace(job, offload=False, recompute="none")
                if key not in known:
                    known.add(key)
                    least = min(map(_ms, [*near, *more]))
                    more += _fitting(question, job, method, family, (least, _NEAR * least))
    return more


def _known_ms(best: Mapping[tuple[object, ...], Found], job: Job, stock: bool) -> float:
    """The least ms known of a way's kind, or the tenth of all kinds, if that is less."""
    known = best.get(_kind(job, stock))
    return min(_ms(known) if known else inf, _times(best, stock)[BEST - 1])


def _kind(job: Job, stock: bool) -> tuple[object, ...]:
    """How weights are divided, and whether Megatron runs it by itself."""
    return job.t, job.p, job.e, stock


def _times(best: Mapping[tuple[object, ...], Found], stock: bool) -> list[float]:
    """The ms of the ten best kinds of ours or of Megatron's; of those not known yet, infinite."""
    return sorted([*(_ms(one) for one in best.values() if one.choice.stock == stock), *[inf] * BEST])[:BEST]


def _whole(found: list[Found]) -> list[Found]:
    """The list with what could be the fastest of ours and of Megatron's simulated in full.

    For example, an estimate of 1,396 ms behind one of 1,388 ms is 1,362 ms in full, and the first 1,374 ms.
    The best by the other reading of ``price.py`` is simulated, too. What then does not fit, or is estimated
    below the best and was not simulated, is left out.
    """
    checked: list[Found] = []
    for stock in (False, True):
        least, done, alike = inf, 0, Counter[tuple[object, ...]]()
        side = sorted((each for each in found if each.choice.stock == stock), key=_ms)
        other = min(side, key=_other_ms, default=None)
        for one in sorted(side, key=lambda one: one is not other):
            enough = done >= LEAST_WHOLE and _ms(one) >= least
            same = one.request.job, one.choice.method, one.choice.family
            if enough:
                checked.append(one)
            elif done < _MOST_WHOLE and alike[same] < _ALIKE:
                done, alike[same] = done + 1, alike[same] + 1
                full = replace(one, choice=in_full(one.request, one.choice, least))
                if full.choice.fits(full.request):
                    least = min(least, _ms(full))
                    checked.append(full)
    return checked


def _other_ms(found: Found) -> float:
    return found.choice.other_ms


def _best_of_kinds(found: list[Found]) -> list[Found]:
    """The fastest of each kind, in order; one that was simulated in full comes before one that was not."""
    best: dict[tuple[object, ...], Found] = {}
    for one in sorted(found, key=lambda one: (_ms(one), not one.choice.exact)):
        best.setdefault(one.kind, one)
    return list(best.values())
