"""Where the Triton kernels run in a test: on a CUDA device, in the interpreter, or not at all."""

from __future__ import annotations

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"

pytestmark = [
    pytest.mark.skipif(
        DEVICE == "cpu" and not INTERPRETED, reason="runs in the interpreter, by another test"
    ),
    *([pytest.mark.gpu] if DEVICE == "cuda" else []),
]

ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""Two fp32 roundings of exp2; one unit in the last place of the storage (the interpreter truncates bf16)."""
