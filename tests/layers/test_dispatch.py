"""One place decides which row kernels run, says once why not Triton's, and can be overruled."""

from __future__ import annotations

import logging

import pytest
import torch

from megatron_vocabpar.layers.kernels import dispatch


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
