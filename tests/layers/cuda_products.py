"""Which matrix products PyTorch takes on CUDA, by version: data.

Read from the checks of ``_mm_dtype_out_cuda`` and ``_addmm_dtype_out_cuda`` in Blas.cpp, and from messages in
``libtorch_cuda.so`` of the wheels 2.8.0, 2.9.1, 2.10.0 and 2.13.0: "self dtype must match either out_dtype or
mat1 dtype" first appears in 2.10.0, with pytorch/pytorch#167931. No wheel of 2.11 and 2.12 was opened.
"""

from __future__ import annotations

import torch

from .cuda_device import ProductCall

OPERANDS, RESULT = "the operands' dtype", "out_dtype"

ADDEND_OF_ADDMM = {
    "2.8": (OPERANDS,),
    "2.9": (OPERANDS,),
    "2.10": (OPERANDS, RESULT),
    "2.11": (OPERANDS, RESULT),
    "2.12": (OPERANDS, RESULT),
    "2.13": (OPERANDS, RESULT),
}
"""What dtypes ``self`` of ``torch.addmm(self, a, b, out_dtype=...)`` may have in each supported version."""

WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
"""The only ``out_dtype`` beside the operands' own, in all of them."""


def refusal(call: ProductCall, version: str) -> str | None:
    """Why PyTorch of this version does not take the call on CUDA; None if it does."""
    if call.a != call.b:
        return "operands of two dtypes"
    if call.out_dtype is None:
        return "an addend or out of another dtype" if {call.addend, call.out} - {call.a, None} else None
    if call.name not in ("mm", "addmm"):
        return "out_dtype is for mm and addmm"
    if call.out_dtype not in (call.a, WIDER.get(call.a)):
        return "out_dtype is neither the operands' nor fp32"
    if call.out not in (None, call.out_dtype):
        return "out is not in out_dtype"
    addends = {OPERANDS: call.a, RESULT: call.out_dtype}
    if call.name == "addmm" and call.addend not in [addends[name] for name in ADDEND_OF_ADDMM[version]]:
        return "self and mat2 must have the same dtype"
    return None
