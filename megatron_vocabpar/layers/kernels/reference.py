"""The row kernels of the vocabulary layers in plain PyTorch: this is the specification.

Device kernels have the same signatures and must give the same results; each function below is one kernel, and
numbered steps are the kernel's. Two more, ``row_gradient`` and ``entropy_gradient``, are in
``layers/numbers.py``.

Source: sections 4.3 and 4.4 of the paper (the S pass; equations 1 to 6 are the merge), with integer offsets
and without the target's term.
Read ``../exponents.py`` first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_vocabpar.layers.exponents import (
    NOTHING,
    fraction_power,
    log_of_power,
    power_of_two,
    split_exponent,
)
from megatron_vocabpar.layers.gemm import result_dtype, row_chunks, transient_bytes
from megatron_vocabpar.layers.numbers import (
    STATS_WIDTH,
    Gradient,
    RowGradient,
    Softmax,
    TargetGradient,
    TokenGradient,
    empty_softmax,
    row_gradient,
)
from megatron_vocabpar.layers.targets import ShardTargets
from megatron_vocabpar.layers.terms import PLAIN, LossTerms

_CACHED_BYTES = 2**22
"""A chunk of logits in the statistics' dtype that stays in a CPU's cache."""

HEADROOM = {torch.float16: 14, torch.float8_e4m3fn: 8}
"""Exponents by which stored values may exceed 1, for storage with few exponents below 1.

fp16 ends at 2^-24: with rows lifted by 2^14, ids down to 2^-39 of the most likely one are kept. e4m3 has 2^-9
to 448: lifted by 2^8, values are at most 362, and ids down to 2^-18 of the most likely one are kept.
"""

LEEWAY = 8
"""By how many exponents a device kernel's k may be below the row's own, for storage without headroom.

It is 0 here. A kernel that reads a row once takes k from the row's first ids, and reads the row again if a
later exponent exceeds it by more. Stored values are then up to 2^8, which costs no digit.
"""


E_LOG_E, LARGEST, LOGIT_SUM = "sum of E ln E", "largest logit", "sum of logits"
ROW_COLUMNS = (E_LOG_E, LARGEST, LOGIT_SUM)
"""Further numbers of a row that ``exponentials`` leaves if asked, in the order of their columns.

The sum of unrounded E ln E and the largest transformed logit, of the ids but the target; the sum of all
transformed logits. The largest is -inf, or the lowest finite number, of a row without an id; where a logit is
NaN it is any number.
"""


class Exponentials(NamedTuple):
    """One shard's exponentials of the logits, without the target.

    Attributes:
        e: [n, P] storage dtype, or None if not asked for: ``exp(Y_ij) / 2^k_i``, exactly 0 for the target,
            for padding and for logits 2^126 below the row's largest.
        stats: [n, 4] as exchanged: the columns below, and 1 if the shard owns the target, else 0; then those
            that were asked for.
        target_slope: [n] slope of the softcap at the target's logit, 0 where another shard owns it; None
            without a softcap.
    """

    e: Tensor | None
    stats: Tensor
    target_slope: Tensor | None = None

    @property
    def k(self) -> Tensor:
        """[n] whole offsets."""
        return self.stats[:, 0]

    @property
    def s_rest(self) -> Tensor:
        """[n] sums of the unrounded exponentials; 0 if the shard has the target alone."""
        return self.stats[:, 1]

    @property
    def target_logit(self) -> Tensor:
        """[n] the target's transformed logit, 0 if another shard owns it."""
        return self.stats[:, 2]


def log_weighted(e: Tensor) -> Tensor:
    """E ln E, 0 where E is 0.

    Not by ``xlogy``, which on the CPU is slower, and rounds the last few elements of a tensor differently.
    """
    return e.clamp(min=torch.finfo(e.dtype).tiny).log_().mul_(e)


def transform_logits_(logits: Tensor, terms: LossTerms) -> Tensor | None:
    """Scale and cap logits in place: ``softcap * tanh(logit_scale * y / softcap)``.

    Args:
        logits: any shape, fp32 or fp64, overwritten.
        terms: have the logit scale and the softcap.

    Returns:
        The slope of the cap, 1 - tanh^2, accurate even if tanh rounds to 1; None without a cap.
    """
    if terms.logit_scale != 1:
        logits.mul_(terms.logit_scale)
    if terms.softcap is None:
        return None
    decay = logits.abs().mul_(-2 / terms.softcap).exp_()
    logits.div_(terms.softcap).tanh_().mul_(terms.softcap)
    return 4 * decay / (1 + decay).square_()


def take_target_(logits: Tensor, target_row: Tensor, valid_rows: int) -> Tensor:
    """Mask padding and each row's target with -inf, in place.

    Args:
        logits: [n, P] fp32 or fp64, overwritten.
        target_row: [n] int64, the target's column in this shard; not owned outside [0, valid_rows).
        valid_rows: columns from here on are padding.

    Returns:
        [n] the target's logit as it was, 0 if not owned.
    """
    logits[:, valid_rows:] = -torch.inf
    if valid_rows == 0:
        return logits.new_zeros(logits.shape[0])
    owned = is_owned(target_row, valid_rows)
    column = target_row.clamp(0, valid_rows - 1).unsqueeze(1)  # [n, 1]
    logit = logits.gather(1, column).squeeze(1)
    logits.scatter_(1, column, torch.where(owned, -torch.inf, logit).unsqueeze(1))
    return torch.where(owned, logit, 0)


def is_owned(target_row: Tensor, valid_rows: int) -> Tensor:
    """[n] whether the shard's true rows hold the target."""
    return (target_row >= 0) & (target_row < valid_rows)


def row_offset(q: Tensor, dtype: torch.dtype) -> Tensor:
    """k: the largest exponent of each row, less the headroom of the storage dtype.

    Args:
        q: [n, P] whole exponents (see ``split_exponent``).
        dtype: of the stored exponentials.

    Returns:
        [n] like q; ``NOTHING`` for rows without a finite logit.
    """
    if q.shape[1] == 0:
        return q.new_full((q.shape[0],), NOTHING)
    largest = q.amax(dim=1)
    return torch.where(largest == NOTHING, NOTHING, largest - HEADROOM.get(dtype, 0))


def exponentials(
    logits: Tensor,
    target_row: Tensor,
    valid_rows: int,
    offset: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    stats: Tensor | None = None,
    terms: LossTerms = PLAIN,
    columns: Sequence[str] = (),
) -> Exponentials:
    """The S pass between its matrix products: one read of the logits, one write of E.

    Args:
        logits: [n, P] fp32 or fp64; overwritten.
        target_row: [n] int64, the target's column in this shard; not owned outside [0, valid_rows).
        valid_rows: columns from here on are padding.
        offset: [n] offsets, at least the rows' own (naive: the largest of all shards); None takes those.
        dtype: storage dtype of E, which decides the headroom; None is the dtype of the logits.
        out: [n, P] memory for E, of that dtype or a wider one; None if E is not needed.
        stats: [n, 4 + columns] like the logits, which is written; None allocates.
        terms: have scale and softcap of the logits. With a softcap E is multiplied by the cap's slope, which
            every gradient needs; the sums are not.
        columns: of ``ROW_COLUMNS``, in their order: what is left beside the four numbers.

    Returns:
        ``out`` and ``stats`` with the results, which are in the dtype of the logits but for E.
    """
    dtype = logits.dtype if dtype is None else dtype
    # 1. the target leaves the row; padding is masked
    slope = transform_logits_(logits, terms)
    target_slope = None
    if slope is not None:
        target_slope = take_target_(slope, target_row, valid_rows)
        slope.masked_fill_(slope == -torch.inf, 0)
    more = {}
    if LOGIT_SUM in columns:
        more[LOGIT_SUM] = logits[:, :valid_rows].sum(dim=1)
    target_logit = take_target_(logits, target_row, valid_rows)
    # 2. y = (q + f) ln 2
    q, r = split_exponent(logits)
    if LARGEST in columns:
        more[LARGEST] = (
            logits.amax(dim=1) if logits.shape[1] else logits.new_full(target_row.shape, -torch.inf)
        )
    # 3. the row's offset
    k = row_offset(q, dtype) if offset is None else offset
    # 4. 2^f * 2^(q - k): the second factor is exact
    values = fraction_power(r).mul_(power_of_two(q.sub_(k.unsqueeze(1))))
    # 5. sum the unrounded values, store the rounded ones
    s_rest = values.sum(dim=1)
    if E_LOG_E in columns:
        more[E_LOG_E] = log_weighted(values).sum(dim=1)
    if out is not None:
        out.copy_(values if slope is None else values.mul_(slope))
    owner = is_owned(target_row, valid_rows).to(k.dtype)
    numbers = k, s_rest, target_logit, owner, *(more[name] for name in columns)
    stats = logits.new_empty((len(logits), len(numbers))) if stats is None else stats
    stats.copy_(torch.stack(numbers, dim=1))
    return Exponentials(out, stats, target_slope)


def curved_rows(e: Tensor, row: Tensor, logs: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """``E (row + logs ln E)``, 0 where E is 0: dY of stored exponentials but for the target.

    Args:
        e: [n, P], untouched unless it is ``out``.
        row, logs: [n] fp32 or fp64 factors; without ``logs`` they are 0.
        out: [n, P] of any floating dtype; None allocates it in that of E.
    """
    wide = e.to(row.dtype)
    factor = row.unsqueeze(1)
    if logs is not None:
        curve = wide.clamp(min=torch.finfo(wide.dtype).tiny).log_()
        factor = curve.mul_(logs.unsqueeze(1)).add_(factor)
    if out is not None and out.dtype == wide.dtype:
        return torch.mul(wide, factor, out=out)
    value = wide * factor
    return value.to(e.dtype) if out is None else out.copy_(value)


def logit_stats(
    logits: Tensor,
    target_row: Tensor,
    *,
    terms: LossTerms = PLAIN,
    columns: Sequence[str] = (),
    row_kernel: Callable[..., Exponentials] = exponentials,
) -> Tensor:
    """``Exponentials.stats`` of logits that are only read: [n, 4 + columns] fp32 (fp64 for fp64).

    Args:
        logits: [n, P] fp16, bf16, fp32 or fp64, of true ids alone.
        target_row, terms, columns: as for ``exponentials``.
        row_kernel: an implementation of ``exponentials``.
    """
    dtype = result_dtype(logits.dtype)
    stats = logits.new_empty((len(logits), STATS_WIDTH + len(columns)), dtype=dtype)
    for rows, y in _chunks_of(logits, dtype):
        y.copy_(logits[rows])
        transform_logits_(y, terms)
        row_kernel(y, target_row[rows], y.shape[1], dtype=dtype, stats=stats[rows], columns=columns)
    return stats


def logit_gradient(
    out: Tensor,
    logits: Tensor,
    target_row: Tensor,
    k: Tensor,
    gradient: RowGradient,
    uniform: Tensor | None = None,
    *,
    terms: LossTerms = PLAIN,
    row_kernel: Callable[..., Exponentials] = exponentials,
) -> None:
    """dY of logits that exist: ``E (row + logs ln E) + uniform``, and ``target`` at the target, by the cap.

    Args:
        out: [n, P], overwritten: dY, in any floating dtype; perhaps ``logits`` itself.
        logits: [n, P] of true ids alone; E is ``exp(Y) / 2^k`` of the transformed ones, 0 for the target.
        target_row: [n] int64 as for ``exponentials``.
        k: [n] whole offsets, at least the rows' own.
        gradient: by the transformed logits.
        uniform: [n] what every id gets; None is 0.
        terms: have scale and softcap of the logits. dY is by logits behind their scale, and before the cap.
        row_kernel: an implementation of ``exponentials``.
    """
    for rows, place in _chunks_of(logits, k.dtype):
        y = out[rows] if out.dtype == k.dtype else place
        y.copy_(logits[rows])
        cap = transform_logits_(y, terms)
        row_kernel(y, target_row[rows], y.shape[1], k[rows], dtype=y.dtype, out=y)
        curved_rows(y, gradient.row[rows], None if gradient.logs is None else gradient.logs[rows], y)
        if uniform is not None:
            y += uniform[rows].unsqueeze(1)
        add_targets_(y, target_row[rows], gradient.target[rows])
        if cap is not None:
            y.mul_(cap)
        if y is place:
            out[rows].copy_(y)


def _chunks_of(logits: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Chunks of rows, and a place for each: memory of one, as fresh pages cost more than the arithmetic."""
    size = _CACHED_BYTES if logits.device.type == "cpu" else transient_bytes(logits.device)
    chunks, place = row_chunks(*logits.shape, transient_bytes=size), None
    for rows in chunks:
        if place is None:
            place = logits.new_empty((rows.stop - rows.start, logits.shape[1]), dtype=dtype)
        yield rows, place[: rows.stop - rows.start]


def add_targets_(grad: Tensor, row: Tensor, values: Tensor) -> None:
    """Add each owned target's value to its column of ``grad`` [n, P], in place."""
    if grad.shape[1] == 0:
        return
    # Not scatter_, which copies all of a 16-bit tensor on the CPU.
    at = torch.arange(len(row), device=row.device), row.clamp(0, grad.shape[1] - 1)
    grad[at] += torch.where(is_owned(row, grad.shape[1]), values, 0).to(grad.dtype)


def merge(gathered: Tensor, out: Softmax | None = None) -> Softmax:
    """Combine the statistics of all shards, in rank order.

    Args:
        gathered: [R, n, 4] packed statistics, fp32 or fp64.
        out: memory for the result; None allocates.
    """
    out = empty_softmax(gathered.shape[1], gathered.dtype, gathered.device) if out is None else out
    k, s_rest, target_logit, owner = gathered.unbind(2)  # each [R, n]
    # 1. the target's logit: one shard owns it, so the sum does not round
    owned = owner != 0
    valid = owned.any(dim=0)
    target = torch.where(owned, target_logit, 0).sum(dim=0)
    target = target.masked_fill_(target == torch.inf, torch.nan)  # an overflow is no certain prediction
    target_q, target_r = split_exponent(target)
    # 2. the largest exponent, and all terms relative to it, added in rank order
    highest = k.amax(dim=0)
    offset = torch.where(valid, torch.maximum(highest, target_q), highest)
    rest = torch.zeros_like(target)
    for term in power_of_two(k - offset) * s_rest:
        rest = rest + term
    # fraction_power overwrites its argument; target_r is needed again below.
    at_target = torch.where(valid, power_of_two(target_q - offset) * fraction_power(target_r.clone()), 0)
    total = rest + at_target
    # 3. nll = log(S / at_target) in two forms. The first is accurate for likely targets and never negative;
    # the second is for at_target < S / 2, which may have underflowed.
    likely = torch.log1p(rest / at_target)
    unlikely = torch.log(total) + (log_of_power(offset - target_q) - target_r)
    nll = torch.where((rest <= at_target) & (at_target != 0), likely, unlikely)
    nll = torch.where(total == 0, torch.inf, nll)
    nll = nll.masked_fill_(total == torch.inf, torch.nan)  # another logit has overflowed
    deficit = torch.where(total == 0, 0, -rest / total)
    out.nll.copy_(torch.where(valid, nll, 0))
    out.offset.copy_(offset)
    out.total.copy_(total)
    out.target_deficit.copy_(torch.where(valid, deficit, 0))
    out.valid.copy_(valid)
    return out


def scale_rows(x: Tensor, scale: Tensor | TokenGradient, out: Tensor | None = None) -> Tensor:
    """Each row of x times its factor, multiplied in the factors' dtype.

    Args:
        x: [n, H], untouched.
        scale: [n] fp32 or fp64, or a gradient, whose ``row`` is meant.
        out: [n, H] like x; None allocates.
    """
    if isinstance(scale, TokenGradient):
        scale = row_gradient(*scale.arguments()).row
    if out is not None and x.dtype == out.dtype == scale.dtype:
        return torch.mul(x, scale.unsqueeze(1), out=out)
    scaled = (x.to(scale.dtype) * scale.unsqueeze(1)).to(x.dtype)
    return scaled if out is None else out.copy_(scaled)


def lift(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor | None]:
    """Factors that lift scaled rows into the range of fp16, whose small numbers end at 2^-24.

    Args:
        x: [n, H].
        scale: [n] factors, fp32.

    Returns:
        [n] factors, a power of two above ``scale``: rows times them stay below 2^15. And what undoes it, one
        element. Without fp16 ``scale`` itself and None.
    """
    if x.dtype != torch.float16 or x.numel() == 0:
        return scale, None
    largest = (x.abs().amax(dim=1).to(scale.dtype) * scale.abs()).amax()
    lifted = power_of_two(15 - torch.frexp(largest).exponent.to(scale.dtype)).reshape(1)
    return scale * lifted, 1 / lifted


def scatter_add_rows_(
    out: Tensor, rows: Tensor, values: Tensor, scale: Tensor | None = None, *, order: Tensor | None = None
) -> None:
    """``out[rows[i]] += scale[i] * values[i]`` in place, repeats in one fixed order.

    Args:
        out: [P, H] of any floating dtype. Repeats are summed in fp32 before they are added to a 16-bit one.
        rows: [n] int64 rows of ``out``, repeats allowed.
        values: [n, H] of any floating dtype.
        scale: [n] fp32 or fp64 factors; None is 1.
        order: [m] int64 the places i that are added, which sorts their rows; None adds all, as they stand.
    """
    dtype = result_dtype(out.dtype)
    narrow = out.dtype != dtype
    if order is None and narrow:
        order = rows.argsort(stable=True)
    if order is not None:
        rows, values = rows[order], values[order]
        scale = None if scale is None else scale[order]
    if rows.numel() == 0:
        return
    addends = values.to(dtype)
    if scale is not None:
        addends = addends * scale.to(dtype).unsqueeze(1)
    if narrow:
        sums = torch.zeros_like(addends)
        _accumulate_rows_(sums, _first_of_equals(rows), addends)
        addends = sums.to(out.dtype)
    _accumulate_rows_(out, rows, addends)


def finish(grad: Tensor, source: Tensor, weight: Tensor, targets: ShardTargets, gradient: Gradient) -> None:
    """T behind its product: ``grad_i = row_i source_i + target_i weight[rows_i]``.

    Args:
        grad: [n, H] fp32 or fp64, overwritten.
        source: [n, H] like it, perhaps ``grad`` itself: E W.
        weight: [P, H], the true rows.
        targets: of the tokens; only owned ones have a term with the weight.
        gradient: the factors, or what they are made of; where ``row`` is in E, it is left out.
    """
    row, target = _factors(gradient)
    if row is not None:
        scale_rows(source, row, grad)
    tokens = targets.owned
    addends = weight[targets.rows[tokens]].to(grad.dtype) * target[tokens].unsqueeze(1)
    _accumulate_rows_(grad, tokens, addends)


def prepare(main_grad: Tensor, x: Tensor, targets: ShardTargets, gradient: Gradient) -> Tensor:
    """TW before its product: ``main_grad[rows_i] += target_i x_i`` of owned targets; returns ``row_i x_i``.

    Args:
        main_grad: [P, H], the true rows, added to as by ``scatter_add_rows_``.
        x: [n, H], untouched.
        targets: of the tokens.
        gradient: as for ``finish``.
    """
    row, target = _factors(gradient)
    scatter_add_rows_(main_grad, targets.rows, x, target, order=targets.owned)
    return x if row is None else scale_rows(x, row)


def _factors(gradient: Gradient) -> tuple[Tensor | None, Tensor]:
    if isinstance(gradient, TargetGradient):
        target = gradient.target
        return None, target if isinstance(target, Tensor) else row_gradient(*target.arguments()).target
    factors = gradient if isinstance(gradient, RowGradient) else row_gradient(*gradient.arguments())
    return factors.row, factors.target


def _first_of_equals(rows: Tensor) -> Tensor:
    """[m] int64: for each of ``rows``, which are sorted, the place of the first equal one.

    For example (3, 7, 7) gives (0, 1, 1). Not by ``torch.unique``, for whose number of results the host waits
    for the device.
    """
    place = torch.arange(len(rows), device=rows.device)
    return torch.where(rows != rows.roll(1), place, 0).cummax(0).values


def _accumulate_rows_(out: Tensor, rows: Tensor, addends: Tensor) -> None:
    """Add rows of one dtype by the operation that is deterministic on the device.

    On the CPU index_add_ adds in the order of the rows. On a GPU it adds atomically, in any order; there
    index_put_ sorts by row first.
    """
    if out.is_cuda:
        out.index_put_((rows,), addends, accumulate=True)
    else:
        out.index_add_(0, rows, addends)
