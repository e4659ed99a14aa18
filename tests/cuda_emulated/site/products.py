"""Matrix products: those that the CPU lacks, what they cost, and what an older PyTorch refuses."""

from __future__ import annotations

from typing import Any

import torch

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}


def widened(value: Any) -> Any:
    """16-bit and 8-bit tensors as float32; everything else as it is."""
    narrow = isinstance(value, torch.Tensor) and value.is_floating_point() and value.itemsize < 4
    return value.float() if narrow else value


def product_with_out_dtype(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Products in a dtype that their operands do not have, which the CPU lacks."""
    dtypes = [value for value in (*args, kwargs.pop("out_dtype", None)) if isinstance(value, torch.dtype)]
    out = kwargs.pop("out", None)
    operands = [widened(value) for value in args if not isinstance(value, torch.dtype)]
    result = func.overloadpacket(*operands, **kwargs).to(dtypes[0])
    return result if out is None else out.copy_(result)


def scaled_product(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """``_scaled_mm`` of 8-bit operands, with one scale, or one for each row and each column."""
    product = (a.float() @ b.float()) * scale_a * scale_b
    return (product if bias is None else product + bias).to(out_dtype or torch.bfloat16)


def operations_of(func: Any, args: tuple[Any, ...], result: Any) -> int:
    """Multiplications and additions of a product; 0 of anything else, whose time is that of its bytes."""
    if func._schema.name.removeprefix("aten::") not in {*PRODUCTS, "_scaled_mm"}:
        return 0
    of_sum = [value for value in args if isinstance(value, torch.Tensor)][-1].shape[-2]
    return 2 * result.numel() * of_sum


def refuse_as_older_torch(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], version: str) -> None:
    """Raise where PyTorch of this version refuses the product; the table is that of the layers' tests."""
    from tests.layers.cuda_device import ProductCall
    from tests.layers.cuda_products import refusal

    operands = [value for value in args if isinstance(value, torch.Tensor)]
    a, b = operands[-2:]
    dtypes = [value for value in (*args, kwargs.get("out_dtype")) if isinstance(value, torch.dtype)]
    out = kwargs.get("out")
    call = ProductCall(
        name=name,
        a=a.dtype,
        b=b.dtype,
        addend=operands[0].dtype if len(operands) == 3 else None,
        out=None if out is None else out.dtype,
        out_dtype=dtypes[0] if dtypes else None,
    )
    reason = refusal(call, version)
    if reason:
        raise RuntimeError(f"PyTorch {version} on CUDA: {reason}")
