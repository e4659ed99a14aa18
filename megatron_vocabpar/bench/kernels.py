"""The output and input layer of one shard: times beside their matrix products and beside other layers.

One process, one shard, no communication, as in Table 3 of the paper. The shard owns every target (the
most work a shard can have). On the CPU one thread's processor time is measured. Contenders take turns,
round by round, on inputs that rotate, and ratios are medians over the rounds, so that the machine's drift
cancels. Every result is first checked against float64; a method that fails is refused. The table is in
``kernels_table.py``, the command in ``cli/bench.py``.

Source of the shapes: Table 1 of the paper. Next: ``kernels_published.py``.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from megatron_vocabpar.bench.kernels_others import forward_backward, installed
from megatron_vocabpar.bench.kernels_published import published_pass
from megatron_vocabpar.bench.memory import peak_mib
from megatron_vocabpar.layers import invariant
from megatron_vocabpar.layers.embedding import embedding_backward, embedding_forward, plan_input
from megatron_vocabpar.layers.invariant import BlockState
from megatron_vocabpar.layers.output import (
    OutputState,
    input_gradient,
    output_backward,
    output_forward,
    weight_gradient,
)
from megatron_vocabpar.layers.partition import VocabRange, even_ranges, padded_vocab_size
from megatron_vocabpar.layers.softmax_stats import MergedStats, merge_stats

BUCKETS = (0.0, 0.1, 0.5, 0.9, 0.99, 0.999, 1.0)
"""Edges of the target's probability, within which errors of dX are reported."""


@dataclass(frozen=True)
class Mode:
    """How S and T are run: whether S computes A, logits are recomputed in T, results don't depend on p."""

    with_a: bool = False
    recompute: bool = False
    invariant: bool = False


METHODS = {
    "vocab-1": Mode(),
    "vocab-2": Mode(with_a=True),
    "vocab-1-recompute": Mode(recompute=True),
    "vocab-1-invariant": Mode(invariant=True),
}

_ROTATED = 3
_CHECKED_TOKENS = 64

SCALED = ("vocab-1", "vocab-2")
"""Methods that are timed on the whole vocabulary too."""


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


def shapes(device: torch.device, quick: bool) -> list[Shape]:
    """The paper's shapes on a GPU; on the CPU the paper's n with a small H, which tell nothing about a GPU.

    One core's products take long: with the paper's H nothing but them would be seen.
    """
    vocabularies: tuple[int, ...]
    if device.type == "cpu":
        hidden = (128,) if quick else (128, 256)
        return [Shape(2048, h, 32768, p) for h in hidden for p in (8, 16)]
    models = {8: 3072, 16: 4096, 32: 5120}
    tokens, vocabularies = ((2048,), (131072,)) if quick else ((2048, 4096), (32768, 65536, 131072, 262144))
    return [Shape(n, hidden, v, p) for n in tokens for p, hidden in models.items() for v in vocabularies]


@dataclass(frozen=True)
class Row:
    """One row of the table; times are medians in milliseconds, None where not measured.

    ``ratios`` are medians over the rounds of the contender's time over ours, ``three_gemms`` inverted: ours
    over the products. ``scaling_percent`` is the whole vocabulary's time on one device over p, over ours.
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
    s_ms: float | None
    t_ms: float | None
    three_gemms_ms: float | None
    published_ms: float | None
    pytorch_ms: float | None
    liger_ms: float | None
    cce_ms: float | None
    ratio_to_gemms: float | None
    speedup_over_published: float | None
    speedup_over_pytorch: float | None
    scaling_percent: float | None
    kept_mib: float | None
    peak_mib: float | None
    log_probability_rms: float | None
    dx_error_by_p_target: dict[str, float] | None
    refused: dict[str, str]


@dataclass(frozen=True)
class _Inputs:
    x: Tensor
    targets: Tensor


def _now_ms(device: torch.device) -> float:
    """Time after everything issued so far: the clock's on a GPU, this thread's processor time on the CPU."""
    if device.type == "cpu":
        return time.thread_time() * 1e3
    torch.cuda.synchronize(device)
    return time.perf_counter() * 1e3


def _time_rounds(
    contenders: dict[str, Callable[[int], object]], rounds: int, device: torch.device, calls: int = 1
) -> dict[str, list[float]]:
    """Milliseconds a call of every contender in every round, after two rounds of warm-up.

    Args:
        contenders: functions of which of the rotated inputs to use.
        rounds: measured rounds.
        device: where they run.
        calls: made one after the other in one measurement: for what is too short to be timed alone.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for r in range(-2, rounds):
        for name, run in contenders.items():
            start = _now_ms(device)
            for call in range(calls):
                run((r + call) % _ROTATED)
            elapsed = _now_ms(device) - start
            if r >= 0:
                times[name].append(elapsed / calls)
    return times


def _ratio(above: Sequence[float], below: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def confident_inputs(
    n: int, weight: Tensor, generator: torch.Generator, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Random tokens whose targets' probabilities run from small to 1: x leans on the target's row."""
    rows, hidden = weight.shape
    targets = torch.randint(0, rows, (n,), generator=generator, device=weight.device)
    row = weight[targets].float()
    odds = torch.linspace(-4, 14, n, device=weight.device)
    # Random rows give the other logits a variance of t^2 / |row|^2 around 0.
    size = row.square().sum(1)
    wanted = odds + torch.log(torch.tensor(float(rows)))
    x = row * ((wanted + wanted.square() / (2 * size * hidden / size.mean())) / size).unsqueeze(1)
    x = x + 0.3 * torch.randn(n, hidden, generator=generator, device=weight.device)
    return x.to(dtype), targets


class _Output:
    """One shard's output layer and its inputs, ready to run."""

    def __init__(self, shape: Shape, rows: int, device: torch.device, dtype: torch.dtype) -> None:
        generator = torch.Generator(device=device).manual_seed(0)
        random = partial(torch.randn, generator=generator, device=device)
        self.shard = VocabRange(0, rows, rows)
        self.weight = (random(rows, shape.hidden) * shape.hidden**-0.5).to(dtype)
        self.inputs = [
            _Inputs(*confident_inputs(shape.n, self.weight, generator, dtype)) for _ in range(_ROTATED)
        ]
        self.g = torch.full((shape.n,), 1 / shape.n, device=device)
        self.main_grad = torch.zeros(rows, shape.hidden, device=device)
        # As in training, exponentials go where those of an earlier microbatch were.
        self.place = torch.empty(shape.n, rows, dtype=dtype, device=device)

    def s(self, i: int, method: str) -> tuple[OutputState | BlockState, MergedStats]:
        mode, inputs = METHODS[method], self.inputs[i]
        state: OutputState | BlockState | None
        if mode.invariant:
            state, stats = invariant.output_forward(inputs.x, self.weight, inputs.targets, self.shard)
        else:
            state, stats = output_forward(
                inputs.x,
                self.weight,
                inputs.targets,
                self.shard,
                with_input_gradient=mode.with_a,
                recompute=mode.recompute,
                e=None if mode.recompute else self.place,
            )
        assert state is not None
        return state, merge_stats(stats.unsqueeze(0))

    def t(self, state: OutputState | BlockState, merged: MergedStats) -> Tensor:
        if isinstance(state, BlockState):
            return invariant.output_backward(state, merged, self.g, self.weight, self.main_grad).value()
        if state.a is None:
            return output_backward(state, merged, self.g, self.weight, self.main_grad)
        grad = input_gradient(state, merged, self.g, self.weight)
        weight_gradient(state, merged, self.g, self.main_grad)
        return grad

    def both(self, i: int, method: str) -> tuple[MergedStats, Tensor]:
        state, merged = self.s(i, method)
        return merged, self.t(state, merged)


def _exact(layer: _Output, i: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens that are checked, their losses and dX in float64."""
    n = len(layer.g)
    tokens = torch.linspace(0, n - 1, min(n, _CHECKED_TOKENS), device=layer.g.device).long()
    weight, x = layer.weight.double(), layer.inputs[i].x[tokens].double()
    targets = layer.inputs[i].targets[tokens]
    logits = x @ weight.t()
    loss = torch.logsumexp(logits, 1) - logits.gather(1, targets.unsqueeze(1)).squeeze(1)
    others = torch.log_softmax(logits, 1).exp()
    others[torch.arange(len(tokens)), targets] = 0
    dx = others @ weight - others.sum(1, keepdim=True) * weight[targets]
    return tokens, loss, dx * layer.g[tokens].double().unsqueeze(1)


def _errors(loss: Tensor, dx: Tensor, exact: tuple[Tensor, Tensor, Tensor]) -> tuple[float, dict[str, float]]:
    tokens, exact_loss, exact_dx = exact
    rms = float((loss[tokens].double() - exact_loss).square().mean().sqrt())
    rows = (dx[tokens].double() - exact_dx).norm(dim=1) / exact_dx.norm(dim=1).clamp(min=1e-300)
    p_target = torch.exp(-exact_loss)
    found = {}
    for low, high in pairwise(BUCKETS):
        inside = (p_target >= low) & (p_target < high)
        if bool(inside.any()):
            found[f"{low}-{high}"] = float(rows[inside].median())
    return rms, found


def _refusal(rms: float, dx: dict[str, float]) -> str | None:
    """Why a result of ours is wrong: the bounds of the documentation."""
    if not rms < 1e-5:
        return f"log-probability error {rms:.1e} (RMS), above 1e-5"
    for bucket, error in dx.items():
        limit = 2e-3 if bucket == "0.999-1.0" else 5e-4
        if not error < limit:
            return f"row error of dX {error:.1e} where p_target is {bucket}, above {limit}"
    return None


def _kept_mib(state: OutputState | BlockState) -> float:
    """What S leaves for T beyond its inputs: exponentials and A."""
    a = state.a if isinstance(state, OutputState) else None
    kept = [tensor for tensor in (state.e, a, state.k) if tensor is not None]
    return sum(tensor.numel() * tensor.element_size() for tensor in kept) / 2**20


def measure_output(
    shape: Shape, device: torch.device, dtype: torch.dtype, rounds: int, with_scaling: bool
) -> list[Row]:
    """S and T of every method on one shard, beside everything they are compared with.

    Args:
        shape: the case.
        device: where.
        dtype: of x and the weight.
        rounds: measured rounds.
        with_scaling: also time the whole vocabulary on this device, for the scaling against 1/p.
    """
    layer = _Output(shape, shape.rows_of_weight, device, dtype)
    exact = _exact(layer, 0)
    refused: dict[str, dict[str, str]] = {}
    errors = {}
    for method in METHODS:
        merged, dx = layer.both(0, method)
        errors[method] = _errors(merged.loss, dx, exact)
        reason = _refusal(*errors[method])
        refused[method] = {} if reason is None else {"ours": reason}

    contenders: dict[str, Callable[[int], object]] = {"gemms": _three_products(layer)}
    for algorithm in (1, 2):
        contenders[f"published-{algorithm}"] = partial(_published, layer, algorithm)
    parameter = torch.nn.Parameter(layer.weight.clone())
    for name, loss in installed(device).items():
        contenders[name] = partial(_other, layer, loss, parameter)
    for method in METHODS:
        contenders[method] = partial(layer.both, method=method)
    times = _time_rounds(contenders, rounds, device)
    halves = {method: _halves(layer, method, rounds, device) for method in METHODS}
    kept = {method: _kept_mib(layer.s(0, method)[0]) for method in METHODS}
    peak: dict[str, float | None] = dict.fromkeys(METHODS)
    if device.type == "cuda":  # on the CPU, measuring memory would slow down what comes after
        peak = {method: peak_mib(partial(layer.both, 0, method), device) for method in METHODS}
    del layer, parameter, contenders
    whole: dict[str, float] = {}
    if with_scaling:
        full = _Output(shape, shape.padded, device, dtype)
        found = _time_rounds(
            {method: partial(full.both, method=method) for method in SCALED}, max(2, rounds // 3), device
        )
        whole = {method: statistics.median(found[method]) for method in SCALED}

    def median(name: str) -> float | None:
        return statistics.median(times[name]) if name in times else None

    rows = []
    for method in METHODS:
        published = "published-2" if method == "vocab-2" else "published-1"
        ours = statistics.median(times[method])
        rows.append(
            Row(
                kind="output",
                device=device.type,
                dtype=str(dtype).removeprefix("torch."),
                n=shape.n,
                hidden=shape.hidden,
                vocab_size=shape.vocab_size,
                p=shape.p,
                rows_of_weight=shape.rows_of_weight,
                method=method,
                ours_ms=ours,
                s_ms=halves[method][0],
                t_ms=halves[method][1],
                three_gemms_ms=median("gemms"),
                published_ms=median(published),
                pytorch_ms=median("pytorch"),
                liger_ms=median("liger"),
                cce_ms=median("cce"),
                ratio_to_gemms=_ratio(times[method], times["gemms"]),
                speedup_over_published=_ratio(times[published], times[method]),
                speedup_over_pytorch=_ratio(times["pytorch"], times[method]),
                scaling_percent=100 * whole[method] / shape.p / ours if method in whole else None,
                kept_mib=kept[method],
                peak_mib=peak[method],
                log_probability_rms=errors[method][0],
                dx_error_by_p_target=errors[method][1],
                refused=refused[method],
            )
        )
    return rows


def _three_products(layer: _Output) -> Callable[[int], None]:
    """The bare products, without chunks, into tensors that exist; 16-bit results where operands are."""
    x, weight = layer.inputs[0].x, layer.weight
    logits, grad = x.new_empty(len(x), len(weight)), torch.empty_like(x)
    weight_grad = torch.empty_like(weight)

    def run(i: int) -> None:
        x = layer.inputs[i].x
        torch.mm(x, weight.t(), out=logits)
        torch.mm(logits, weight, out=grad)
        torch.mm(logits.t(), x, out=weight_grad)

    return run


def _published(layer: _Output, algorithm: int, i: int) -> None:
    inputs = layer.inputs[i]
    published_pass(
        inputs.x, layer.weight, inputs.targets, layer.g, layer.main_grad, algorithm, out=layer.place
    )


def _other(
    layer: _Output, loss: Callable[[Tensor, Tensor, Tensor], Tensor], parameter: Tensor, i: int
) -> None:
    forward_backward(loss, layer.inputs[i].x, parameter, layer.inputs[i].targets)


def _halves(layer: _Output, method: str, rounds: int, device: torch.device) -> tuple[float, float]:
    """Median milliseconds of S and of T; dX counts as T's in both algorithms."""
    s_ms, t_ms = [], []
    for r in range(-1, rounds):
        start = _now_ms(device)
        state, merged = layer.s(r % _ROTATED, method)
        middle = _now_ms(device)
        layer.t(state, merged)
        end = _now_ms(device)
        if r >= 0:
            s_ms.append(middle - start)
            t_ms.append(end - middle)
    return statistics.median(s_ms), statistics.median(t_ms)


def measure_input(shape: Shape, device: torch.device, dtype: torch.dtype, rounds: int) -> list[Row]:
    """IF and IB of rank 0's shard, beside the published dense [n, H] and the whole layer over p."""
    generator = torch.Generator(device=device).manual_seed(0)
    ranges = even_ranges(shape.padded, shape.p, shape.vocab_size)
    shard = ranges[0]
    (everything,) = even_ranges(shape.padded, 1, shape.vocab_size)
    tokens = [
        torch.randint(0, shape.vocab_size, (shape.n,), generator=generator, device=device)
        for _ in range(_ROTATED)
    ]
    mine = [t[plan_input(t, ranges).positions(0)] for t in tokens]
    full = torch.randn(shape.padded, shape.hidden, generator=generator, device=device).to(dtype)
    weight = full[: shard.rows].clone()
    grad = torch.randn(shape.n, shape.hidden, generator=generator, device=device).to(dtype)
    main_grad = torch.zeros(shape.padded, shape.hidden, device=device)

    def published_forward(i: int) -> Tensor:
        inside = (tokens[i] >= shard.start) & (tokens[i] < shard.stop)
        rows = torch.where(inside, tokens[i] - shard.start, 0)
        return torch.nn.functional.embedding(rows, weight) * inside.unsqueeze(1)

    def published_backward(i: int) -> None:
        inside = (tokens[i] >= shard.start) & (tokens[i] < shard.stop)
        rows = torch.where(inside, tokens[i] - shard.start, 0)
        main_grad[: shard.rows] += torch.zeros(shard.rows, shape.hidden, device=device).index_add_(
            0, rows, (grad * inside.unsqueeze(1)).float()
        )

    passes: dict[str, tuple[Callable[[int], object], ...]] = {
        "IF": (
            lambda i: embedding_forward(mine[i], weight, shard),
            published_forward,
            lambda i: embedding_forward(tokens[i], full, everything),
        ),
        "IB": (
            lambda i: embedding_backward(grad[: len(mine[i])], mine[i], shard, main_grad[: shard.rows]),
            published_backward,
            lambda i: embedding_backward(grad, tokens[i], everything, main_grad),
        ),
    }
    # What Table 3 calls the input layer: both passes.
    passes["IF+IB"] = tuple(_one_after_another(*pair) for pair in zip(*passes.values(), strict=True))
    rows = []
    for name, (ours, published, whole) in passes.items():
        if not torch.equal(embedding_forward(mine[0], weight, shard), full[mine[0]]):
            raise AssertionError("IF does not give the rows of the unsharded embedding")
        contenders: dict[str, Callable[[int], object]] = {
            "ours": ours,
            "published": published,
            "whole": whole,
        }
        times = _time_rounds(contenders, rounds, device, calls=20)
        rows.append(
            Row(
                kind="input",
                device=device.type,
                dtype=str(dtype).removeprefix("torch."),
                n=shape.n,
                hidden=shape.hidden,
                vocab_size=shape.vocab_size,
                p=shape.p,
                rows_of_weight=shape.rows_of_weight,
                method=name,
                ours_ms=statistics.median(times["ours"]),
                s_ms=None,
                t_ms=None,
                three_gemms_ms=None,
                published_ms=statistics.median(times["published"]),
                pytorch_ms=None,
                liger_ms=None,
                cce_ms=None,
                ratio_to_gemms=None,
                speedup_over_published=_ratio(times["published"], times["ours"]),
                speedup_over_pytorch=None,
                scaling_percent=100 * _ratio(times["whole"], times["ours"]) / shape.p,
                kept_mib=None,
                peak_mib=None,
                log_probability_rms=None,
                dx_error_by_p_target=None,
                refused={},
            )
        )
    return rows


def _one_after_another(
    first: Callable[[int], object], second: Callable[[int], object]
) -> Callable[[int], object]:
    def both(i: int) -> object:
        first(i)
        return second(i)

    return both
