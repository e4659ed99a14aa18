"""What the layers ask of a CUDA device: products that every supported PyTorch takes, and few launches."""

from __future__ import annotations

import tomllib
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_vocabpar.layers import gemm
from megatron_vocabpar.layers.gemm import addmm_takes_fp32
from megatron_vocabpar.layers.terms import PLAIN, LossTerms
from tests.cases import wants_fake_tensors

from .cuda_device import Case, ProductCall, ScaledCall, run
from .cuda_products import ADDEND_OF_ADDMM, refusal

TERMS = (PLAIN, LossTerms(softcap=30.0), LossTerms(label_smoothing=0.1, z_loss=0.01, logit_scale=2.0))
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"padding": 3, "terms": TERMS[1]},
    {"padding": 3, "terms": TERMS[2]},
    {"recompute": True},
    {"recompute": True, "padding": 3, "terms": TERMS[2]},
)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def test_the_table_has_every_supported_version() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert "torch>=2.8,<2.14" in project["optional-dependencies"]["train"]
    assert list(ADDEND_OF_ADDMM) == [f"2.{minor}" for minor in range(8, 14)]


@pytest.mark.parametrize(
    ("version", "takes"),
    [
        ("2.8.0", False),
        ("2.9.1+cu128", False),
        ("2.10.0a0+b558c986e8.nv25.11", False),
        ("2.10.0.dev20251201", False),
        ("2.10.0", True),
        ("2.13.0+cpu", True),
    ],
)
def test_the_choice_is_by_version(version: str, takes: bool) -> None:
    assert addmm_takes_fp32(version) == takes


def _products(monkeypatch: pytest.MonkeyPatch, takes_fp32: bool) -> dict[ProductCall, Case]:
    """All kinds of products that are asked for, each with a case that does."""
    monkeypatch.setattr(gemm, "addmm_takes_fp32", lambda version: takes_fp32)
    found: dict[ProductCall, Case] = {}
    for method, dtype, options in product(("vocab-1", "vocab-2"), DTYPES, OPTIONS):
        case = Case(method, dtype, **options)
        _, calls = run(case)
        assert calls
        found |= dict.fromkeys(calls, case)
    for method, dtype in product(("vocab-1", "vocab-2"), DTYPES):
        case = Case(method, dtype, main_grad=dtype)
        found |= dict.fromkeys(run(case)[1], case)
    return found


@wants_fake_tensors
@pytest.mark.parametrize("takes_fp32", [False, True])
def test_every_product_is_one_that_pytorch_takes(monkeypatch: pytest.MonkeyPatch, takes_fp32: bool) -> None:
    calls = _products(monkeypatch, takes_fp32)
    assert any(call.name == "addmm" and call.out_dtype is not None for call in calls) == takes_fp32
    for version in ADDEND_OF_ADDMM:
        if addmm_takes_fp32(f"{version}.0") == takes_fp32:
            refused = {call: (refusal(call, version), case) for call, case in calls.items()}
            assert {call: why for call, why in refused.items() if why[0]} == {}, version


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("method", ["vocab-1", "vocab-2"])
def test_8_bit_products_are_ones_that_pytorch_takes(method: str, recompute: bool) -> None:
    """By PyTorch's own checks of what a CUDA device takes: layouts, multiples of 16, scales."""
    case = Case(method, torch.bfloat16, n=24, hidden=160, rows=288, fp8=True, recompute=recompute, padding=3)
    _, calls = run(case)
    products = [call for call in calls if isinstance(call, ScaledCall)]
    again = {"vocab-1": 2, "vocab-2": 1}[method] * recompute  # in T, and in TW
    assert len(products) == 3 + again
    assert len(calls) == len(products)
    for call in products:
        a, b, scale_a, scale_b = call.operands
        assert (scale_a.shape, scale_b.shape) == ((a.shape[0], 1), (1, b.shape[1]))
        assert call.out_dtype == torch.bfloat16  # with those, the only one that all versions and devices have
        with FakeTensorMode(), torch.device("cuda"):
            torch._scaled_mm(
                *[torch.empty_strided(o.shape, o.stride, dtype=o.dtype) for o in (a, b)],
                *[torch.empty_strided(o.shape, o.stride, dtype=o.dtype) for o in (scale_a, scale_b)],
                out_dtype=call.out_dtype,
            )


@wants_fake_tensors
@pytest.mark.parametrize("method", ["vocab-1", "vocab-2"])
@pytest.mark.parametrize("terms", TERMS, ids=["plain", "softcap", "smoothing, z-loss, scale"])
@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.bfloat16, 10), (torch.float32, 10), (torch.float16, 20)], ids=str
)
def test_a_microbatch_has_few_launches(
    monkeypatch: pytest.MonkeyPatch, method: str, terms: LossTerms, dtype: torch.dtype, limit: int
) -> None:
    """The paper's largest vocabulary, 262144, on eight ranks: two chunks of logits, so 4 launches in them.

    fp16's weight gradient comes in 4 parts, which are scaled as they are added. The slopes of further terms
    of the loss are a dozen small launches of [n], in dX and in dW.
    """
    limit += 0 if terms.is_cross_entropy else 30
    monkeypatch.setattr(gemm, "addmm_takes_fp32", lambda version: True)
    case = Case(method, dtype, n=2048, hidden=3072, rows=32768, padding=3, terms=terms)
    launches, _ = run(case)
    assert launches.count("exponentials") == 2
    assert "copy_" not in launches or terms.label_smoothing  # nothing is copied onto itself
    assert len(launches) <= limit, launches
