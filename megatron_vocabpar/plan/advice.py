"""Turns a table of choices into advice: the best one, its flags, why, and what would make one fit.

Next: ``tables.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron_vocabpar.plan.channels import CHANNEL_GB_S
from megatron_vocabpar.plan.choice import STOCK, Choice, Request
from megatron_vocabpar.plan.choices import choice_of
from megatron_vocabpar.plan.hardware import hardware_presets
from megatron_vocabpar.plan.job import OVERLAP
from megatron_vocabpar.plan.pattern import written_in
from megatron_vocabpar.plan.stock import written
from megatron_vocabpar.plan.write_arguments import job_arguments
from megatron_vocabpar.schedule.make.families import family_named
from megatron_vocabpar.schedule.words.methods import BASELINE, REDIS, VOCAB_1, VOCAB_2, method_named

_SUFFICES = 1.03  # redistribution suffices if its time over the best choice's is at most this
_CLOSE = 1.02  # choices are named if their time over the best choice's is at most this
_LEAN = tuple((VOCAB_2, family) for family in ("1f1b", "v-half", "v-min"))  # tried with each remedy


def flags_of(choice: Choice) -> list[str]:
    """Megatron's flags for the job's sizes, the layout and this package, beside those of the model itself."""
    placing = placing_flags(choice)
    return [*job_arguments(choice.request.model, choice.request.job), *placing]


def placing_flags(choice: Choice) -> list[str]:
    """The flags of this package, and Megatron's flags that place the layers."""
    if choice.method == STOCK:
        return list(choice.flags)
    request, family = choice.request, family_named(choice.family)
    flags = []
    if request.model.pattern:  # redis places its bars when the training starts
        bars = choice.method != REDIS and len(choice.layers) > 1
        flags += [written_in(request.model.written_pattern, choice.layers)] if bars else []
    elif choice.method == REDIS:
        flags.append(f"--final-stage-num-layers {choice.layers[-1]}")
    elif len(set(choice.layers)) > 1:
        flags.append(written(choice.layers, request.model.mtp_depths))
    elif family.chunks > 1:
        flags.append(f"--num-virtual-stages-per-pipeline-rank {family.chunks}")
    if (choice.method, choice.family) == (BASELINE, "1f1b"):
        return flags
    if family.pairs:
        flags += OVERLAP[:1] if family.splits_w else OVERLAP  # W in B may be delayed within the pair
    flags += ["--enable-vocab-parallel", f"--vocab-parallel-method {choice.method}"]
    softcap = request.model.softcap if method_named(choice.method).vocabulary_parallel else 0.0
    flags += [f"--vocab-parallel-logit-softcap {softcap:g}"] if softcap else []
    return [*flags, *([] if choice.family == "1f1b" else [f"--vocab-parallel-family {choice.family}"])]


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
    fitting = [one for one in choices if one.fits]
    baseline = _find(choices, BASELINE, "1f1b")
    if baseline is not None and best is not baseline and not baseline.problem:
        gain = baseline.iteration_ms / best.iteration_ms
        unfit = "" if baseline.fits else ", which does not fit"
        lines.append(
            f"{best.name} is {gain:.2f} times as fast as the baseline in 1f1b{unfit}; its fullest rank "
            f"holds {best.peak_gib:.1f} GiB against {baseline.peak_gib:.1f}."
        )
    near = [one for one in fitting if one is not best and one.iteration_ms <= _CLOSE * best.iteration_ms]
    if near:
        lean = min(near, key=lambda one: one.peak_gib)
        lines.append(
            f"Within {100 * (_CLOSE - 1):.0f} % of it: {', '.join(one.name for one in near)}; the least "
            f"memory of these has {lean.name}, {lean.peak_gib:.1f} GiB."
        )
    faster = [
        one for one in choices if not one.problem and not one.fits and one.iteration_ms < best.iteration_ms
    ]
    if faster:
        lines.append(f"Faster, but too large: {', '.join(one.name for one in faster)}.")
    return lines + channels(best) + redistribution(choices)


def redistribution(choices: Sequence[Choice]) -> list[str]:
    """A sentence if moving layers away from the last stage is enough; else none."""
    moved = _find(choices, REDIS, "1f1b")
    found = (_find(choices, method, "1f1b") for method in (VOCAB_1, VOCAB_2))
    partitioned = [one for one in found if one is not None and not one.problem]
    if moved is None or moved.problem or not partitioned:
        return []
    best = min(partitioned, key=lambda one: one.iteration_ms)
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


def remedies(request: Request) -> list[str]:
    """Changes that would make a choice fit, the cheapest first.

    If no single change suffices, they are added up: the one line then names all of them.
    """
    fits = []
    grown = request
    for words, changed in _changes(request):
        choice = _fitting(changed)
        if choice is not None:
            fits.append(f"{words}: {choice.name}, {choice.peak_gib:.1f} GiB")
            if changed.limit_gib > request.limit_gib:
                break  # larger ones would do too
    if fits:
        return fits
    lines = []
    for _ in range(6):
        words, grown = next(_changes(grown), ("", grown))
        if not words:
            break
        lines.append(words)
        choice = _fitting(grown)
        if choice is not None:
            return [f"{' and '.join(lines)}: {choice.name}, {choice.peak_gib:.1f} GiB"]
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
    if job.recompute != "full":
        yield "--recompute, which costs one more forward pass", changed(recompute="full")
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
    tried = [choice_of(request, method, family) for method, family in _LEAN]
    return min((one for one in tried if one.fits), key=lambda one: one.iteration_ms, default=None)


def _find(choices: Sequence[Choice], method: str, family: str) -> Choice | None:
    return next((one for one in choices if (one.method, one.family) == (method, family)), None)
