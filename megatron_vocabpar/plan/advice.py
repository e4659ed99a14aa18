"""Sentences on choices: why the best is the best, what binds it, whose schedule is faster, what would fit.

The verdict on our best and Megatron's best is *ours*, *stock's* or *within the error*. Its error is that of
ratios beside published pairs of runs of the same class of model: pairs of schedules if both have the same
sizes, else pairs of parallel configurations. What the gain would be at either end of the price (``price.py``)
adds to it. For example, a gain of 5 % is ours if schedules are met within 2 % and the ends of the price
make it 4 and 7 %.

Next: ``answer.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_vocabpar.plan.choice import Choice, Request
from megatron_vocabpar.plan.choices import choice_of
from megatron_vocabpar.plan.configurations import BEST
from megatron_vocabpar.plan.hardware import Hardware, hardware_presets
from megatron_vocabpar.plan.job import Job
from megatron_vocabpar.plan.model import Model
from megatron_vocabpar.plan.price import CHANNEL_GB_S, pair_error
from megatron_vocabpar.plan.times import layer_ms
from megatron_vocabpar.plan.variants import Question
from megatron_vocabpar.schedule.words.methods import BASELINE, REDIS, VOCAB_1, VOCAB_2

_SAYS = 0.02  # parts of the time that are at least this share of it are named
_SUFFICES = 1.03  # redistribution suffices if its time over the best choice's is at most this
_CLOSE = 1.02  # choices are named if their time over the best choice's is at most this
_LEAN = tuple((VOCAB_2, family) for family in ("1f1b", "v-half", "v-min"))  # tried with each remedy


@dataclass(frozen=True)
class Verdict:
    """How many times as fast our best is as Megatron's best.

    Attributes:
        gain: planned.
        pairs: the mean error of such ratios beside published pairs, relative.
        spread: how much the gain differs at the ends of the price, at most.
        alike: both have the same sizes, so that only the schedule differs.
    """

    gain: float
    pairs: float
    spread: float
    alike: bool

    @property
    def error(self) -> float:
        """Of the gain."""
        return self.pairs + self.spread

    @property
    def word(self) -> str:
        """``ours``, ``stock's`` or ``within the error``."""
        if abs(self.gain - 1.0) <= self.error:
            return "within the error"
        return "ours" if self.gain > 1.0 else "stock's"

    def __str__(self) -> str:
        of = "schedules of equal sizes" if self.alike else "parallel configurations"
        error, pairs, spread = (f"{100 * share:.1f} %" for share in (self.error, self.pairs, self.spread))
        return (
            f"Verdict: {self.word}. Ours is {self.gain:.2f} times as fast as Megatron's best, with an error "
            f"of {error}: ratios of published {of} are met within {pairs}, and what runs beside layers adds "
            f"{spread}"
        )


def verdict(choices: Sequence[Choice]) -> Verdict | None:
    """The verdict on choices that fit; None unless there are ours and Megatron's."""
    ours, stock = (
        min((c for c in choices if c.stock == is_stock), key=lambda c: c.iteration_ms, default=None)
        for is_stock in (False, True)
    )
    if ours is None or stock is None:
        return None
    request, gain = ours.request, stock.iteration_ms / ours.iteration_ms
    at_ends = (stock.at_ms(price) / ours.at_ms(price) for price in request.price.ends)
    alike = request.job == stock.request.job
    pairs = pair_error("experts" if request.model.experts else "dense", alike=alike)
    return Verdict(gain, pairs, max((abs(at - gain) for at in at_ends), default=0.0), alike)


def channels(best: Choice) -> list[str]:
    """A sentence on how few channels of NCCL suffice for our collectives, if that is known."""
    if not best.channels:
        return []
    return [
        f"Its collectives delay no pass on {best.channels} channels of NCCL, the default, if one carries "
        f"{CHANNEL_GB_S:g} GB/s, which is assumed; see --vocab-parallel-channels"
    ]


def reasons(choices: Sequence[Choice], best: Choice) -> list[str]:
    """Sentences on why ``best`` is the best."""
    model, job = best.request.model, best.request.job
    outputs, layer = (1 + model.mtp_depths) * model.output_flops, model.matmul_flops + model.attention_flops
    lines = [
        f"The output layer is as much work as {outputs / layer:.1f} layers, and a stage has "
        f"{model.layers / job.p:.3g}."
    ]
    if model.layers % job.p and not model.pattern:
        most = -(-model.layers // job.p)
        even = [str(p) for p in range(2, 2 * job.p) if model.layers % p == 0]
        lines.append(
            f"{model.layers} layers do not divide by {job.p} ranks: the busiest has {most}, "
            f"{100 * (most * job.p / model.layers - 1):.0f} % more than the mean, except where layers move"
            + (f"; {', '.join(even[-3:])} ranks would be even." if even else ".")
        )
    fitting = [choice for choice in choices if choice.fits]
    baseline = _find(choices, BASELINE, "1f1b")
    if baseline is not None and best is not baseline and not baseline.problem:
        gain = baseline.iteration_ms / best.iteration_ms
        unfit = "" if baseline.fits else ", which does not fit"
        lines.append(
            f"{best.name} is {gain:.2f} times as fast as the baseline in 1f1b{unfit}; its fullest rank "
            f"holds {best.peak_gib:.1f} GiB against {baseline.peak_gib:.1f}."
        )
    near = [
        choice
        for choice in fitting
        if choice is not best and choice.iteration_ms <= _CLOSE * best.iteration_ms
    ]
    if near:
        lean = min(near, key=lambda choice: choice.peak_gib)
        names = ", ".join(choice.name for choice in near)
        lines.append(
            f"Within {100 * (_CLOSE - 1):.0f} % of it: {names}; the least memory of these has {lean.name}, "
            f"{lean.peak_gib:.1f} GiB."
        )
    faster = [
        choice
        for choice in choices
        if not choice.problem and not choice.fits and choice.iteration_ms < best.iteration_ms
    ]
    if faster:
        lines.append(f"Faster, but too large: {', '.join(choice.name for choice in faster)}.")
    return lines + channels(best) + redistribution(choices)


def redistribution(choices: Sequence[Choice]) -> list[str]:
    """A sentence if moving layers away from the last stage is enough; else none."""
    moved = _find(choices, REDIS, "1f1b")
    in_1f1b = (_find(choices, method, "1f1b") for method in (VOCAB_1, VOCAB_2))
    partitioned = [choice for choice in in_1f1b if choice is not None and not choice.problem]
    if moved is None or moved.problem or not partitioned:
        return []
    best = min(partitioned, key=lambda choice: choice.iteration_ms)
    ratio = moved.iteration_ms / best.iteration_ms
    if ratio > _SUFFICES:
        return []
    kind = "a large mixture of experts" if moved.request.model.experts else "this model and pipeline"
    fits = "" if moved.fits else ", but it does not fit"
    left = ["memory"] if best.peak_gib < moved.peak_gib else []
    return [
        f"Redistribution suffices for the time: for {kind} redis in 1f1b takes "
        f"{100 * abs(ratio - 1):.1f} % {'more' if ratio > 1 else 'less'} than {best.name}{fits}; they hold "
        f"{moved.peak_gib:.1f} and {best.peak_gib:.1f} GiB. What is left for a partitioned vocabulary is "
        f"{' and '.join([*left, 'multi-token prediction'])}."
    ]


def remedies(request: Request, fitting: Callable[[Request], Choice | None] | None = None) -> list[str]:
    """Changes that would make a choice fit, the cheapest first.

    Args:
        fitting: the choice that fits a changed request, if there is one; by default a lean one of ours.

    If no single change suffices, they are added up: the one line then has the sizes with all of them.
    """
    fitting = fitting or _fitting
    fits = []
    grown = request
    for words, changed in _changes(request):
        choice = fitting(changed)
        if choice is not None:
            fits.append(f"{words}: {choice.name}, {choice.peak_gib:.1f} GiB")
            if changed.limit_gib > request.limit_gib:
                break  # larger ones would do too
    if fits:
        return fits
    for _ in range(6):
        _, changed = next(_changes(grown), ("", grown))
        if changed is grown:
            break
        grown = changed
        choice = fitting(grown)
        if choice is not None:
            gpus = f"{grown.job.gpus} GPUs of {grown.limit_gib:.0f} GiB"
            return [f"{sizes_of(grown.job)} on {gpus}: {choice.name}, {choice.peak_gib:.1f} GiB"]
    return []


def _changes(request: Request) -> Iterator[tuple[str, Request]]:
    job, model = request.job, request.model

    def changed(**values: object) -> Request:
        return replace(request, job=replace(job, **values))  # type: ignore[arg-type]

    if job.d > 1 and not job.distributed_optimizer:
        yield "--distributed-optimizer", changed(distributed_optimizer=True)
    if model.experts and job.e < job.d * job.t:
        yield f"expert parallel size {job.d * job.t}", changed(e=job.d * job.t)
    if job.recompute == "none":
        yield "--recompute selective, which runs norms and MLPs again", changed(recompute="selective")
    if (job.recompute, job.recomputed) != ("full", 1.0):
        yield "--recompute, which costs one more forward pass", changed(recompute="full", recomputed=1.0)
    if 2 * job.t <= request.hardware.per_node and model.heads % (2 * job.t) == 0:
        t = 2 * job.t
        yield f"tensor parallel size {t} ({2 * job.gpus} GPUs)", changed(t=t)
    if 2 * job.p <= model.layers:
        yield f"pipeline size {2 * job.p} ({2 * job.gpus} GPUs)", changed(p=2 * job.p)
    larger = [gpu for gpu in hardware_presets().values() if gpu.memory_gib > request.limit_gib]
    for gpu in sorted(larger, key=lambda gpu: gpu.memory_gib):
        yield f"GPUs with {gpu.memory_gib:.0f} GiB ({gpu.name})", replace(request, limit_gib=gpu.memory_gib)


def _fitting(request: Request) -> Choice | None:
    """The fastest of the lean choices that fits."""
    lean = [choice_of(request, method, family) for method, family in _LEAN]
    return min(
        (choice for choice in lean if choice.fits), key=lambda choice: choice.iteration_ms, default=None
    )


def _find(choices: Sequence[Choice], method: str, family: str) -> Choice | None:
    return next((choice for choice in choices if (choice.method, choice.family) == (method, family)), None)


def summary(request: Request) -> list[str]:
    """Two lines: the model, then the job, its GPUs and the source of its times."""
    model, job, gpu = request.model, request.job, request.hardware
    shape = f"V {model.vocab:,}, H {model.hidden:,}, L {model.layers}, s {model.seq_length:,}"
    times = "measured costs" if request.measured else "estimated from its data sheet"
    return [
        f"{model.name}: {model.parameters / 1e9:.1f} B parameters, {shape}",
        f"{sizes_of(job)}: {job.gpus} {gpu.name}, {request.limit_gib:.1f} GiB each; {job.m} microbatches of "
        f"{job.micro_batch}; times {times}",
    ]


def headline(question: Question) -> str:
    """The question in a line."""
    model, gpu = question.model, question.hardware
    return (
        f"{model.name}: {model.parameters / 1e9:.1f} B parameters on {question.gpus} {gpu.name}, "
        f"{question.limit_gib:.1f} GiB each; {question.batch} sequences of {model.seq_length:,} tokens"
    )


def sizes_of(job: Job) -> str:
    """A job's sizes and its unusual settings: ``p 8, t 1, d 1, recompute full``."""
    sizes = [f"p {job.p}", f"t {job.t}", f"d {job.d}"]
    sizes += [f"c {job.c}"] if job.c > 1 else []
    sizes += [f"e {job.e}"] if job.e > 1 else []
    sizes += [f"recompute {recomputation(job)}"] if job.recompute != "none" else []
    sizes += ["distributed optimizer"] if job.distributed_optimizer else []
    sizes += ["precision-aware optimizer"] if job.precision_aware else []
    part = "" if job.offload == 1.0 else f"{job.offload:.0%} of the "
    sizes += [f"{part}optimizer on the host"] if job.offload else []
    sizes += ["fp8"] if job.fp8 else ["NVFP4"] if job.fp4 else []
    return ", ".join(sizes)


def recomputation(job: Job) -> str:
    """What a job recomputes, in a word or two."""
    partly = job.recompute == "full" and job.recomputed < 1.0
    return f"full in {job.recomputed:.0%} of layers" if partly else job.recompute


def model_notes(model: Model) -> list[str]:
    """What has to be known of the model's flags, in sentences."""
    if not model.softcap:
        return []
    return [
        f"Its softcap of logits, {model.softcap:g}, is a flag of methods that partition the vocabulary alone."
    ]


def shares(choice: Choice) -> dict[str, float]:
    """The losses of time in an iteration of the mean rank, as shares of it."""
    request = choice.request
    model, job = request.model, request.job
    layer = layer_ms(model, job, request.hardware)
    of_all = job.m * model.layers / job.p / choice.iteration_ms
    return {
        "idle ranks": choice.idle,
        "tensor parallelism": 2 * layer.tensor * of_all,
        "context parallelism": 3 * layer.context * of_all,
        "the exchange of experts": (2 * layer.exchange - (layer.hidden if choice.pairs else 0.0)) * of_all,
        "recomputation": layer.repeated * of_all,
        "gradients and the step": choice.tail_ms / choice.iteration_ms,
    }


def binds(choice: Choice) -> str:
    """In words, the largest losses of time, and the memory that faster settings would need."""
    parts = sorted(shares(choice).items(), key=lambda part: -part[1])
    causes = [f"{name} {100 * share:.0f} %" for name, share in parts[:2] if share >= _SAYS]
    if choice.needed_gib:
        causes.append(f"memory: more than {choice.request.limit_gib:.0f} GiB without what is saved")
    return ", ".join(causes) or "operations"


def stock_best(choices: Sequence[Choice]) -> Choice | None:
    """The fastest that Megatron can run without this package."""
    return next((choice for choice in choices if choice.stock), None)


def shown(choices: Sequence[Choice]) -> list[Choice]:
    """The best entries, and Megatron's best behind them if it is not among them."""
    best, stock = list(choices[:BEST]), stock_best(choices)
    return best if stock is None or stock in best else [*best, stock]


def megatrons_best(choices: Sequence[Choice]) -> str:
    """What Megatron's best by itself is, in a sentence; empty if it is the best of all, or none fits."""
    stock = stock_best(choices)
    if stock is None or stock is choices[0]:
        return ""
    return f"Megatron's best by itself is {stock.name} with {sizes_of(stock.request.job)}"


def nothing_fits(question: Question) -> str:
    """The advice if no configuration fits."""
    least = question.model.parameters * 6 * 1.12 / question.gpus / 2**30
    fixed = (
        f" with {', '.join(f'{name} {value}' for name, value in question.fixed.items())}"
        if question.fixed
        else ""
    )
    return (
        f"Nothing fits{fixed}. Weights and gradients alone take {least:.0f} GiB a GPU where they are divided "
        "over all of them; use more GPUs (--gpus), larger ones (--hardware), shorter sequences (--seq-length)"
        + (", or leave sizes open." if question.fixed else ".")
    )


def sources(hardware: Hardware) -> Iterator[str]:
    """A line for every number about the GPU, with its source."""
    for name, source in hardware.sources.items():
        value = getattr(hardware, name)
        yield f"{name} {value if isinstance(value, str | bool) else format(value, ',g')}: {source}"
    for name, source in hardware.rates.sources.items():
        yield f"share {name} {getattr(hardware.rates, name):g}: {source}"
