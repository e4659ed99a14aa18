"""What S, the merge, dX and T ask of a CUDA device, found without one and without computing anything.

Meta tensors are made to say that they are CUDA tensors, so the code takes the path that it takes there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_vocabpar.layers.extras.extra import join
from megatron_vocabpar.layers.fp8 import Fp8Weight
from megatron_vocabpar.layers.gemm import result_dtype
from megatron_vocabpar.layers.kernels.dispatch import REFERENCE, RowKernels, use_kernels
from megatron_vocabpar.layers.kernels.reference import Exponentials
from megatron_vocabpar.layers.numbers import STATS_WIDTH, RowGradient, Slopes, Softmax, empty_softmax
from megatron_vocabpar.layers.operands import ShardOptions
from megatron_vocabpar.layers.output.plain import output_forward
from megatron_vocabpar.layers.partition import VocabRange
from megatron_vocabpar.layers.targets import ShardTargets
from megatron_vocabpar.layers.terms import PLAIN, LossTerms
from megatron_vocabpar.layers.token_loss import loss_slopes
from tests.layers.shards import extras_of


@dataclass(frozen=True)
class Case:
    """One shard's microbatch."""

    method: str
    dtype: torch.dtype
    n: int = 8
    hidden: int = 16
    rows: int = 32
    padding: int = 0
    ranks: int = 8
    recompute: bool = False
    terms: LossTerms = PLAIN
    main_grad: torch.dtype | None = None
    fp8: bool = False


def _kernels(launched: Callable[[str], None]) -> RowKernels:
    """Kernels that say that they were launched, and give tensors of the right shapes."""

    def exponentials(
        logits: Tensor, *_: Any, out: Any = None, stats: Any = None, **options: Any
    ) -> Exponentials:
        launched("exponentials")
        stats = logits.new_empty((len(logits), STATS_WIDTH)) if stats is None else stats
        return Exponentials(out, stats, logits.new_empty(len(logits)) if options["terms"].softcap else None)

    def scale_rows(x: Tensor, scale: Tensor, out: Tensor | None = None) -> Tensor:
        launched("scale_rows")
        return torch.empty_like(x) if out is None else out

    def lift(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor | None]:
        if x.dtype != torch.float16:
            return scale, None
        launched("peaks of lift")
        launched("lift")
        return torch.empty_like(scale), scale.new_empty(1)

    def scatter_add_rows_(*_: Any, order: Tensor | None = None, **__: Any) -> None:
        launched("scatter_add_rows_" if order is not None else "scatter_add_rows_ and its sort")

    def merge(gathered: Tensor, out: Softmax | None = None) -> Softmax:
        launched("merge")
        return empty_softmax(gathered.shape[1], gathered.dtype, gathered.device) if out is None else out

    def finish(*_: Any) -> None:
        launched("finish")

    def prepare(main_grad: Tensor, x: Tensor, *_: Any) -> Tensor:
        launched("prepare")
        return torch.empty_like(x)

    def row_gradient(softmax: Softmax, slopes: Slopes, k: Tensor, *_: Any) -> RowGradient:
        launched("row_gradient")
        return RowGradient(k.new_empty(len(k)), k.new_empty(len(k)))

    return replace(
        REFERENCE,
        name="none",
        exponentials=exponentials,
        scale_rows=scale_rows,
        lift=lift,
        scatter_add_rows_=scatter_add_rows_,
        finish=finish,
        prepare=prepare,
        merge=merge,
        row_gradient=row_gradient,
    )


class Launches(TorchDispatchMode):
    """Names of the operations that launch a kernel: all but views and allocations. Ours are one each."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returns = func._schema.returns
        view = bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        name = func._schema.name.removeprefix("aten::")
        if not view and name not in ("empty", "new_empty", "empty_like", "empty_strided", "detach"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class ProductCall:
    """One matrix product as PyTorch was asked for it; ``addend`` is addmm's ``self``."""

    name: str
    a: torch.dtype
    b: torch.dtype
    addend: torch.dtype | None
    out_dtype: torch.dtype | None
    out: torch.dtype | None


@dataclass(frozen=True)
class Operand:
    """What a tensor is but for its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class ScaledCall:
    """One product of 8-bit operands: the two matrices and their scales."""

    operands: tuple[Operand, ...]
    out_dtype: torch.dtype


class Products(TorchFunctionMode):
    """Every matrix product that PyTorch is asked for by tensors that say they are on a CUDA device."""

    NAMES = ("mm", "addmm", "addmm_", "matmul", "__matmul__", "__rmatmul__", "addr_", "mv", "bmm", "baddbmm")

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[ProductCall | ScaledCall] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return True
        name = getattr(func, "__name__", "")
        if name == "_scaled_mm":
            operands = (*args, kwargs["scale_a"], kwargs["scale_b"])
            found = tuple(Operand(tuple(o.shape), o.stride(), o.dtype) for o in operands)
            self.calls.append(ScaledCall(found, kwargs["out_dtype"]))
        if name in self.NAMES:
            *addend, a, b = args
            out = kwargs.get("out")
            given = kwargs.get("out_dtype")
            self.calls.append(
                ProductCall(
                    name,
                    a.dtype,
                    b.dtype,
                    addend[0].dtype if addend else None,
                    given,
                    None if out is None else out.dtype,
                )
            )
            if (
                name == "addmm" and given is not None
            ):  # meta tensors have none; one launch is as good as another
                return torch.mm(a, b, out_dtype=given, out=out)
        return func(*args, **kwargs)


@contextmanager
def pretended_device() -> Iterator[tuple[Launches, Products]]:
    """Tensors made inside are on a pretended CUDA device; what is asked of it is listed."""
    launches, products = Launches(), Products()
    with torch.device("meta"), products, launches, use_kernels(_kernels(launches.names.append)):
        yield launches, products


def run(case: Case) -> tuple[list[str], list[Any]]:
    """Launches and matrix products of S, merge, dX and T of one microbatch, whose owned targets are known."""
    with pretended_device() as (launches, products):
        _run(case)
    return launches.names, products.calls


def _run(case: Case) -> None:
    wide = result_dtype(case.dtype)
    x = torch.empty(case.n, case.hidden, dtype=case.dtype)
    weight = torch.empty(case.rows, case.hidden, dtype=case.dtype)
    targets = ShardTargets(*(torch.empty(m, dtype=torch.int64) for m in (case.n, case.n // case.ranks)))
    main_grad = torch.empty(case.rows, case.hidden, dtype=case.main_grad or wide)
    grad_loss = torch.empty(case.n)
    size = case.ranks * case.rows - case.padding
    shard = VocabRange((case.ranks - 1) * case.rows, case.ranks * case.rows, size)
    gathered = torch.empty(case.ranks, case.n, STATS_WIDTH + case.terms.needs_mean, dtype=wide)
    extras = extras_of(case.terms, weight, shard)
    state, _ = output_forward(
        x,
        weight,
        targets,
        shard,
        ShardOptions(
            with_input_gradient=case.method == "vocab-2",
            recompute=case.recompute,
            terms=case.terms,
            fp8_weight=Fp8Weight.of(weight, shard) if case.fp8 else None,
        ),
        extras=extras,
    )
    assert state is not None
    softmax = join(gathered, extras)
    slopes = loss_slopes(softmax, case.terms, grad_loss)
    state.input_gradient(softmax, slopes)
    state.add_weight_gradient(softmax, loss_slopes(softmax, case.terms, grad_loss), main_grad)
