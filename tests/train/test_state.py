"""Where the model of ``vocabpar train`` lies: all of it on the rank's device.

The device is ``meta``: to megatron-core it is what ``cuda`` is on a GPU, so that it puts there what it would
put on a GPU, and leaves on the host what it would leave there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron_vocabpar.schedule.words.placement import Placement
from megatron_vocabpar.train import core_on_cpu
from megatron_vocabpar.train.config import TrainConfig
from megatron_vocabpar.train.core_on_cpu import megatron_on
from megatron_vocabpar.train.state import build_chunks
from tests.cases import rest_is_slow
from tests.spawn import run_ranks

FAR = torch.device("meta")


def tensors_of(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers, their gradients, and tensors that modules keep as plain attributes."""
    yield from chunk.named_parameters()
    yield from chunk.named_buffers()
    for name, parameter in chunk.named_parameters():
        yield f"main_grad of {name}", parameter.main_grad
    for module_name, module in chunk.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield f"{module_name}.{name}", value


def elsewhere(_: int, config: TrainConfig, placement: Placement) -> list[str]:
    """Names of what is not on the device."""
    with megatron_on(torch.device("cpu")):
        parallel_state.initialize_model_parallel(1, config.pp)
        model_parallel_cuda_manual_seed(config.seed)
        with patch.object(core_on_cpu, "_CPU", FAR):
            chunks = build_chunks(config, placement, FAR)
        return [name for chunk in chunks for name, tensor in tensors_of(chunk) if tensor.device != FAR]


CASES: list[tuple[str, dict[str, Any], Placement]] = [
    ("vocab-2", {}, Placement(2)),
    ("baseline", {"position": "rope", "dtype": "bf16"}, Placement(2)),
    ("vocab-1", {"tied": True, "dtype": "bf16"}, Placement(2, 2, "vshape")),
    ("redis", {"distributed_optimizer": True}, Placement(2)),
]


@pytest.mark.parametrize(("method", "options", "placement"), rest_is_slow(CASES, *CASES[:2]))
def test_the_whole_model_is_on_the_ranks_device(
    method: str, options: dict[str, Any], placement: Placement
) -> None:
    config = TrainConfig(
        method=method, pp=2, layers=4, hidden=16, heads=2, seq_length=8, vocab_size=96, **options
    )
    assert run_ranks(2, elsewhere, config, placement) == [[], []]
