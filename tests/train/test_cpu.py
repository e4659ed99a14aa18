"""What stands in megatron-core's places while our own jobs run it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from megatron_vocabpar.train.core_on_cpu import megatron_on


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_norms_without_apex_know_sequence_parallelism_on_every_device(device: str) -> None:
    """As megatron-core marks the parameters of its own norms, whose gradients it sums over the ranks."""
    config = SimpleNamespace(
        normalization="LayerNorm",
        sequence_parallel=True,
        layernorm_zero_centered_gamma=False,
        persist_layer_norm=False,
        memory_efficient_layer_norm=False,
    )
    current = torch.cuda.current_device
    with megatron_on(torch.device(device)):
        norm = WrappedTorchNorm(config, 4, eps=1e-3)
        assert (torch.cuda.current_device is current) == (device == "cuda")
    assert isinstance(norm, torch.nn.LayerNorm)
    assert [p.sequence_parallel for p in norm.parameters()] == [True, True]
    with pytest.raises(AssertionError, match="sequence parallel"):
        WrappedTorchNorm(config, 4)
