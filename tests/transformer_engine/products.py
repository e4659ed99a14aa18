"""Matrix products, single and grouped: ``D = op(B) op(A)`` of row-major matrices; and rows of groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tests.transformer_engine.dtypes import torch_dtype, wide
from tests.transformer_engine.quantized import plain

Result = tuple[Any, Tensor | None, None, Tensor | None]


def generic_gemm(
    A: Tensor,
    transa: bool,
    B: Tensor,
    transb: bool,
    D: Tensor | None,
    quantizer: Any,
    output_dtype: int | None,
    bias: Tensor | None,
    bias_type: int,
    gelu: bool,
    gelu_in: Tensor | None,
    grad: bool,
    workspace: Tensor,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    *,
    comm_overlap: Any = None,
    alpha: float = 1.0,
    extra_output: Tensor | None = None,
    **_: Any,
) -> Result:
    """One product: the output, and the bias's gradient where a bias is given and ``grad``.

    Args:
        A: ``[m, k]``, with ``transa`` ``[k, m]`` for a product of k columns; like B, perhaps of 8 bits.
        B: ``[..., n]`` with the leading dimensions of the output; with ``transb`` they are summed over.
        D: the output, added to with ``accumulate``, else written; None makes one of ``output_dtype``.
        bias: added, or with ``grad`` what has the gradient ``sum(B)``.
    """
    if comm_overlap is not None or gelu or quantizer is not None:
        raise NotImplementedError("a product with userbuffers, GELU or an 8-bit output")
    a, b = plain(A, rowwise=transa).flatten(0, -2), plain(B, rowwise=not transb).flatten(0, -2)
    value = alpha * ((b.t() if transb else b) @ (a.t() if transa else a))
    grad_bias = None
    if bias is not None and bias.numel():
        if grad:
            grad_bias = b.sum(0).to(bias.dtype)
        else:
            value += wide(bias)
    if D is None:
        shape = value.shape if transb else (*B.shape[:-1], value.shape[-1])
        dtype = A.dtype if output_dtype is None else torch_dtype(output_dtype)
        return value.view(shape).to(dtype), grad_bias, None, extra_output
    value = value.view(D.shape)
    D.copy_(wide(D) + value if accumulate else value)
    return D, grad_bias, None, extra_output


def te_general_grouped_gemm(
    A: Sequence[Tensor],
    transa: bool,
    B: Sequence[Tensor],
    transb: bool,
    D: Sequence[Tensor],
    D_type: int,
    m_splits: Sequence[int],
    bias: Sequence[Tensor],
    bias_type: int,
    single_output: bool,
    pre_gelu_out: Sequence[Tensor],
    grad: bool,
    workspace: Sequence[Tensor],
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    sm_count: int,
) -> list[Tensor]:
    """Several products, into ``D`` each or the rows of its one; gradients of biases into ``bias``."""
    outputs = list(D[0].split(list(m_splits))) if single_output else list(D)
    for a, b, out, one in zip(A, B, outputs, bias, strict=True):
        _, grad_bias, _, _ = generic_gemm(
            *(a, transa, b, transb, out, None, None, one, bias_type, False, None, grad),
            *(workspace, workspace_size, accumulate, use_split_accumulator),
        )
        if grad_bias is not None:
            one.copy_(grad_bias)
    return list(bias)


def fused_multi_row_padding(x: Tensor, out: Tensor, sizes: Sequence[int], padded: Sequence[int]) -> None:
    """Groups of rows, each filled up with zeros."""
    for group, target in zip(x.split(list(sizes)), out.split(list(padded)), strict=True):
        target[: len(group)] = group
        target[len(group) :] = 0


def fused_multi_row_unpadding(x: Tensor, out: Tensor, padded: Sequence[int], sizes: Sequence[int]) -> None:
    """Groups of rows without the last ones of each."""
    for group, target in zip(x.split(list(padded)), out.split(list(sizes)), strict=True):
        target.copy_(group[: len(target)])


FUNCTIONS = {
    "generic_gemm": generic_gemm,
    "te_general_grouped_gemm": te_general_grouped_gemm,
    "fused_multi_row_padding": fused_multi_row_padding,
    "fused_multi_row_unpadding": fused_multi_row_unpadding,
}
