"""The same bits for every sharding: simulated shards in one process, and real ones over gloo."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vocabpar.layers.fixed_point import BLOCK, digits, total
from megatron_vocabpar.layers.operands import ShardOptions
from megatron_vocabpar.layers.output.invariant import (
    output_forward,
)
from megatron_vocabpar.layers.partition import VocabRange, even_ranges, padded_vocab_size, ranges_from_sizes
from megatron_vocabpar.layers.softmax_stats import merge_stats, softmax_place
from megatron_vocabpar.layers.terms import PLAIN, LossTerms
from megatron_vocabpar.layers.token_loss import loss_of, loss_slopes
from tests.cases import covering, rest_is_slow
from tests.spawn import run_ranks
from tests.support.output_layer import autograd

from . import reference
from .shards import Result, split
from .shards import run as run_ordinary

V, H, N = 2100, 24, 70
TOLERANCE = {torch.float32: 3e-6, torch.float64: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


def even(p: int) -> tuple[VocabRange, ...]:
    return even_ranges(padded_vocab_size(V, p, divisible_by=BLOCK * p), p, V)


def in_blocks(*blocks: int, last: int = 0) -> tuple[VocabRange, ...]:
    """Shards of so many blocks each; ``last`` more rows on the last one."""
    return ranges_from_sizes([*(b * BLOCK for b in blocks[:-1]), blocks[-1] * BLOCK + last], V)


SPLITS = {f"{p} even": even(p) for p in (1, 2, 3, 4, 5, 7, 8)} | {
    "2 uneven": in_blocks(1, 7, last=52),
    "3 with an empty one": in_blocks(4, 0, 4, last=52),
    "4 uneven": in_blocks(5, 1, 0, 2, last=100),
    "5 with empty ends": in_blocks(0, 3, 3, 3, 0),
    "7 uneven": in_blocks(1, 2, 1, 0, 1, 2, 1, last=60),
    "8, one all padding": in_blocks(1, 1, 1, 1, 1, 2, 2, 3),
}


def batch(dtype: torch.dtype, spread: float = 3.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, weight, targets at every edge of a block and repeated, g; some tokens ignored."""
    draw = torch.Generator().manual_seed(0)
    x = (spread * torch.randn(N, H, generator=draw)).to(dtype)
    weight = torch.randn(V, H, generator=draw).to(dtype)
    edges = torch.tensor([e for b in range(0, V, BLOCK) for e in (b, min(b + BLOCK, V) - 1)])
    targets = torch.cat((edges, torch.full((20,), 700), torch.randint(0, V, (N - 20 - len(edges),))))
    targets[5] = -100
    g = torch.rand(N, generator=draw, dtype=torch.float64 if dtype == torch.float64 else torch.float32) / N
    return x, weight, targets, g


def run(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    ranges: tuple[VocabRange, ...],
    terms: LossTerms = PLAIN,
) -> Result:
    x, weight, targets, g = inputs
    weights = split(weight, ranges)
    done = [
        output_forward(x, w, targets, s, ShardOptions(terms=terms))
        for w, s in zip(weights, ranges, strict=True)
    ]
    place = softmax_place(done[0][1])
    merged = merge_stats(torch.stack([stats for _, stats in done]), out=place)
    slopes = loss_slopes(merged, terms, g)
    assert merged.weight_peak is place.weight_peak
    dx_place = torch.empty(x.shape, dtype=merged.nll.dtype, device=x.device)
    main_grads, parts = [torch.zeros_like(w, dtype=merged.nll.dtype) for w in weights], []
    for (state, _), main_grad in zip(done, main_grads, strict=True):
        parts.append(state.input_gradient(merged, slopes, out=dx_place))
        state.add_weight_gradient(merged, slopes, main_grad)
    dx = parts[0].with_sum(torch.stack([part.whole for part in parts]).sum(dim=0)).value()
    assert dx is dx_place
    return Result(loss_of(merged, terms), dx, torch.cat(main_grads))


def same_bits(found: Result, expected: Result, name: str) -> None:
    assert torch.equal(found.loss, expected.loss), name
    assert torch.equal(found.dx, expected.dx), name
    assert torch.equal(found.dw[:V], expected.dw[:V]), name
    assert (found.dw[V:] == 0).all(), name


@covering(("dtype", TOLERANCE), ("spread", [0.3, 3.0, 60.0]))
def test_bitwise_equal(dtype: torch.dtype, spread: float) -> None:
    """Also with logits that span hundreds of exponents, so that shards lie windows apart."""
    inputs = batch(dtype, spread)
    one = run(inputs, SPLITS["1 even"])
    for name, ranges in SPLITS.items():
        same_bits(run(inputs, ranges), one, name)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_bitwise_equal_on_a_gpu(dtype: torch.dtype) -> None:
    x, weight, targets, g = (tensor.cuda() for tensor in batch(dtype))
    inputs = (x, weight, targets, g)
    one = run(inputs, SPLITS["1 even"])
    for name, ranges in SPLITS.items():
        same_bits(run(inputs, ranges), one, name)


TERMS = {
    "none": PLAIN,
    "z-loss": LossTerms(z_loss=0.01),
    "z-loss, scale, softcap": LossTerms(z_loss=0.02, logit_scale=2.5, softcap=10.0),
}


@covering(("dtype", TOLERANCE), ("name", TERMS))
def test_equal_to_float64(dtype: torch.dtype, name: str) -> None:
    terms = TERMS[name]
    inputs = batch(dtype, 1.0)
    result = run(inputs, SPLITS["4 uneven"], terms)
    loss, dx, dw = autograd(*inputs, terms)
    torch.testing.assert_close(result.loss.double(), loss, rtol=3e-6, atol=3e-6)
    assert reference.relative_error(result.dx, dx) < TOLERANCE[dtype]
    assert reference.relative_error(result.dw[:V], dw) < TOLERANCE[dtype]
    same_bits(
        run(inputs, SPLITS["8 even"], terms), run(inputs, SPLITS["3 with an empty one"], terms), "terms"
    )


def test_the_ordinary_passes_are_not_invariant_here() -> None:
    """The tests above have power: without the mode, the same comparison fails."""
    inputs = batch(torch.float32, spread=0.3)
    one, eight = (run_ordinary("vocab-1", *inputs, SPLITS[name]) for name in ("1 even", "8 even"))
    assert not torch.equal(one.dx, eight.dx)


def test_logits_that_are_not_finite() -> None:
    x, weight, targets, g = batch(torch.float32)
    x[3] = torch.nan
    for name in ("1 even", "4 uneven"):
        result = run((x, weight, targets, g), SPLITS[name])
        assert result.loss[3].isnan()
        assert result.dx[3].isnan().all()
        assert result.loss[:3].isfinite().all()
        assert result.dx[:3].isfinite().all()


def test_one_shard_alone_is_not_finite() -> None:
    x, weight, targets, g = batch(torch.float32)
    weight[300, 4] = torch.nan
    result = run((x, weight, targets, g), SPLITS["4 uneven"])
    assert result.loss[torch.arange(N) != 5].isnan().all()
    assert result.dx[torch.arange(N) != 5].isnan().all()


BATCHES = [(2, 1, 1), (3, 2, 3), (7, 0, 1), (64, 40, 2), (257, 256, 8), (513, 300, 1), (2048, 2047, 1)]


@pytest.mark.parametrize("dtype", rest_is_slow([torch.float32, torch.float16], torch.float16), ids=str)
def test_the_same_token_in_every_batch(dtype: torch.dtype) -> None:
    """Loss and dX of a token, whatever stands around it, on three threads too."""
    x, weight, _, _ = batch(dtype)
    draw = torch.Generator().manual_seed(1)
    others = (60 * torch.randn(2048, H, generator=draw)).to(dtype)

    def tokens(n: int, place: int) -> tuple[Tensor, Tensor]:
        inputs = others[:n].clone()
        inputs[place] = x[0]
        targets = torch.arange(n)
        targets[place] = 700
        dx_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        result = run((inputs, weight, targets, torch.full((n,), 0.3, dtype=dx_dtype)), SPLITS["1 even"])
        return result.loss[place], result.dx[place]

    loss, dx = tokens(1, 0)
    threads = torch.get_num_threads()
    try:
        for n, place, count in BATCHES:
            torch.set_num_threads(count)
            found = tokens(n, place)
            assert torch.equal(found[0], loss), (n, place)
            assert torch.equal(found[1], dx), (n, place)
    finally:
        torch.set_num_threads(threads)


def test_refusals() -> None:
    x, weight, targets, _ = batch(torch.float32)
    with pytest.raises(ValueError, match=r"rows \[0, 300\) cut a block of 256 ids"):
        output_forward(x, weight[:300], targets, VocabRange(0, 300, V))
    with pytest.raises(ValueError, match=r"label smoothing 0.1"):
        output_forward(
            x, weight, targets, VocabRange(0, V, V), ShardOptions(terms=LossTerms(label_smoothing=0.1))
        )


def _over_gloo(rank: int, ranges: tuple[VocabRange, ...], dtype: torch.dtype) -> None:
    inputs = batch(dtype)
    x, weight, targets, g = inputs
    one, shard = run(inputs, SPLITS["1 even"]), ranges[rank]
    w = split(weight, ranges)[rank]
    state, stats = output_forward(x, w, targets, shard)
    gathered = [torch.empty_like(stats) for _ in ranges]
    dist.all_gather(gathered, stats)
    merged = merge_stats(torch.stack(gathered))
    main_grad = torch.zeros_like(w, dtype=torch.float32)
    slopes = loss_slopes(merged, PLAIN, g)
    part = state.input_gradient(merged, slopes)
    state.add_weight_gradient(merged, slopes, main_grad)
    dist.all_reduce(part.whole)
    valid = shard.valid_rows
    assert torch.equal(merged.nll, one.loss)
    assert torch.equal(part.value(), one.dx)
    assert torch.equal(main_grad[:valid], one.dw[shard.start : shard.start + valid])


@pytest.mark.parametrize("name", ["3 with an empty one", "5 even", "7 uneven"])
def test_bitwise_equal_over_processes(name: str) -> None:
    run_ranks(len(SPLITS[name]), _over_gloo, SPLITS[name], torch.bfloat16)


@pytest.mark.parametrize("shard", range(3))
def test_what_is_not_finite_on_one_shard_is_not_finite_in_all(shard: int) -> None:
    terms = torch.ones(3, 4, 2)  # [R, n, T]
    terms[shard, :3, 0] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    value, exponent = total(torch.stack([digits(each, torch.zeros(4)) for each in terms]))
    torch.testing.assert_close(value * 2**exponent, terms.sum(dim=(0, 2)).double(), equal_nan=True)
