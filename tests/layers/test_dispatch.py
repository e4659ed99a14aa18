"""One place decides which row kernels run, says once why not Triton's, and can be overruled."""

from __future__ import annotations

import importlib.util
import logging

import pytest
import torch

from megatron_vocabpar.layers.kernels import dispatch
from megatron_vocabpar.layers.numbers import Slopes
from megatron_vocabpar.layers.operands import ShardOptions
from megatron_vocabpar.layers.output.plain import output_forward
from megatron_vocabpar.layers.partition import VocabRange


def test_the_cpu_has_its_own_and_tests_can_choose() -> None:
    cpu = torch.device("cpu")
    assert dispatch.row_kernels(cpu, torch.float32) is dispatch.CPU
    with dispatch.use_kernels(dispatch.REFERENCE):
        assert dispatch.row_kernels(cpu, torch.float32) is dispatch.REFERENCE
    assert dispatch.row_kernels(cpu, torch.float32) is dispatch.CPU


def test_where_triton_cannot_serve_the_log_says_why_once(caplog: pytest.LogCaptureFixture) -> None:
    dispatch._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert dispatch.row_kernels(torch.device("meta"), torch.float32) is dispatch.REFERENCE
            assert dispatch.row_kernels(torch.device("cuda", 0), torch.float64) is dispatch.REFERENCE
    assert [record.getMessage().split("because ")[1] for record in caplog.records] == [
        "tensors are on meta, and the Triton kernels are for CUDA devices",
        "the logits are torch.float64, and the Triton kernels compute in float32",
    ]


def test_a_gpu_without_the_fused_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    for capability, refused in (((8, 9), True), ((9, 0), False), ((10, 3), False), ((12, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        dispatch.why_not_triton.cache_clear()
        dispatch.why_not_fused.cache_clear()
        reason = dispatch.why_not_fused(torch.device("cuda", 3))
        assert (reason is not None) == refused
        if refused:
            with pytest.raises(ValueError, match=f"for .* 9 and 10, and cuda:3 has {capability[0]}"):
                dispatch.fused_product(torch.device("cuda", 3))
    dispatch.why_not_triton.cache_clear()
    dispatch.why_not_fused.cache_clear()


@pytest.mark.parametrize(
    ("dtype", "hidden", "rows", "message"),
    [
        (torch.float16, 16, 16, "not torch.float16; leave it out"),
        (torch.bfloat16, 12, 16, "hidden size 12: pad to a multiple of 8"),
        (torch.bfloat16, 16, 18, "rows of a shard 18: pad to a multiple of 8"),
    ],
)
def test_operands_that_the_fused_kernel_cannot_read(
    dtype: torch.dtype, hidden: int, rows: int, message: str
) -> None:
    x, weight = torch.ones(3, hidden, dtype=dtype), torch.ones(rows, hidden, dtype=dtype)
    shard, options = VocabRange(0, rows, rows), ShardOptions(fused=True)
    with pytest.raises(ValueError, match=message):
        output_forward(x, weight, torch.zeros(3, dtype=torch.int64), shard, options)


def test_each_function_is_served_in_the_dtype_that_it_computes_in(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.dtype] = []

    def chosen(device: torch.device, dtype: torch.dtype) -> dispatch.RowKernels:
        asked.append(dtype)
        return dispatch.REFERENCE

    monkeypatch.setattr(dispatch, "row_kernels", chosen)
    half, first = torch.zeros(2, 3, dtype=torch.float16), torch.tensor([0])
    dispatch.scale_rows(half, torch.ones(2))
    dispatch.scatter_add_rows_(half, first, half[:1])
    narrow = dispatch.merge(torch.zeros(1, 2, 4))
    dispatch.row_gradient(narrow, Slopes(torch.ones(2).double()), torch.zeros(2), first)
    assert asked == [torch.float32] * 4
    asked.clear()
    dispatch.exponentials(half.double(), first.repeat(2), 3)
    dispatch.scale_rows(half.double(), torch.ones(2).double())
    dispatch.scatter_add_rows_(half, first, half[:1].double())
    dispatch.scatter_add_rows_(half.double(), first, half[:1])
    wide = dispatch.merge(torch.zeros(1, 2, 4).double())
    dispatch.row_gradient(wide, Slopes(torch.ones(2)), torch.zeros(2).double(), first)
    assert asked == [torch.float64] * 6
