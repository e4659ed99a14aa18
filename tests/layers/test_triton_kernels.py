"""The Triton kernels equal the specification, on a CUDA device or in Triton's interpreter.

On a machine without either these are skipped here, and ``test_triton_interpreter.py`` runs this file in
a process that interprets.
"""

from __future__ import annotations

import math
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

if find_spec("triton") is None:  # as the package looks for it
    pytest.skip("Triton is not installed", allow_module_level=True)

from megatron_vocabpar.layers import numbers
from megatron_vocabpar.layers.exponents import NOTHING
from megatron_vocabpar.layers.kernels import dispatch, reference
from megatron_vocabpar.layers.kernels.dispatch import use_kernels
from megatron_vocabpar.layers.kernels.reference import LEEWAY, Exponentials
from megatron_vocabpar.layers.numbers import STATS_WIDTH, RowGradient, Slopes, TargetGradient, TokenGradient
from megatron_vocabpar.layers.softmax_stats import softmax_place
from megatron_vocabpar.layers.targets import ShardTargets
from megatron_vocabpar.layers.terms import LossTerms
from megatron_vocabpar.losses import LazyLogits, vocab_logprobs_and_entropy
from tests.cases import covering
from tests.support.output_layer import SPLITS, TOLERANCE, V, batch
from tests.support.triton_device import DEVICE, INTERPRETED, ROUNDING
from tests.support.triton_device import pytestmark as pytestmark

from . import reference as exact
from .shards import METHODS, run


def rows(n: int, columns: int, spread: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits, and targets at both edges, elsewhere, and on another shard."""
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(n, columns, generator=generator)
    target = torch.randint(-1, max(columns, 1), (n,), generator=generator)
    target[: min(n, 3)] = torch.tensor([0, columns - 1, -1])[:n]
    return logits, target.clamp(max=columns - 1)


def both(
    logits: Tensor, target: Tensor, valid: int, offset: Tensor | None = None, **options
) -> tuple[Exponentials, Exponentials]:
    """The specification's result and the kernel's, each into outputs full of NaN."""
    target = torch.where(target < valid, target, -1)
    options = {"columns": reference.ROW_COLUMNS, **options}
    storage = options.pop("storage", torch.float32)
    results = []
    for kernel, device in ((reference.exponentials, "cpu"), (dispatch.triton_kernels().exponentials, DEVICE)):
        out = torch.full_like(logits, torch.nan, dtype=storage, device=device)
        part = kernel(
            logits.clone().to(device),
            target.to(device),
            valid,
            None if offset is None else offset.to(device),
            out=out,
            **options,
        )
        assert part.e is out
        results.append(Exponentials(*(None if field is None else field.cpu() for field in part)))
    return results[0], results[1]


def check_stats(expected: Exponentials, got: Exponentials, leeway: int = 0) -> Tensor:
    """Equal but for rounding, and for offsets that are up to ``leeway`` below; returns [n] their powers."""
    below = expected.k - got.k
    assert ((below >= 0) & (below <= leeway)).all(), below
    factor = torch.exp2(-below)
    torch.testing.assert_close(got.s_rest * factor, expected.s_rest, rtol=2e-6, atol=0)
    torch.testing.assert_close(got.target_logit, expected.target_logit, rtol=2e-6, atol=1e-6)
    if got.stats.shape[1] > STATS_WIDTH:
        # Of E / 2^below the sum of E ln E is another one.
        weighted, largest, summed = got.stats[:, STATS_WIDTH:].unbind(1)
        weighted = factor * (weighted - below * math.log(2) * got.s_rest)
        wanted, largest_logit, sum_of_logits = expected.stats[:, STATS_WIDTH:].unbind(1)
        torch.testing.assert_close(summed, sum_of_logits, rtol=1e-5, atol=1e-3, equal_nan=True)
        assert ((weighted - wanted).abs() <= 1e-5 * wanted.abs() + 2e-6 * (1 + expected.s_rest)).all()
        lowest = torch.finfo(torch.float32).min  # in the place of -inf
        torch.testing.assert_close(
            largest.clamp(min=lowest), largest_logit.clamp(min=lowest), rtol=1e-6, atol=1e-6
        )
    return factor


def check(
    expected: Exponentials, got: Exponentials, storage: torch.dtype = torch.float32, leeway: int = 0
) -> None:
    """Equal but for rounding, and for offsets that are up to ``leeway`` below the specification's."""
    assert got.e is not None
    assert expected.e is not None
    factor = check_stats(expected, got, leeway)
    tiny = 2.0**-24 if storage == torch.float16 else 2.0**-126
    e = got.e.float() * factor.unsqueeze(1)
    torch.testing.assert_close(e, expected.e.float(), rtol=ROUNDING[storage], atol=tiny)
    assert torch.equal(e == 0, expected.e == 0) or storage == torch.float16


SHAPES = [
    (1, 1, 1),
    (1, 2, 1),
    (3, 7, 5),
    (2, 16, 16),
    (5, 257, 257),
    (4, 4095, 4090),
    (3, 4097, 4097),
    (2, 40000, 39989),
    (4, 6, 0),
    (2, 0, 0),
    (0, 9, 9),
]


@covering((("n", "columns", "valid"), SHAPES), ("storage", ROUNDING))
def test_exponentials(n: int, columns: int, valid: int, storage: torch.dtype) -> None:
    logits, target = rows(n, columns, 4.0)
    logits[:, valid:] = torch.nan
    check(*both(logits, target, valid, dtype=storage, storage=storage), storage, LEEWAY)


@pytest.mark.parametrize("spread", [1.0, 30.0, 3000.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_large_logits_and_gaps(spread: float, dtype: torch.dtype) -> None:
    """fp32 stored, whatever the storage dtype that decides the headroom: then nothing hides a difference."""
    logits, target = rows(6, 777, spread)
    logits[0], logits[1, ::2], logits[2, :5] = -torch.inf, -torch.inf, 1e4
    logits[3, :] -= 1e4
    check(*both(logits, target, 770, dtype=dtype))


PEAKS = {
    "in the first block": (7, 3.0),
    "in the last block": (9000, 3.0),
    "far above, in the last block": (9000, 60.0),
    "beyond fp32, in the last block": (9000, 700.0),
    "infinite, in the last block": (9000, torch.inf),
    "the target": (4242, 60.0),
}


@covering(("peak", PEAKS), ("kept", [True, False]), further={"peak": ["in the last block", "the target"]})
def test_a_provisional_offset(peak: str, kept: bool) -> None:
    """bf16 takes it from the first 4096 ids of a row; one that is far too small makes it read the row again.

    It can't be too large, as it is that of an id of the row. Rows without a finite logit, in the first block
    or at all, have none.
    """
    logits, target = rows(5, 9001, 1.0)
    column, height = PEAKS[peak]
    logits[:, column] = height
    logits[1, :4096], logits[2, :] = -torch.inf, -torch.inf
    logits[3, :4096] -= 200.0
    target[:] = 4242
    if kept:
        expected, got = both(logits, target, 9001, dtype=torch.bfloat16, storage=torch.bfloat16)
    else:
        expected = reference.exponentials(logits.clone(), target, 9001)
        got = dispatch.triton_kernels().exponentials(logits.to(DEVICE), target.to(DEVICE), 9001)
        got = Exponentials(None, got.stats.cpu())
    if height == torch.inf:
        assert torch.equal(got.s_rest, expected.s_rest)  # and an E for which no result is defined
        return
    below = expected.k - got.k
    assert below[2] == 0
    assert (below[[1, 3]] == 0).all()  # they were read again, with the offset of the whole row
    if not kept:
        expected, got = (part._replace(e=torch.zeros(5, 1)) for part in (expected, got))
    check(expected, got, torch.bfloat16, LEEWAY)


def test_a_provisional_offset_may_be_too_small_by_the_leeway() -> None:
    logits = torch.zeros(2, 5000)
    logits[0, 4999], logits[1, 4999] = LEEWAY * 0.69, (LEEWAY + 1) * 0.7
    expected, got = both(logits, torch.full((2,), -1), 5000, dtype=torch.bfloat16, storage=torch.bfloat16)
    assert (expected.k - got.k).tolist() == [LEEWAY, 0]
    check(expected, got, torch.bfloat16, LEEWAY)


@pytest.mark.parametrize("gap", [0.0, 20.0, 75.0, 150.0])
def test_a_given_offset(gap: float) -> None:
    logits, target = rows(5, 300, 3.0)
    offset = reference.exponentials(logits.clone(), target, 300).k + round(gap * 1.4427)
    check(*both(logits, target, 300, offset))


@covering(("target", [0, 299, 150, -1]), ("storage", ROUNDING))
def test_all_targets_alike(target: int, storage: torch.dtype) -> None:
    """All tokens have the same target, or none has one here."""
    logits, _ = rows(6, 300, 4.0)
    expected, got = both(logits, torch.full((6,), target), 300, dtype=storage, storage=storage)
    check(expected, got, storage)
    if target == -1:
        assert not got.target_logit.any()
    else:
        assert got.e is not None
        assert not got.e[:, target].any()


@pytest.mark.parametrize(
    "target", [V - 1, pytest.param(-100, marks=pytest.mark.slow)], ids=["last", "ignored"]
)
def test_passes_whose_targets_are_all_alike(target: int) -> None:
    """Every remainder then falls into one row of dW, or there is none."""
    x, weight, targets, g = (tensor[::6] if len(tensor) == 60 else tensor for tensor in batch(torch.float32))
    targets = torch.full_like(targets, target)
    loss, dx, dw = exact.output_layer(x, weight, targets, g)
    with use_kernels(dispatch.triton_kernels()):
        found = run("vocab-1", *(t.to(DEVICE) for t in (x, weight, targets, g)), SPLITS["uneven"])
    torch.testing.assert_close(found.loss.double().cpu(), loss, rtol=1e-6, atol=1e-6)
    if target == -100:
        assert not found.dx.any()
        assert not found.dw[:V].any()
    else:
        assert exact.relative_error(found.dx.cpu(), dx) < TOLERANCE[torch.float32]
        assert exact.relative_error(found.dw[:V].cpu(), dw) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("special", [torch.nan, torch.inf])
def test_undefined_logits_are_not_hidden(special: float) -> None:
    logits, target = rows(3, 50, 1.0)
    logits[2, 17] = special
    expected, got = both(logits, target, 50)
    torch.testing.assert_close(got.s_rest, expected.s_rest, equal_nan=True)
    assert not got.s_rest[2].isfinite()


@pytest.mark.parametrize("softcap", [None, 5.0, 30.0])
@pytest.mark.parametrize("scale", [0.25, 3.0])
def test_scale_and_softcap(scale: float, softcap: float | None) -> None:
    logits, target = rows(5, 300, 4.0)
    logits[0, :7], logits[1, 0], logits[1, 1] = 0.0, 1e4, -1e4
    expected, got = both(logits, target, 290, terms=LossTerms(logit_scale=scale, softcap=softcap))
    torch.testing.assert_close(got.k, expected.k)
    assert got.e is not None
    torch.testing.assert_close(got.e, expected.e, rtol=1e-5, atol=1e-30)
    torch.testing.assert_close(got.s_rest, expected.s_rest, rtol=1e-5, atol=0)
    torch.testing.assert_close(got.target_logit, expected.target_logit, rtol=1e-6, atol=2e-6)
    assert (got.target_slope is None) == (softcap is None)
    if softcap is not None:
        torch.testing.assert_close(got.target_slope, expected.target_slope, rtol=1e-5, atol=1e-30)


def test_nothing_is_written_beyond_the_row() -> None:
    logits, target = rows(4, 33, 1.0)
    whole = torch.full((4, 64), torch.nan, device=DEVICE)
    wide = torch.full((4, 64), torch.nan, device=DEVICE)
    wide[:, :33] = logits.to(DEVICE)
    kernel = dispatch.triton_kernels().exponentials
    kernel(wide[:, :33], target.to(DEVICE), 33, out=whole[:, :33])
    assert whole[:, 33:].isnan().all()
    assert not whole[:, :33].isnan().any()
    none = kernel(wide[:, :33], target.to(DEVICE), 33)
    assert none.e is None
    assert torch.equal(wide[:, :33].cpu(), logits)


def test_exponentials_in_place_of_the_logits() -> None:
    logits, target = rows(3, 5000, 4.0)
    expected, apart = both(logits, target, 4990)
    work = logits.clone().to(DEVICE)
    got = dispatch.triton_kernels().exponentials(work, target.to(DEVICE), 4990, out=work)
    assert apart.e is not None
    assert torch.equal(work.cpu(), apart.e)
    assert torch.equal(got.k.cpu(), expected.k)


def some_stats(ranks: int, n: int) -> Tensor:
    """Of shards far apart; with tokens without an owner, without any probability, certain, and undefined."""
    generator = torch.Generator().manual_seed(ranks)
    stats = torch.zeros(ranks, n, 4)
    stats[..., 0] = torch.randint(-40, 40, (ranks, n), generator=generator)
    stats[..., 1] = 100 * torch.rand(ranks, n, generator=generator)
    owner = torch.randint(0, ranks, (n,), generator=generator)
    stats[owner, torch.arange(n), 3] = 1.0
    stats[owner, torch.arange(n), 2] = 20 * torch.randn(n, generator=generator)
    if n > 5:
        stats[:, 0, 2:4] = 0  # nobody's
        stats[:, 1, 0], stats[:, 1, 1], stats[:, 1, 2] = NOTHING, 0, -torch.inf * stats[:, 1, 3]
        stats[:, 1, 2].nan_to_num_(0, neginf=-torch.inf)
        stats[:, 2, 1] = 1e-6 * stats[:, 2, 1]  # likely
        stats[0, 3, 1] = torch.nan
        stats[:, 4, 1] = 0  # certain
        stats[-1, 5, 1] = torch.inf  # another id's logit has overflowed
    return stats


@covering(
    ("softcap", [False, True]), ("lse", [False, True]), (("ranks", "n"), [(1, 1), (3, 300), (8, 128), (2, 0)])
)
def test_merge_and_row_gradient(lse: bool, softcap: bool, ranks: int, n: int) -> None:
    stats = some_stats(ranks, n)
    kernels = dispatch.triton_kernels()
    expected, got = reference.merge(stats), kernels.merge(stats.to(DEVICE))
    assert torch.equal(got.valid.cpu(), expected.valid)
    close = partial(torch.testing.assert_close, rtol=3e-6, atol=0, equal_nan=True)
    close(got.offset.cpu(), expected.offset)
    close(got.total.cpu(), expected.total)
    close(got.target_deficit.cpu(), expected.target_deficit)
    close(got.nll.cpu(), expected.nll, atol=1e-30)
    assert n < 6 or expected.nll[4] == 0

    k = stats[0, :, 0]
    cap = torch.rand(n) if softcap else None
    for g in (torch.rand(n), torch.rand(n).double(), torch.rand(2 * n)[::2]):
        slopes = (g, torch.randn(n)) if lse else (g,)
        one = reference.row_gradient(expected, Slopes(*slopes), k, cap)
        there = Slopes(*(slope.to(DEVICE) for slope in slopes))
        arguments = (None if t is None else t.to(DEVICE) for t in (k, cap))
        other = kernels.row_gradient(got, there, *arguments)
        close(other.row.cpu(), one.row, rtol=1e-5, atol=1e-37)
        close(other.target.cpu(), one.target, rtol=1e-5, atol=1e-7)  # its parts cancel


@pytest.mark.parametrize("n", [0, 1, 300])
def test_entropy_gradient(n: int) -> None:
    stats, kernels = some_stats(3, n), dispatch.triton_kernels()
    entropy, slope = 10 * torch.rand(n), torch.randn(n)
    slope[: n // 4] = 0
    expected = numbers.entropy_gradient(reference.merge(stats), entropy, slope, stats[0, :, 0])
    softmax, there = kernels.merge(stats.to(DEVICE)), stats[0, :, 0].to(DEVICE)
    got = kernels.entropy_gradient(softmax, entropy.to(DEVICE), slope.to(DEVICE), there)
    for name, value in expected._asdict().items():
        torch.testing.assert_close(
            getattr(got, name).cpu(), value, rtol=1e-4, atol=1e-6, equal_nan=True, msg=name
        )


@covering(
    ("columns", [1, 300, 1024, 2500]),
    ("dtype", ROUNDING),
    ("logs", [False, True]),
    ("uniform", [False, True]),
    ("terms", [LossTerms(), LossTerms(logit_scale=1.5), LossTerms(softcap=20.0, logit_scale=0.7)]),
)
def test_logits_that_exist(
    columns: int, dtype: torch.dtype, logs: bool, uniform: bool, terms: LossTerms
) -> None:
    """Their statistics and dY, and dY of their exponentials."""
    kernels = dispatch.triton_kernels()
    logits, target = rows(5, columns, 6.0)
    logits = logits.to(dtype)
    logits[0, : columns // 2] = -torch.inf
    asked = reference.ROW_COLUMNS
    expected = reference.logit_stats(logits, target, terms=terms, columns=asked)
    got = kernels.logit_stats(logits.to(DEVICE), target.to(DEVICE), terms=terms, columns=asked).cpu()
    check_stats(Exponentials(None, expected), Exponentials(None, got), LEEWAY)
    k, factors = expected[:, 0] + 1, torch.randn(4, 5)
    gradient = RowGradient(factors[0], factors[1], factors[2] if logs else None)
    every = factors[3] if uniform else None
    out, there = torch.full_like(logits, torch.nan), torch.full_like(logits, torch.nan, device=DEVICE)
    reference.logit_gradient(out, logits, target, k, gradient, every, terms=terms)
    on_device = [None if part is None else part.to(DEVICE) for part in gradient]
    every = None if every is None else every.to(DEVICE)
    arguments = logits.to(DEVICE), target.to(DEVICE), k.to(DEVICE), RowGradient(*on_device), every
    kernels.logit_gradient(there, *arguments, terms=terms)
    rounding = max(5e-6, torch.finfo(dtype).eps if dtype != torch.float32 else 0)
    torch.testing.assert_close(there.cpu(), out, rtol=rounding, atol=5e-6)
    e = torch.rand(5, columns).to(dtype)
    e[:, ::7] = 0
    curved = kernels.curved_rows(e.to(DEVICE), *on_device[::2])
    torch.testing.assert_close(
        curved.cpu(), reference.curved_rows(e, *gradient[::2]), rtol=rounding, atol=1e-6
    )


def test_merged_statistics_go_where_they_are_told() -> None:
    stats = some_stats(3, 7)[:, :3].to(DEVICE)
    place = softmax_place(stats[0])
    got = dispatch.triton_kernels().merge(stats, place)
    assert got.nll is place.nll
    torch.testing.assert_close(place.nll.cpu(), reference.merge(stats.cpu()).nll)
    assert place.valid.tolist() == [False, True, True]


@pytest.mark.skipif(not INTERPRETED, reason="a device fuses; only the interpreter can be told not to")
@pytest.mark.parametrize("fused", [False, True])
def test_tolerances_do_not_depend_on_fused_operations(monkeypatch: pytest.MonkeyPatch, fused: bool) -> None:
    """``tl.fma`` with one rounding, as on a device, and with two. The rest is never fused: off by name."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    roundings = []

    def fma(self, x, y, z):  # type: ignore[no-untyped-def]
        roundings.append(fused)
        if fused:
            total = x.data.astype("float64") * y.data.astype("float64") + z.data.astype("float64")
            return TensorHandle(total.astype(x.data.dtype), z.dtype.scalar)
        return TensorHandle(x.data * y.data + z.data, z.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_fma", fma)
    for spread in (4.0, 3000.0):
        logits, target = rows(4, 300, spread)
        check(*both(logits, target, 300))
    test_merge_and_row_gradient(lse=True, softcap=True, ranks=3, n=300)
    assert roundings


@covering(("dtype", ROUNDING), (("n", "hidden"), [(1, 1), (3, 5), (4, 1025), (0, 4)]))
def test_scale_rows(n: int, hidden: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, scale = torch.randn(n, hidden, generator=generator).to(dtype), torch.rand(n, generator=generator)
    got = dispatch.triton_kernels().scale_rows(x.to(DEVICE), scale.to(DEVICE))
    assert got.dtype == dtype
    torch.testing.assert_close(got.cpu(), reference.scale_rows(x, scale), rtol=ROUNDING[dtype], atol=0)


@covering(
    ("size", [0.0, 1e-30, 1e-9, 0.3, 1.0, 1e20, 1e36]),
    (("n", "hidden"), [(1, 1), (5, 1025), (1030, 3)]),
    further={("n", "hidden"): [(1030, 3)]},
)
def test_lift(n: int, hidden: int, size: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, hidden, generator=generator).half()
    scale = size * (torch.rand(n, generator=generator) - 0.7)
    expected = reference.lift(x, scale)
    got = dispatch.triton_kernels().lift(x.to(DEVICE), scale.to(DEVICE))
    for one, other in zip(got, expected, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one.cpu(), other)
    assert dispatch.triton_kernels().lift(x.bfloat16(), scale) == (scale, None)


@covering(
    ("out_dtype", [torch.float32, torch.bfloat16]),
    ("repeats", ["none", "some", "all"]),
    ("scaled", [False, True]),
    (("count", "hidden"), [(1, 1), (70, 5), (33, 300)]),
)
def test_scatter_add_rows(
    out_dtype: torch.dtype, repeats: str, scaled: bool, count: int, hidden: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = {
        "none": torch.randperm(100, generator=generator)[:count],
        "some": torch.randint(0, 9, (count,), generator=generator),
        "all": torch.full((count,), 7),
    }[repeats]
    values = torch.randn(count, hidden, generator=generator).bfloat16()
    scale = torch.rand(count, generator=generator) if scaled else None
    expected = torch.ones(100, hidden, dtype=out_dtype)
    got = [expected.clone().to(DEVICE) for _ in range(2)]
    reference.scatter_add_rows_(expected, ids, values, scale)
    for out in got:
        dispatch.triton_kernels().scatter_add_rows_(
            out, ids.to(DEVICE), values.to(DEVICE), None if scale is None else scale.to(DEVICE)
        )
    assert torch.equal(*got)
    tolerance = 1e-5 if out_dtype == torch.float32 else 2**-6
    torch.testing.assert_close(got[0].cpu(), expected, rtol=tolerance, atol=tolerance)


def test_scatter_of_chosen_rows_in_a_known_order() -> None:
    ids, values = torch.tensor([5, 2, -1, 0, 2]), torch.arange(10.0).view(5, 2)
    scale, order = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), torch.tensor([3, 1, 4, 0])
    expected = torch.tensor([[24, 28], [0, 0], [4 + 40, 6 + 45], [0, 0], [0, 0], [0, 1]]).float()
    for kernels, device in ((dispatch.REFERENCE, "cpu"), (dispatch.triton_kernels(), DEVICE)):
        got = torch.zeros(6, 2, device=device)
        ids, values, scale, order = (tensor.to(device) for tensor in (ids, values, scale, order))
        kernels.scatter_add_rows_(got, ids, values, scale, order=order)
        assert torch.equal(got.cpu(), expected)


@covering(
    ("dtype", ROUNDING),
    ("given", [False, True]),
    ("lse", [False, True]),
    ("softcap", [False, True]),
    (("n", "hidden"), [(1, 1), (20, 5), (9, 1030), (0, 4)]),
    further={("n", "hidden"): [(9, 1030)]},
)
def test_finish_and_prepare(
    dtype: torch.dtype, given: bool, lse: bool, softcap: bool, n: int, hidden: int
) -> None:
    """Factors that are computed in the kernel, or given; with repeated targets, and those of other shards."""
    draw = torch.Generator().manual_seed(0)
    rows = torch.randint(-1, 4, (n,), generator=draw)
    targets = ShardTargets(rows, torch.argsort(rows, stable=True)[int((rows < 0).sum()) :])
    x, weight = (torch.randn(size, hidden, generator=draw).to(dtype) for size in (n, 4))
    source, main_grad = (torch.randn(size, hidden, generator=draw) for size in (n, 4))
    stats = some_stats(3, n)
    stats[:, :, 1].nan_to_num_(0.5, posinf=0.5)
    slopes = Slopes(torch.rand(1).expand(n), torch.randn(n, generator=draw) if lse else None)
    cap = torch.rand(n, generator=draw) if softcap else None
    results = []
    for kernels, device in ((dispatch.REFERENCE, "cpu"), (dispatch.triton_kernels(), DEVICE)):
        on = partial(_on, device)
        gradient = TokenGradient(
            kernels.merge(on(stats)), Slopes(*map(on, slopes[:2])), on(stats)[0], on(cap)
        )
        factors = kernels.row_gradient(*gradient.arguments()) if given else gradient
        there = ShardTargets(*map(on, targets))
        apart, in_place, only_targets = torch.empty(n, hidden, device=device), on(source), on(source)
        kernels.finish(apart, on(source), on(weight), there, factors)
        kernels.finish(in_place, in_place, on(weight), there, factors)
        target = TargetGradient(factors.target if isinstance(factors, RowGradient) else factors)
        kernels.finish(only_targets, only_targets, on(weight), there, target)
        added = on(main_grad)
        scaled, same = kernels.prepare(added, on(x), there, factors), on(x)
        assert kernels.prepare(added, same, there, target) is same
        assert torch.equal(apart, in_place)
        if not given:  # what scales exponentials
            row, middle = kernels.row_gradient(*gradient.arguments()).row, slice(n // 3, n)
            assert torch.equal(kernels.scale_rows(on(source), gradient), kernels.scale_rows(on(source), row))
            part = kernels.scale_rows(on(source)[middle], gradient.part(middle))
            assert torch.equal(part, kernels.scale_rows(on(source)[middle], row[middle]))
        results.append([tensor.cpu() for tensor in (apart, only_targets, added, scaled)])
    for expected, got in zip(*results, strict=True):
        rounding = ROUNDING[expected.dtype]
        torch.testing.assert_close(got, expected, rtol=max(rounding, 2e-5), atol=1e-5)


def _on(device: str, tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone().to(device)


@covering(
    ("method", METHODS),
    ("split", ["uneven", "all-padding shards"]),
    ("dtype", [torch.float32, torch.bfloat16, torch.float16]),
    further={"method": ["naive"]},
)
def test_the_layer_with_triton_kernels(method: str, split: str, dtype: torch.dtype) -> None:
    """The products in PyTorch, everything between them in the kernels, against float64."""
    x, weight, targets, g = batch(dtype)
    some = torch.arange(3, 60, 6)  # the interpreter is slow
    inputs = (x[some], weight, targets[some], g[some])
    with use_kernels(dispatch.triton_kernels()):
        got = run(method, *(tensor.to(DEVICE) for tensor in inputs), SPLITS[split])
    loss, dx, dw = exact.output_layer(*inputs)
    truncated = 2 if INTERPRETED and dtype == torch.bfloat16 else 1
    torch.testing.assert_close(got.loss.cpu().double(), loss, rtol=1e-6, atol=1e-6)
    assert exact.relative_error(got.dx.cpu(), dx) < TOLERANCE[dtype] * truncated
    assert exact.relative_error(got.dw[:V].cpu(), dw) < TOLERANCE[dtype] * truncated
    assert (got.dw[V:] == 0).all()


@pytest.mark.parametrize(("lazy", "dtype"), [(True, torch.bfloat16), (False, torch.float32)], ids=str)
def test_losses_of_the_library(lazy: bool, dtype: torch.dtype) -> None:
    """Log-probability and entropy of shards, exponentials in the place of their logits, and all gradients."""
    draw = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(size, 8, generator=draw).to(dtype) for size in (5, 60))
    targets = torch.tensor([0, 19, 20, -100, 59])

    def run(device: str) -> list[Tensor]:
        leaves = [x.to(device), *weight.to(device).split((20, 0, 40))]
        if not lazy:
            leaves = [leaves[0] @ part.t() for part in leaves[1:]]
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        logits = LazyLogits(leaves[0], leaves[1:]) if lazy else leaves
        found = vocab_logprobs_and_entropy(
            logits, targets.to(device), keep_exponentials=True, rows_per_chunk=8
        )
        return [*found, *torch.autograd.grad((found[0] + 0.3 * found[1]).sum(), leaves)]

    expected = run("cpu")
    with use_kernels(dispatch.triton_kernels()):
        got = run(DEVICE)
    for value, wanted in zip(got, expected, strict=True):
        torch.testing.assert_close(value.cpu(), wanted, rtol=10 * ROUNDING[dtype], atol=1e-5)
