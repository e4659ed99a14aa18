"""One place decides which row kernels run, says once why not Triton's, and can be overruled."""

from __future__ import annotations

import logging

import pytest
import torch

from megatron_vocabpar.layers.kernels import dispatch
from megatron_vocabpar.layers.numbers import Slopes


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
    dispatch.row_gradient(narrow, Slopes(torch.ones(2).double()), torch.zeros(2))
    assert asked == [torch.float32] * 4
    asked.clear()
    dispatch.exponentials(half.double(), first.repeat(2), 3)
    dispatch.scale_rows(half.double(), torch.ones(2).double())
    dispatch.scatter_add_rows_(half, first, half[:1].double())
    dispatch.scatter_add_rows_(half.double(), first, half[:1])
    wide = dispatch.merge(torch.zeros(1, 2, 4).double())
    dispatch.row_gradient(wide, Slopes(torch.ones(2)), torch.zeros(2).double())
    assert asked == [torch.float64] * 6
