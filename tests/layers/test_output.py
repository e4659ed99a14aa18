"""S and T of every method against the unsharded float64 layer, shards looped over in one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_vocabpar.layers.gemm import result_dtype
from megatron_vocabpar.layers.kernels.dispatch import REFERENCE, use_kernels
from megatron_vocabpar.layers.numbers import Slopes, Softmax, TokenGradient
from megatron_vocabpar.layers.operands import ShardOptions
from megatron_vocabpar.layers.output import plain
from megatron_vocabpar.layers.output.plain import OutputState, output_forward
from megatron_vocabpar.layers.output.warm_up import warm_up
from megatron_vocabpar.layers.partition import (
    VocabRange,
)
from megatron_vocabpar.layers.softmax_stats import merge_stats
from megatron_vocabpar.layers.targets import shard_targets
from megatron_vocabpar.layers.terms import LossTerms
from tests.support.output_layer import SPLITS, TOLERANCE, H, N, V, batch, even

from . import reference
from .shards import METHODS, Result, backward, both_gradients, forward, run, split


def check(result: Result, expected: tuple[Tensor, Tensor, Tensor], tolerance: float) -> None:
    loss, dx, dw = expected
    vocab_size = len(dw)
    assert (result.loss >= 0).all()
    wide = torch.float64 if result.loss.dtype == torch.float64 else torch.float32
    assert wide == result.dx.dtype == result.dw.dtype
    rounding = 1e-13 if wide == torch.float64 else 1e-6
    torch.testing.assert_close(result.loss.double(), loss, rtol=rounding, atol=rounding)
    assert reference.relative_error(result.dx, dx) < tolerance
    assert reference.relative_error(result.dw[:vocab_size], dw) < tolerance
    assert (result.dw[vocab_size:] == 0).all()  # padding gets no gradient at all, and no NaN


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("ranges", SPLITS.values(), ids=SPLITS.keys())
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_equals_the_unsharded_layer(method: str, ranges: tuple[VocabRange, ...], dtype: torch.dtype) -> None:
    x, weight, targets, g = batch(dtype)
    check(
        run(method, x, weight, targets, g, ranges),
        reference.output_layer(x, weight, targets, g),
        TOLERANCE[dtype],
    )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("hidden", "shards", "far"), [(4, 2, True), (16, 2, True), (16, 4, True), (16, 4, False)]
)
def test_what_has_fewer_bytes_is_scaled(
    monkeypatch: pytest.MonkeyPatch, method: str, dtype: torch.dtype, hidden: int, shards: int, far: bool
) -> None:
    """Shards of 20 rows and of 10: more than 2 H of 4, between H and 2 H of 16, and fewer than H."""
    monkeypatch.setattr(plain, "_WORTH_BYTES", 0 if far else 10**6)
    x, weight, targets, g = batch(dtype)
    x, weight = x[:, :hidden], weight[:, :hidden].contiguous()
    scaled: list[int] = []

    def scale_rows(rows: Tensor, scale: Tensor | TokenGradient, out: Tensor | None = None) -> Tensor:
        scaled.append(rows.shape[1])
        return REFERENCE.scale_rows(rows, scale, out)

    with use_kernels(replace(REFERENCE, scale_rows=scale_rows)):
        result = run(method, x, weight, targets, g, even(shards))
    check(result, reference.output_layer(x, weight, targets, g), TOLERANCE[dtype])
    rows, of_dx = 40 // shards, 2 if dtype == torch.bfloat16 else 1  # dX has twice as many bytes as E
    in_t = far and rows < of_dx * hidden and method != "vocab-2" and dtype != torch.float16
    in_tw = far and rows < hidden and dtype != torch.float16
    assert scaled == [rows] * (in_t + in_tw) * shards  # by itself; rows of dX and x in other kernels


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_each_chunk_of_recomputed_exponentials_has_its_own_factors(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """Where E is scaled in place of dX and x, and T computes it again by chunks of seven tokens."""
    monkeypatch.setattr(plain, "_WORTH_BYTES", 0)
    x, weight, targets, g = batch(dtype)
    weights = split(weight, even(4))
    states, softmax = forward("vocab-1", x, weights, targets, even(4), 7, recompute=True)
    gradients = backward(states, softmax, Slopes(g), weights)
    expected = reference.output_layer(x, weight, targets, g)
    check(Result(softmax.nll, *gradients), expected, TOLERANCE[dtype])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("target", [0, 9, 10, V - 1])
def test_all_targets_the_same(method: str, target: int) -> None:
    x, weight, targets, g = batch(torch.float32)
    targets = torch.full_like(targets, target)
    check(run(method, x, weight, targets, g, even(4)), reference.output_layer(x, weight, targets, g), 3e-6)


@pytest.mark.parametrize("method", METHODS)
def test_ignored_tokens_leave_no_trace(method: str) -> None:
    x, weight, targets, g = batch(torch.float32)
    ranges = even(4)
    result = run(method, x, weight, torch.full_like(targets, -100), g, ranges)
    assert (result.loss == 0).all()
    assert (result.dx == 0).all()
    assert (result.dw == 0).all()
    # A padding id as target is no target either, although a shard holds its row.
    some = targets.clone()
    some[:20] = V
    ignored = run(method, x, weight, some, g, ranges)
    assert (ignored.loss[:20] == 0).all()
    assert (ignored.dx[:20] == 0).all()
    check(ignored, reference.output_layer(x, weight, some, g), 3e-6)


@pytest.mark.parametrize("method", METHODS)
def test_rows_without_gradient_get_exactly_none(method: str) -> None:
    x, weight, targets, g = batch(torch.bfloat16)
    result = run(method, x, weight, targets, g, even(3))
    assert (result.dx[5:9] == 0).all()
    nothing = run(method, x, weight, targets, torch.zeros_like(g), even(3))
    assert (nothing.dx == 0).all()
    assert (nothing.dw == 0).all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_logits_of_ten_thousand(method: str, dtype: torch.dtype) -> None:
    # Whole numbers, so that the products are exact and only the softmax is tested.
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(-30, 31, (N, H), generator=generator).to(dtype)
    weight = torch.randint(-60, 61, (V, H), generator=generator).to(dtype)
    x[0], weight[0], weight[1] = 30, 21, -21  # logits of +-10080
    targets = torch.arange(N) % V
    targets[1] = 0
    g = torch.ones(N)
    logits = x.double() @ weight.double().t()
    assert logits.max() > 1e4
    assert logits.min() < -1e4
    tolerance = {torch.float32: 1e-5}.get(dtype, 4e-3)
    for ranges in (even(1), even(4), SPLITS["one row each"]):
        check(
            run(method, x, weight, targets, g, ranges),
            reference.output_layer(x, weight, targets, g),
            tolerance,
        )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("gap", [20.0, 75.0, 150.0, -150.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gaps_between_shards(method: str, gap: float, dtype: torch.dtype) -> None:
    """Each shard's logits lie ``gap`` nats above the shard's before; multiples of 1/64, so exact in fp32."""
    x, weight, targets, g = batch(dtype, spread=0.5)
    x, weight = (x * 8).round() / 8, (weight * 8).round() / 8
    ranges = even(4)
    x[:, 0] = 64
    for rank, shard in enumerate(ranges):
        weight[shard.start : shard.start + shard.valid_rows, 0] = gap * rank / 64
    check(
        run(method, x, weight, targets, g, ranges),
        reference.output_layer(x, weight, targets, g),
        TOLERANCE[dtype],
    )


def confident_batch(count: int, vocab_size: int, hidden: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """bf16 tokens whose p_target runs from 1e-4 to 1 - 1e-9: each x points along its target's row."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(vocab_size, hidden, generator=generator).bfloat16()
    targets = torch.randint(0, vocab_size, (count,), generator=generator)
    odds = torch.linspace(-9, 20, count)  # log(p / (1 - p))
    row = weight[targets].float()
    noise = torch.randn(count, hidden, generator=generator)
    noise -= row * (noise * row).sum(1, keepdim=True) / (row * row).sum(1, keepdim=True)
    # Against random rows the scaled target gives logits of variance t^2 / |row|^2.
    size = row.norm(dim=1)
    wanted = odds + torch.log(torch.tensor(float(vocab_size)))
    logit = wanted + wanted.square() / (2 * size.square())
    x = row * (logit / size.square()).unsqueeze(1) + 0.3 * noise / hidden**0.5
    return x.bfloat16(), weight, targets, torch.full((count,), 1 / count)


BUCKETS = [
    (0.0, 0.1, 5e-4),
    (0.1, 0.5, 5e-4),
    (0.5, 0.9, 5e-4),
    (0.9, 0.99, 5e-4),
    (0.99, 0.999, 5e-4),
    (0.999, 1.0, 2e-3),
]


@pytest.fixture(scope="module")
def confident() -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor, Tensor]]:
    inputs = confident_batch(count=384, vocab_size=4000, hidden=64)
    return inputs, reference.output_layer(*inputs)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("world_size", [1, 4, 8, 32])
def test_bf16_error_in_every_bucket_of_confidence(method: str, world_size: int, confident) -> None:
    (x, weight, targets, g), (loss, dx, dw) = confident
    result = run(method, x, weight, targets, g, even(world_size, 4000))
    errors, p_target = reference.row_errors(result.dx, dx), torch.exp(-loss)
    for low, high, limit in BUCKETS:
        inside = (p_target >= low) & (p_target < high)
        assert inside.sum() >= 8, (low, high)
        assert errors[inside].median() < limit, (low, high)
    assert errors.max() < 2**-8  # no row is lost
    assert (result.loss.double() - loss).square().mean().sqrt() < 1e-5
    assert (result.loss >= 0).all()
    assert reference.relative_error(result.dw[:4000], dw) < 3e-3


def test_the_published_subtraction_loses_the_gradient_of_confident_tokens(confident) -> None:
    """A 16-bit softmax minus one-hot, as published: what the exact remainder is for."""
    (x, weight, targets, g), (loss, dx, _) = confident
    sure = torch.exp(-loss) > 0.999
    softmax = torch.softmax(x.float() @ weight.float().t(), dim=1).bfloat16()
    softmax[torch.arange(len(x)), targets] -= 1
    published = (softmax.float() @ weight.float()) * g.unsqueeze(1)
    ours = run("vocab-2", x, weight, targets, g, even(4, 4000)).dx
    assert reference.row_errors(published, dx)[sure].median() > 0.5
    assert reference.row_errors(ours, dx)[sure].median() < 2e-3


@pytest.mark.parametrize("method", METHODS)
def test_chunks_change_nothing_but_rounding(method: str) -> None:
    x, weight, targets, g = batch(torch.float32)
    whole, chunked = (run(method, x, weight, targets, g, even(3), rows) for rows in (None, 7))
    torch.testing.assert_close(chunked.loss, whole.loss, rtol=1e-6, atol=1e-6)
    assert reference.relative_error(chunked.dx, whole.dx.double()) < 1e-6
    assert reference.relative_error(chunked.dw, whole.dw.double()) < 1e-6


@pytest.mark.parametrize("method", METHODS)
def test_t_runs_late_out_of_order_twice_and_with_another_g(method: str) -> None:
    ranges = even(4)
    batches = [batch(torch.bfloat16, seed=seed) for seed in range(3)]
    weights = split(batches[0][1], ranges)
    at_once = []
    for x, _, targets, g in batches:
        states, merged = forward(method, x, weights, targets, ranges)
        at_once.append(backward(states, merged, Slopes(g), weights))
    kept = [forward(method, x, weights, targets, ranges) for x, _, targets, _ in batches]
    for i in (2, 0, 1):
        states, merged = kept[i]
        backward(states, merged, Slopes(5 * batches[i][3]), weights)  # another g in between
        for _ in range(2):
            dx, dw = backward(states, merged, Slopes(batches[i][3]), weights)
            assert torch.equal(dx, at_once[i][0])
            assert torch.equal(dw, at_once[i][1])


def one_shard(
    dtype: torch.dtype, **options: bool
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], OutputState, Softmax]:
    """A batch, and S of it on one shard."""
    x, weight, targets, g = batch(dtype)
    state, stats = output_forward(x, weight, targets, VocabRange(0, V, V), ShardOptions(**options))
    assert state is not None
    assert not stats.requires_grad
    return (x, weight, targets, g), state, merge_stats(stats.unsqueeze(0))


def test_main_grad_is_added_to() -> None:
    (_, _, _, g), state, softmax = one_shard(torch.bfloat16)
    main_grad, once = torch.full((V, H), 0.5), torch.zeros(V, H)
    state.add_weight_gradient(softmax, Slopes(g), once)
    for _ in range(2):
        state.add_weight_gradient(softmax, Slopes(g), main_grad)
    torch.testing.assert_close(main_grad, 0.5 + 2 * once, rtol=1e-6, atol=1e-7)
    with pytest.raises(ValueError, match=r"main_grad of shape \(36, 16\)"):
        state.add_weight_gradient(softmax, Slopes(g), torch.zeros(V - 1, H))
    with pytest.raises(ValueError, match=r"main_grad in torch.float16: use torch.float32, or torch.bfloat16"):
        state.add_weight_gradient(softmax, Slopes(g), torch.zeros(V, H, dtype=torch.float16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_main_grad_in_the_operands_dtype(dtype: torch.dtype) -> None:
    x, weight, targets, g = batch(dtype)
    targets[:] = 7  # repeats are summed before they are rounded
    ranges = even(2)
    weights = split(weight, ranges)
    states, merged = forward("vocab-1", x, weights, targets, ranges)
    _, dw = backward(states, merged, Slopes(g), weights, main_grad_dtype=dtype)
    assert dw.dtype == dtype
    assert reference.relative_error(dw[:V], reference.output_layer(x, weight, targets, g)[2]) < 1e-2


def test_small_gradients_survive_in_fp16() -> None:
    x, weight, targets, g = batch(torch.float16)
    result = run("vocab-2", x, weight, targets, g * 1e-6, even(2))
    _, dx, dw = reference.output_layer(x, weight, targets, g * 1e-6)
    assert reference.relative_error(result.dx, dx) < 5e-4
    assert reference.relative_error(result.dw[:V], dw) < 5e-4


def test_evaluation_keeps_nothing_and_gives_the_same_statistics() -> None:
    x, weight, targets, _ = batch(torch.bfloat16)
    for shard, w in zip(even(4), split(weight, even(4)), strict=True):
        options = ShardOptions(with_input_gradient=True)
        _, expected = output_forward(x, w, targets, shard, options)
        state, stats = output_forward(x, w, targets, shard, replace(options, keep_state=False))
        assert state is None
        assert torch.equal(stats, expected)


def test_parameters_that_require_grad_are_taken_as_they_are() -> None:
    x, weight, targets, g = batch(torch.float32)
    parameter = torch.nn.Parameter(weight)
    state, stats = output_forward(x.requires_grad_(), parameter, targets, VocabRange(0, V, V))
    assert state is not None
    assert not stats.requires_grad
    softmax = merge_stats(stats.unsqueeze(0))
    assert not state.input_gradient(softmax, Slopes(g)).requires_grad
    assert parameter.grad is None


@pytest.mark.parametrize("early", [False, True])
def test_the_input_gradient_goes_where_it_is_told(early: bool) -> None:
    (_, _, _, g), state, softmax = one_shard(torch.bfloat16, with_input_gradient=early)
    place = torch.full((N, H), torch.nan)
    assert state.input_gradient(softmax, Slopes(g), out=place) is place
    assert torch.equal(place, state.input_gradient(softmax, Slopes(g)))
    with pytest.raises(ValueError, match=r"out of \(60, 16\) torch.bfloat16: dX is"):
        state.input_gradient(softmax, Slopes(g), out=place.bfloat16())


def test_no_tokens() -> None:
    x, weight, targets, g = batch(torch.float32)
    result = run("vocab-2", x[:0], weight, targets[:0], g[:0], even(2))
    assert result.loss.shape == (0,)
    assert result.dx.shape == (0, H)
    assert (result.dw == 0).all()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda x, w, t: (x[0], w, t), r"need \[n, H\]"),
        (lambda x, w, t: (x, w[1:], t), r"need \[n, H\] and \[37, H\]"),
        (lambda x, w, t: (x.bfloat16(), w, t), "input in torch.bfloat16, weight in torch.float32"),
        (lambda x, w, t: (x, w, t.unsqueeze(0)), r"targets of shape \(1, 60\)"),
        (lambda x, w, t: (x.int(), w.int(), t), "operands in torch.int32"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change, named: str) -> None:
    x, weight, targets, _ = batch(torch.float32)
    with pytest.raises(ValueError, match=named):
        output_forward(*change(x, weight, targets), VocabRange(0, V, V))


def test_known_targets_and_a_given_place_change_nothing() -> None:
    x, weight, targets, g = batch(torch.bfloat16)
    shard = SPLITS["uneven"][1]
    w = split(weight, SPLITS["uneven"])[1]
    place = torch.full((N, shard.rows), torch.nan, dtype=torch.bfloat16)
    known = shard_targets(targets, shard)
    first, stats = output_forward(x, w, targets, shard)
    given, same = output_forward(x, w, known, shard, e=place)
    assert torch.equal(stats, same)
    assert given.e is place
    assert given.tokens.targets is known
    merged = merge_stats(stats.unsqueeze(0))
    for state in (first, given):
        state_grad = torch.zeros(shard.rows, H)
        dx = both_gradients(state, merged, Slopes(g), w, state_grad)
        expected = torch.zeros(shard.rows, H)
        first.add_weight_gradient(merged, Slopes(g), expected)
        assert torch.equal(dx, first.input_gradient(merged, Slopes(g)))
        assert torch.equal(state_grad, expected)
    with pytest.raises(ValueError, match=r"e of \(3, 4\)"):
        output_forward(x, w, targets, shard, e=place[:3, :4])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_warm_up_leaves_no_trace(dtype: torch.dtype) -> None:
    """A weight that is not there yet may hold anything."""
    shard = SPLITS["uneven"][1]
    weight = torch.full((shard.rows, H), torch.nan, dtype=dtype)
    grads = [torch.rand(shard.rows, H, dtype=result_dtype(dtype)) for _ in range(2)]
    before = [grad.clone() for grad in grads]
    for with_a in (False, True):
        options = ShardOptions(with_input_gradient=with_a, terms=LossTerms(z_loss=0.1, softcap=3.0))
        warm_up(weight, (grads[0], grads[1]), shard, options, ranks=3, n=N)
    assert all(map(torch.equal, grads, before))


def test_autocast_changes_nothing() -> None:
    x, weight, targets, g = batch(torch.float32)
    shard = VocabRange(0, V, V)

    def run_passes() -> list[Tensor]:
        _, stats = output_forward(x, weight, targets, shard, ShardOptions(keep_state=False))
        state, _ = output_forward(x, weight, targets, shard, ShardOptions(with_input_gradient=True))
        assert state is not None
        main_grad = torch.zeros_like(weight)
        dx = both_gradients(state, merge_stats(stats.unsqueeze(0)), Slopes(g), weight, main_grad)
        return [stats, dx, main_grad]

    expected = run_passes()
    with torch.autocast("cpu", torch.bfloat16):
        for found, wanted in zip(run_passes(), expected, strict=True):
            assert torch.equal(found, wanted)
