"""Checks a device's row kernels against the specification, ``layers/kernels/reference.py``, on the CPU.

On a GPU they are the Triton kernels; where those cannot be used, the checks give the reason and do not run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps

import psutil
import torch
from torch import Tensor

from megatron_vocabpar.doctor.check_runs import Finding, within
from megatron_vocabpar.layers.kernels import dispatch, reference
from megatron_vocabpar.layers.kernels.dispatch import RowKernels
from megatron_vocabpar.layers.kernels.reference import Exponentials
from megatron_vocabpar.layers.numbers import Slopes, TokenGradient
from megatron_vocabpar.layers.targets import ShardTargets

ROUNDING = {torch.float32: 4e-6, torch.bfloat16: 2**-7, torch.float16: 2**-9}
"""Relative: a few fp32 roundings of exp2 and of sums; two units in the last place of 16-bit storage."""

LARGE = 2**31 + 2**24
_SMALLEST = {torch.float32: 2.0**-100, torch.bfloat16: 2.0**-100, torch.float16: 2.0**-14}


def kernels_in_use(device: torch.device) -> RowKernels | str:
    """The kernels that the layers would use for fp32 logits, or why the Triton kernels cannot be used."""
    kernels = dispatch.row_kernels(device, torch.float32)
    if kernels is not dispatch.REFERENCE:
        return kernels
    return dispatch.why_not_triton(device, torch.float32) or "the reference was chosen"


def _check(bytes_of_element: int = 0) -> Callable[[Callable[..., float]], Callable[..., Finding]]:
    """Turn a function that returns the largest error into a check, which needs the kernels and the memory.

    The check takes the names of device and dtype, and the function's sizes.

    Args:
        bytes_of_element: memory that the function takes for each of its ``elements``.
    """

    def decorate(largest_error: Callable[..., float]) -> Callable[..., Finding]:
        @wraps(largest_error)
        def check(device: str, dtype: str, **sizes: int) -> Finding:
            where, kernels = torch.device(device), kernels_in_use(torch.device(device))
            if isinstance(kernels, str):
                return Finding("not run", reason=kernels)
            needed = bytes_of_element * sizes.get("elements", LARGE)
            free = free_bytes(where) if needed else 0
            if needed > free:
                reason = f"it needs {needed / 2**30:.1f} GiB of memory, and {free / 2**30:.1f} GiB are free"
                return Finding("not run", reason=reason)
            error = largest_error(kernels, where, getattr(torch, dtype), **sizes)
            return within(error, 1.0, f"{kernels.name}: largest error {error:.2f} of what rounding allows")

        return check

    return decorate


def free_bytes(device: torch.device) -> int:
    """Memory of the device that can be allocated now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def _error(got: Tensor, expected: Tensor, smallest: float, dtype: torch.dtype) -> float:
    """Largest error relative to the expected size (at least ``smallest``), over the dtype's ``ROUNDING``.

    NaN stays NaN.
    """
    got, expected = got.cpu().double(), expected.double()
    relative = (got - expected).abs() / expected.abs().clamp(min=smallest)
    return float(relative.max()) / ROUNDING[dtype]


def _largest(errors: list[float]) -> float:
    """``max``, but NaN if one of them is NaN."""
    return float(torch.tensor(errors, dtype=torch.float64).max())


def _rows(tensor: Tensor, rows: Tensor) -> Tensor:
    return torch.stack([tensor[row].cpu() for row in rows.tolist()])


def _logits(n: int, columns: int) -> tuple[Tensor, Tensor]:
    """Logits [n, P] and targets [n]: the first column, the last, another shard's (-1), then random ones."""
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(n, columns, generator=generator)
    target = torch.randint(-1, columns, (n,), generator=generator)
    target[:3] = torch.tensor([0, columns - 1, -1])
    return logits, target


@_check()
def exponentials(
    kernels: RowKernels, device: torch.device, storage: torch.dtype, n: int = 64, columns: int = 32000
) -> float:
    """E, offsets, sums and target logits, stored in ``storage``; with and without padding, and an offset."""
    errors = []
    for valid in (columns, columns - 37):
        logits, target = _logits(n, columns)
        logits[:, valid:] = torch.nan
        target[target >= valid] = -1
        expected_k = reference.exponentials(logits.clone(), target, valid, dtype=storage).k
        for offset in (None, expected_k + 5):
            expected, got = (
                kernel(
                    logits.to(where, copy=True),
                    target.to(where),
                    valid,
                    None if offset is None else offset.to(where),
                    dtype=storage,
                    out=torch.full_like(logits, torch.nan, dtype=storage, device=where),
                )
                for kernel, where in (
                    (reference.exponentials, torch.device("cpu")),
                    (kernels.exponentials, device),
                )
            )
            errors.append(_exponentials_error(got, expected, storage))
    return _largest(errors)


def _exponentials_error(got: Exponentials, expected: Exponentials, storage: torch.dtype) -> float:
    """The largest error of E, sums and target logits; offsets may be provisional (``LEEWAY``)."""
    assert got.e is not None
    assert expected.e is not None
    shift = torch.exp2(got.k.cpu().double() - expected.k.double())
    return _largest(
        [
            _error(got.e.cpu() * shift.unsqueeze(1), expected.e, _SMALLEST[storage], storage),
            _error(got.s_rest.cpu() * shift, expected.s_rest, 2.0**-100, torch.float32),
            _error(got.target_logit, expected.target_logit, 1.0, torch.float32),
        ]
    )


@_check()
def scale_rows(
    kernels: RowKernels, device: torch.device, dtype: torch.dtype, n: int = 300, hidden: int = 5121
) -> float:
    """Rows of ``dtype`` times fp32 factors."""
    generator = torch.Generator().manual_seed(0)
    x, scale = torch.randn(n, hidden, generator=generator).to(dtype), torch.rand(n, generator=generator)
    got = kernels.scale_rows(x.to(device), scale.to(device))
    return _error(got, reference.scale_rows(x, scale), _SMALLEST[dtype], dtype)


@_check()
def scatter_add_rows(
    kernels: RowKernels, device: torch.device, dtype: torch.dtype, n: int = 700, hidden: int = 1100
) -> float:
    """Rows of ``dtype`` into fp32 rows and into their own dtype, with repeats; twice with the same bits."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, n // 8, (n,), generator=generator)
    values, scale = torch.rand(n, hidden, generator=generator).to(dtype), torch.rand(n, generator=generator)
    errors = []
    for out_dtype in {torch.float32, dtype}:
        expected = torch.ones(n // 8, hidden, dtype=out_dtype)
        first, second = (expected.to(device, copy=True) for _ in range(2))
        reference.scatter_add_rows_(expected, rows, values, scale)
        for out in (first, second):
            kernels.scatter_add_rows_(out, rows.to(device), values.to(device), scale.to(device))
        errors.append(_error(first, expected, 1.0, out_dtype))
        if not torch.equal(first, second):
            raise ValueError(f"two runs of scatter_add_rows into {out_dtype} differ")
    return _largest(errors)


@_check()
def statistics(kernels: RowKernels, device: torch.device, dtype: torch.dtype, n: int = 700) -> float:
    """The merge of four shards' statistics, and T's row gradient of cross-entropy and of more, in fp32."""
    columns, shards = 250, 4
    logits, target = _logits(n, columns * shards)
    gathered = torch.stack(
        [
            reference.exponentials(part.clone(), target - shard * columns, columns).stats
            for shard, part in enumerate(logits.split(columns, dim=1))
        ]
    )
    generator = torch.Generator().manual_seed(0)
    g, lse = torch.rand(2, n, generator=generator)
    errors = []
    expected, got = reference.merge(gathered.double()), kernels.merge(gathered.to(device))
    if not torch.equal(got.valid.cpu(), expected.valid):
        raise ValueError("the merge and its specification differ in which tokens are valid")
    errors.append(_error(got.nll, expected.nll, 1.0, dtype))
    k = gathered[0, :, 0]
    for slopes in ((g,), (g, lse)):
        here, wide = Slopes(*(s.to(device) for s in slopes)), Slopes(*(s.double() for s in slopes))
        exact = reference.row_gradient(expected, wide, k.double())
        gradient = kernels.row_gradient(got, here, k.to(device))
        smallest = 2.0**-100 if here.lse is None else 0.1  # the parts cancel
        errors += [
            _error(gradient.row, exact.row, smallest, dtype),
            _error(gradient.target, exact.target, smallest, dtype),
        ]
    return _largest(errors)


@_check()
def gradients(
    kernels: RowKernels, device: torch.device, dtype: torch.dtype, n: int = 300, hidden: int = 1100
) -> float:
    """Rows of dX in fp32 and of ``dtype`` times computed factors, and the terms of repeated targets."""
    generator = torch.Generator().manual_seed(0)
    random = partial(torch.rand, generator=generator)
    stats, g, lse = random(2, n, 4), random(n), random(n)
    stats[..., 0] = stats[..., 0].round()
    stats[0, :, 3], stats[1, :, 2:] = 1, 0
    rows = torch.randint(-1, n // 8, (n,), generator=generator)
    targets = ShardTargets(rows, rows.argsort(stable=True)[int((rows < 0).sum()) :])
    source, weight, x = random(n, hidden), random(n // 8, hidden).to(dtype), random(n, hidden).to(dtype)
    results = []
    for row_kernels, where in ((dispatch.REFERENCE, torch.device("cpu")), (kernels, device)):
        softmax = row_kernels.merge(stats.to(where))
        gradient = TokenGradient(softmax, Slopes(g.to(where), lse.to(where)), stats[0].to(where))
        moved = ShardTargets(*(tensor.to(where) for tensor in targets))
        grad, main_grad = source.to(where, copy=True), torch.ones(n // 8, hidden, device=where)
        row_kernels.finish(grad, grad, weight.to(where), moved, gradient)
        scaled = row_kernels.prepare(main_grad, x.to(where), moved, gradient)
        results.append((grad, main_grad, scaled))
    (grad, main_grad, scaled), (got_grad, got_main_grad, got_scaled) = results
    return _largest(
        [
            _error(got_grad, grad, 1.0, torch.float32),
            _error(got_main_grad, main_grad, 1.0, torch.float32),
            _error(got_scaled, scaled, _SMALLEST[dtype], dtype),
        ]
    )


@_check(bytes_of_element=7)
def large_exponentials(
    kernels: RowKernels, device: torch.device, storage: torch.dtype, elements: int = LARGE
) -> float:
    """Logits of more than 2^31 elements, E in 16 bits: the first and the last rows."""
    columns = min(131111, elements // 8)  # odd: no row starts where a power of two does
    n = -(-elements // columns)
    generator = torch.Generator(device=device).manual_seed(0)
    logits = torch.randn(n, columns, generator=generator, device=device)
    checked = torch.tensor([0, 1, n - 3, n - 2, n - 1])
    target = torch.arange(n) * 7 % columns
    expected = reference.exponentials(
        _rows(logits, checked),
        target[checked],
        columns,
        dtype=storage,
        out=torch.empty(len(checked), columns, dtype=storage),
    )
    out = torch.full((n, columns), torch.nan, dtype=storage, device=device)
    got = kernels.exponentials(logits, target.to(device), columns, dtype=storage, out=out)
    assert got.e is not None
    return _exponentials_error(
        Exponentials(_rows(got.e, checked), _rows(got.stats, checked)), expected, storage
    )


@_check(bytes_of_element=5)
def large_rows(kernels: RowKernels, device: torch.device, dtype: torch.dtype, elements: int = LARGE) -> float:
    """Scaled rows, and scattered rows from and into tensors of more than 2^31 elements."""
    hidden = min(8191, elements // 8)
    n = -(-elements // hidden)
    x = torch.zeros(n, hidden, dtype=dtype, device=device)
    checked = torch.tensor([0, 1, n - 3, n - 2, n - 1])
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(len(checked), hidden, generator=generator).to(dtype)
    scale = torch.rand(n, generator=generator)
    # into the far rows, twice into the last
    rows = torch.cat([checked, checked[-1:]])
    kernels.scatter_add_rows_(x, rows.to(device), torch.cat([values, values[-1:]]).to(device))
    expected = torch.cat([values[:-1], 2 * values[-1:]])
    errors = [_error(_rows(x, checked), expected, 1.0, dtype)]
    # from the far rows
    sums, expected_sums = (torch.zeros(8, hidden, device=where) for where in (device, torch.device("cpu")))
    factors = torch.zeros(n)
    factors[checked] = scale[checked]
    kernels.scatter_add_rows_(sums, torch.arange(n, device=device) % 8, x, factors.to(device))
    reference.scatter_add_rows_(expected_sums, checked % 8, expected, factors[checked])
    errors.append(_error(sums, expected_sums, 1.0, torch.float32))
    scaled = _rows(kernels.scale_rows(x, scale.to(device)), checked)
    errors.append(_error(scaled, reference.scale_rows(expected, scale[checked]), _SMALLEST[dtype], dtype))
    return _largest(errors)
