"""The Triton kernels compile for sm_80, sm_90 and sm_100 with 64-bit offsets; needs Triton, and no GPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from megatron_vocabpar.layers.kernels import dispatch
from megatron_vocabpar.layers.kernels.reference import ROW_COLUMNS
from megatron_vocabpar.layers.numbers import RowGradient, Slopes, TokenGradient, empty_softmax
from megatron_vocabpar.layers.targets import ShardTargets
from megatron_vocabpar.layers.terms import LossTerms
from tests.cases import covering, rest_is_slow

from .compiled import compile_launches, driver

P, H = 32768, 4096
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
STORED = DTYPES | {"fp8": torch.float8_e4m3fn}
CAPABILITIES = [90, *(pytest.param(capability, marks=pytest.mark.long) for capability in (80, 100))]


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))


def check(capability: int, launch: Callable[[], object]) -> list[str]:
    """The names of the launched kernels: none has a 32-bit offset of a row, or fuses a product with a sum."""
    kernels = compile_launches(capability, launch)
    assert [kernel.short_products() for kernel in kernels] == [[]] * len(kernels)
    assert not any(kernel.fuses for kernel in kernels)
    return [kernel.name for kernel in kernels]


def test_nothing_of_the_pretended_driver_stays() -> None:
    before = dict(vars(driver))
    x, scale = torch.empty(2, 16), torch.empty(2)
    assert compile_launches(90, lambda: dispatch.triton_kernels().scale_rows(x, scale))
    assert vars(driver) == before


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(
    ("dtype", "columns", "options"),
    [
        ("bf16", 8194, {}),  # no multiple of 16: read one by one
        ("fp8", P, {}),
        ("fp32", P, {"terms": LossTerms(softcap=30.0, logit_scale=0.5)}),
        ("fp16", P, {"kept": False, "asked": 3}),
        *rest_is_slow(
            [
                ("bf16", P, {}),
                ("fp32", P, {}),
                ("bf16", P, {"terms": LossTerms(softcap=30.0), "given": True}),
                ("bf16", P, {"kept": False}),
            ]
        ),
    ],
    ids=str,
)
def test_exponentials(capability: int, dtype: str, columns: int, options: dict[str, Any]) -> None:
    """The true ids do not end at a multiple of 16, and fp32 exponentials take the place of their logits."""
    if (dtype, capability) == ("fp8", 80):
        pytest.skip("8-bit products need compute capability 8.9")
    terms = {name: value for name, value in options.items() if name == "terms"}
    logits, targets = torch.empty(2, columns), torch.zeros(2, dtype=torch.int64)
    out = logits if dtype == "fp32" else torch.empty(2, columns, dtype=STORED[dtype])
    asked = ROW_COLUMNS[: options.get("asked", 0)]
    stats = torch.empty(2, 4 + len(asked))
    offset = stats[:, 0] if "given" in options else None
    check(
        capability,
        lambda: dispatch.triton_kernels().exponentials(
            logits,
            targets,
            columns - 3,
            offset,
            dtype=STORED[dtype],
            out=out if options.get("kept", True) else None,
            stats=stats,
            columns=asked,
            **terms,
        ),
    )


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_scale_rows(capability: int, dtype: str) -> None:
    x, scale = torch.empty(2, H, dtype=DTYPES[dtype]), torch.empty(2)
    check(capability, lambda: dispatch.triton_kernels().scale_rows(x, scale))


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_lift(capability: int) -> None:
    x, scale = torch.empty(2, H, dtype=torch.float16), torch.empty(2)
    assert len(check(capability, lambda: dispatch.triton_kernels().lift(x, scale))) == 2


@pytest.mark.parametrize("capability", CAPABILITIES)
@covering(("values", DTYPES), ("into", ["bf16", "fp32"]), ("scaled", [False, True]))
def test_scatter_add_rows(capability: int, values: str, into: str, scaled: bool) -> None:
    """Of IB, and scaled of dW."""
    rows, scale = torch.zeros(32, dtype=torch.int64), torch.empty(32) if scaled else None
    out, values_ = torch.empty(64, H, dtype=DTYPES[into]), torch.empty(32, H, dtype=DTYPES[values])
    check(
        capability,
        lambda: dispatch.triton_kernels().scatter_add_rows_(out, rows, values_, scale, order=rows),
    )


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(
    ("lse", "softcap"), rest_is_slow(product([True, False], [True, False]), (True, True))
)
def test_kernels_of_the_statistics(capability: int, lse: bool, softcap: bool) -> None:
    """The merge, and what computes a row's factors."""
    n, kernels = 256, dispatch.triton_kernels()
    stats, softmax = torch.empty(8, n, 4), empty_softmax(n, torch.float32, torch.device("cpu"))
    check(capability, lambda: kernels.merge(stats, softmax))
    slopes = Slopes(torch.empty(n), torch.empty(n) if lse else None)
    gradient = TokenGradient(softmax, slopes, stats[0], torch.empty(n) if softcap else None)
    check(capability, lambda: kernels.row_gradient(*gradient.arguments()))
    slope = torch.empty(n)
    check(capability, lambda: kernels.entropy_gradient(softmax, slope, slope, stats[0, :, 0]))
    targets = ShardTargets(*torch.zeros(2, n, dtype=torch.int64))
    grad, x, weight = torch.empty(n, H), torch.empty(n, H).bfloat16(), torch.empty(64, H).bfloat16()
    check(capability, lambda: kernels.finish(grad, grad, weight, targets, gradient))
    check(capability, lambda: kernels.prepare(torch.empty(64, H), x, targets, gradient))


@pytest.mark.parametrize("capability", CAPABILITIES)
@covering(("dtype", DTYPES), ("softcap", [None, 30.0]), further={"dtype": ["fp16"]})
def test_gradients_of_logits(capability: int, dtype: str, softcap: float | None) -> None:
    """Those that exist, and those that are stored as exponentials; 16-bit logits are read as they are."""
    logits, k, kernels = torch.empty(2, P, dtype=DTYPES[dtype]), torch.empty(2), dispatch.triton_kernels()
    targets, terms = torch.zeros(2, dtype=torch.int64), LossTerms(softcap=softcap)
    gradient = RowGradient(k, k, k)
    check(capability, lambda: kernels.logit_stats(logits, targets, terms=terms, columns=ROW_COLUMNS))
    check(capability, lambda: kernels.logit_gradient(logits, logits, targets, k, gradient, k, terms=terms))
    check(capability, lambda: kernels.curved_rows(logits, k, k))
