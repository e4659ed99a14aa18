"""Times of one shard's output and input layers, beside bare matrix products and other people's layers.

One process, one shard, no communication, as in the paper's Table 3; shapes are those of its Table 1. On the
CPU one thread's processor time is measured. Contenders take turns on inputs that rotate, and ratios are
medians over the rounds. Every result of ours is first checked against float64; a wrong one is refused. Next:
``contenders.py``; ``tables.py``.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from lab.kernels.contenders import input_contenders, output_contenders
from lab.kernels.input_layer import INPUT_CALLS, InputLayer
from lab.kernels.output_layer import (
    METHODS,
    OutputLayer,
    errors,
    kept_mib,
    refusal,
)
from lab.memory import peak_mib
from lab.timing import ROTATED, Apart, Contender, host_and_device, ratio, time_rounds
from megatron_vocabpar.layers.gemm import add_product_
from megatron_vocabpar.layers.partition import VocabRange, padded_vocab_size
from megatron_vocabpar.schedule.words.methods import VOCAB_1, VOCAB_2

PASSES = tuple(name for name, mode in METHODS.items() if not mode.invariant)
"""Methods that are timed in turn with all others; the invariant ones take fifty times as long."""

SCALED = (VOCAB_1, VOCAB_2)
"""Methods that are timed on the whole vocabulary too."""

PUBLISHED = ("published-1", "published-2")

MOST_RMS = {"cpu": 1e-5, "cuda": 2e-5}
"""Of log-probabilities: sums of an H200's 16-bit products with H 5120 have 1.4e-5."""


@dataclass(frozen=True)
class Shape:
    """One case: n tokens, hidden size H, true vocabulary V, cut over p ranks."""

    n: int
    hidden: int
    vocab_size: int
    p: int

    @property
    def padded(self) -> int:
        return padded_vocab_size(self.vocab_size, self.p)

    @property
    def rows_of_weight(self) -> int:
        return self.padded // self.p


def shapes(device: torch.device) -> list[Shape]:
    """The paper's models on a GPU, and a larger one; on the CPU the paper's n with a small H.

    The CPU's say nothing about a GPU: with the paper's H one core would spend all its time in the products.
    """
    if device.type == "cpu":
        return [Shape(2048, hidden, 32768, p) for hidden in (128, 256) for p in (8, 16)]
    models = {8: 3072, 16: 4096, 32: 5120, 64: 8192}
    return [
        Shape(n, hidden, vocab_size, p)
        for n in (2048, 8192)
        for vocab_size in (131072, 262144)
        for p, hidden in models.items()
    ]


@dataclass(frozen=True)
class LayerTiming:
    """One row of the table; times are medians in milliseconds, None where not measured.

    Speedups are medians over the rounds of the contender's time over ours; ``ratio_to_gemms`` is ours over
    the bare products. ``scaling_percent`` is the whole vocabulary's time on one device over p, over ours.
    ``others_*`` are by the layer's name; ``not_measured`` says why one is missing. ``host_ms`` and
    ``device_ms`` are by contender, measured apart on a GPU (``timing.py``): ``ours``; ``share``, ours with
    the average share of targets; ``gemms``, ``published``, ``pytorch`` and the others. ``ours_ms`` has both,
    one beside the other.
    """

    kind: str
    device: str
    dtype: str
    n: int
    hidden: int
    vocab_size: int
    p: int
    rows_of_weight: int
    method: str
    ours_ms: float
    published_ms: float | None = None
    speedup_over_published: float | None = None
    s_ms: float | None = None
    t_ms: float | None = None
    three_gemms_ms: float | None = None
    ratio_to_gemms: float | None = None
    pytorch_ms: float | None = None
    speedup_over_pytorch: float | None = None
    others_ms: dict[str, float] = field(default_factory=dict)
    speedup_over_others: dict[str, float] = field(default_factory=dict)
    others_peak_mib: dict[str, float] = field(default_factory=dict)
    not_measured: dict[str, str] = field(default_factory=dict)
    scaling_percent: float | None = None
    kept_mib: float | None = None
    peak_mib: float | None = None
    log_probability_rms: float | None = None
    dx_error_by_p_target: dict[str, float] | None = None
    host_ms: dict[str, float] = field(default_factory=dict)
    device_ms: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


def _where(shape: Shape, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """The fields of a row that say what was measured."""
    return {
        "device": device.type,
        "dtype": str(dtype).removeprefix("torch."),
        "n": shape.n,
        "hidden": shape.hidden,
        "vocab_size": shape.vocab_size,
        "p": shape.p,
        "rows_of_weight": shape.rows_of_weight,
    }


def measure_output(
    shape: Shape,
    device: torch.device,
    dtype: torch.dtype,
    rounds: int,
    *,
    methods: Sequence[str] = PASSES,
    with_scaling: bool = True,
) -> list[LayerTiming]:
    """S and T of methods on one shard, beside the bare products; those of ``PASSES`` beside all contenders.

    Args:
        with_scaling: also time the whole vocabulary on this device, for the scaling against 1/p.
    """
    layer = _layer(shape, shape.rows_of_weight, device, dtype)
    exact = layer.exact(0)
    results = {method: layer.both(0, method) for method in methods}
    wrong = {method: errors(softmax.nll, dx, exact) for method, (softmax, dx) in results.items()}
    mean_loss = float(results[methods[0]][0].nll.mean())
    del results

    ours: dict[str, Contender] = {method: partial(layer.both, method=method) for method in methods}
    others, reasons = output_contenders(layer, mean_loss) if {*methods} <= {*PASSES} else ({}, {})
    contenders: dict[str, Contender] = {"gemms": _three_products(layer), **others, **ours}
    times = time_rounds(contenders, rounds, device, _calls(device))
    halves = {method: _halves(layer, method, rounds, device) for method in methods}
    kept_by_s = {method: kept_mib(layer.s(0, method)[0]) for method in methods}
    apart: dict[str, Apart] = {}
    peaks: dict[str, float] = {}
    if device.type == "cuda":  # on the CPU, measuring memory would slow down what comes after
        share = layer.with_share(shape.p)
        shares = {_shared(method): partial(share.both, method=method) for method in methods}
        apart = host_and_device(contenders | shares, rounds, device, _calls(device))
        measured = {name: peak_mib(partial(run, 0), device) for name, run in contenders.items()}
        peaks = {name: mib for name, mib in measured.items() if mib is not None}
        del share, shares
    del layer, contenders, others, ours  # room for the whole vocabulary
    scaled = [method for method in methods if method in SCALED and with_scaling]
    whole = _whole_ms(shape, device, dtype, max(2, rounds // 3), scaled)
    rows = []
    for method in methods:
        rms, dx_errors = wrong[method]
        reason = refusal(rms, dx_errors, MOST_RMS[device.type])
        ours_ms = statistics.median(times[method])
        row = LayerTiming(
            kind="output",
            method=method,
            **_where(shape, device, dtype),
            **_beside(method, times, peaks),
            **_apart(method, apart),
            ours_ms=ours_ms,
            s_ms=halves[method][0],
            t_ms=halves[method][1],
            not_measured=reasons,
            scaling_percent=100 * whole[method] / shape.p / ours_ms if method in whole else None,
            kept_mib=kept_by_s[method],
            peak_mib=peaks.get(method),
            log_probability_rms=rms,
            dx_error_by_p_target=dx_errors,
            refused={} if reason is None else {"ours": reason},
        )
        rows.append(row)
    return rows


def _shared(method: str) -> str:
    """The name of a method's passes with the average share of targets."""
    return f"{method}, share"


def _published(method: str) -> str:
    """The name of the published passes that a method is compared with."""
    return "published-2" if method == VOCAB_2 else "published-1"


def _others(times: Mapping[str, Any]) -> list[str]:
    """The other layers among the contenders."""
    return [name for name in times if name.partition(",")[0] not in (*METHODS, "gemms", *PUBLISHED)]


def _beside(method: str, times: Mapping[str, Sequence[float]], peaks: Mapping[str, float]) -> dict[str, Any]:
    """The fields of a row that compare a method with the products, the published passes and other layers."""
    published, others = _published(method), _others(times)
    median = {name: statistics.median(values) for name, values in times.items()}
    speedup = {name: ratio(times[name], times[method]) for name in times}
    return {
        "three_gemms_ms": median["gemms"],
        "ratio_to_gemms": ratio(times[method], times["gemms"]),
        "published_ms": median.get(published),
        "speedup_over_published": speedup.get(published),
        "pytorch_ms": median.get("pytorch"),
        "speedup_over_pytorch": speedup.get("pytorch"),
        "others_ms": {name: median[name] for name in others},
        "speedup_over_others": {name: speedup[name] for name in others},
        "others_peak_mib": {name: peaks[name] for name in others if name in peaks},
    }


def _apart(method: str, apart: Mapping[str, Apart]) -> dict[str, Any]:
    """The fields of a row that tell the host and the device apart."""
    names = {"ours": method, "share": _shared(method), "gemms": "gemms", "published": _published(method)}
    named = {shown: apart[name] for shown, name in names.items() if name in apart}
    named |= {name: apart[name] for name in _others(apart)}
    return {
        "host_ms": {name: each.host_ms for name, each in named.items()},
        "device_ms": {name: each.device_ms for name, each in named.items()},
    }


def _layer(shape: Shape, rows: int, device: torch.device, dtype: torch.dtype) -> OutputLayer:
    return OutputLayer(shape.n, shape.hidden, VocabRange(0, rows, rows), device, dtype)


def _whole_ms(
    shape: Shape, device: torch.device, dtype: torch.dtype, rounds: int, methods: Sequence[str]
) -> dict[str, float]:
    """By method, milliseconds of the whole vocabulary on one device."""
    if not methods:
        return {}
    full = _layer(shape, shape.padded, device, dtype)
    runs = {method: partial(full.both, method=method) for method in methods}
    times = time_rounds(runs, rounds, device, _calls(device))
    return {method: statistics.median(values) for method, values in times.items()}


def _three_products(layer: OutputLayer) -> Contender:
    """The bare products, without chunks: into existing tensors, and as in stock into a sum in fp32."""
    x, weight = layer.inputs[0].x, layer.weight
    logits, grad = x.new_empty(len(x), len(weight)), torch.empty_like(x)

    def run(i: int) -> None:
        x = layer.inputs[i].x
        torch.mm(x, weight.t(), out=logits)
        torch.mm(logits, weight, out=grad)
        add_product_(layer.main_grad, logits.t(), x)

    return run


def _halves(layer: OutputLayer, method: str, rounds: int, device: torch.device) -> tuple[float, float]:
    """Median milliseconds of S and of T; dX counts as T's in both algorithms."""
    state, softmax = layer.s(0, method)
    passes: dict[str, Contender] = {
        "s": partial(layer.s, method=method),
        "t": lambda _: layer.t(state, softmax),
    }
    times = time_rounds(passes, rounds, device, _calls(device))
    return statistics.median(times["s"]), statistics.median(times["t"])


def _calls(device: torch.device) -> int:
    """In one measurement: on a GPU some, so that the host is ahead as in training."""
    return 1 if device.type == "cpu" else 2 * ROTATED


def measure_input(shape: Shape, device: torch.device, dtype: torch.dtype, rounds: int) -> list[LayerTiming]:
    """IF and IB of rank 0's shard, beside the published dense [n, H] and the whole layer over p."""
    layer = InputLayer(shape.n, shape.hidden, shape.vocab_size, shape.p, device, dtype)
    published = input_contenders(layer.tokens, layer.weight, layer.shard, layer.grad, layer.main_grad)
    contenders = {"ours": layer.passes(), "published": published, "whole": layer.whole_passes()}
    rows = []
    for passes in (("IF",), ("IB",), ("IF", "IB")):  # Table 3's input layer is both
        runs = {name: _in_turn([by[each] for each in passes]) for name, by in contenders.items()}
        times = time_rounds(runs, rounds, device, calls=INPUT_CALLS)
        rows.append(
            LayerTiming(
                kind="input",
                method="+".join(passes),
                **_where(shape, device, dtype),
                ours_ms=statistics.median(times["ours"]),
                published_ms=statistics.median(times["published"]),
                speedup_over_published=ratio(times["published"], times["ours"]),
                scaling_percent=100 * ratio(times["whole"], times["ours"]) / shape.p,
            )
        )
    return rows


def _in_turn(runs: Sequence[Contender]) -> Contender:
    def run_all(i: int) -> None:
        for run in runs:
            run(i)

    return run_all
