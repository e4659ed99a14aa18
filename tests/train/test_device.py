"""One iteration of ``vocabpar train`` on another device than the host: what handlers keep, what is copied.

The device is ``meta``, which has no values, so the host is told those that it reads: shapes and ids. A mode
sees every copy from the host to the device: one that is not queued from pinned memory holds the host up.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from megatron_vocabpar.layers.kernels.reference import Exponentials
from megatron_vocabpar.pipeline import loss_reports, microbatches
from megatron_vocabpar.pipeline.forward_backward import ForwardBackward, vocab_groups
from megatron_vocabpar.runtime.buffers import Buffers
from megatron_vocabpar.runtime.streams import HostCopy
from megatron_vocabpar.schedule.words.placement import Placement
from megatron_vocabpar.train import core_on_cpu
from megatron_vocabpar.train.config import TrainConfig
from megatron_vocabpar.train.core_on_cpu import megatron_on
from megatron_vocabpar.train.state import build_chunks
from megatron_vocabpar.train.trainer import forward_step
from tests.cases import rest_is_slow
from tests.spawn import run_ranks

FAR, HOST = torch.device("meta"), torch.device("cpu")
M, B, S, V = 3, 2, 8, 96
METHODS = ("baseline", "vocab-1", "vocab-2", "naive", "interlaced")


class Copies(TorchFunctionMode):
    """Notes what would make the host wait for a copy to the device; memory is pinned in name only."""

    def __init__(self) -> None:
        super().__init__()
        self.blocking: list[str] = []
        self._pinned: list[torch.Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.pin_memory or kwargs.pop("pin_memory", False):
            pinned = args[0].clone() if func is torch.Tensor.pin_memory else func(*args, **kwargs)
            self._pinned.append(pinned)
            return pinned
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in ("to", "copy_", "cuda") and isinstance(result, torch.Tensor) and result.device == FAR:
            source = args[1] if name == "copy_" else args[0]
            queued = kwargs.get("non_blocking") and any(source is each for each in self._pinned)
            if source.device == HOST and source.dim() > 0 and not queued:
                self.blocking.append(f"{name} of {tuple(source.shape)} {source.dtype}")
        return result


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Tensors of what a handler keeps: nested containers, dataclasses, and what an event will give."""
    if hasattr(value, "wait"):
        value = value.wait()
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif hasattr(leaf, "__dataclass_fields__") or isinstance(leaf, Exponentials):
            for name in getattr(leaf, "__dataclass_fields__", None) or leaf._fields:
                yield from tensors_in(getattr(leaf, name))


def batches() -> Iterator[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(M):
        tokens = torch.randint(0, V, (B, S), generator=generator)
        positions = torch.arange(S).expand(B, S).contiguous()
        yield {"tokens": tokens, "labels": tokens, "position_ids": positions, "loss_mask": torch.ones(B, S)}


def iterate(_: int, method: str) -> tuple[int, list[str], list[str]]:
    """How many tensors the handlers kept, those on another device, and the copies that block."""
    config = TrainConfig(
        method=method, pp=1, layers=2, hidden=16, heads=2, seq_length=S, vocab_size=V, micro_batch_size=B
    )
    kept: list[str] = []
    ids = torch.cat([batch["tokens"].flatten() for batch in batches()])
    shapes = torch.tensor([[1, B, S]] * M).flatten()
    put = Buffers.put

    def watched(buffers: Buffers, producer: Any, name: str, value: Any, **options: Any) -> None:
        kept.extend(f"{name} of {producer}: {t.device}" for t in tensors_in(value) if t.numel())
        put(buffers, producer, name, value, **options)

    with ExitStack() as stack:
        stack.enter_context(megatron_on(HOST))
        parallel_state.initialize_model_parallel(1, 1)
        model_parallel_cuda_manual_seed(config.seed)
        stack.enter_context(patch.object(core_on_cpu, "_CPU", FAR))
        stack.enter_context(patch.object(Buffers, "put", watched))
        stack.enter_context(patch.object(microbatches, "to_host", lambda _: shapes))
        stack.enter_context(patch.object(microbatches, "start_to_host", lambda _: HostCopy(ids)))
        arrived = lambda flags: HostCopy(torch.ones(flags.shape, dtype=torch.bool))  # noqa: E731
        stack.enter_context(patch.object(loss_reports, "start_to_host", arrived))
        chunks = build_chunks(config, Placement(1), FAR)
        chunks[0].config.finalize_model_grads_func = None  # a reduction over gloo, of what has no values
        run = ForwardBackward(method, vocab_groups(), FAR)
        copies = stack.enter_context(Copies())
        run(
            forward_step_func=partial(forward_step, FAR),
            data_iterator=batches(),
            model=chunks,
            num_microbatches=M,
            seq_length=S,
            micro_batch_size=B,
        )
        run.close()
    return len(kept), [name for name in kept if not name.endswith(str(FAR))], copies.blocking


@pytest.mark.parametrize("method", rest_is_slow(list(METHODS), "vocab-2", "vocab-1"))
def test_everything_of_an_iteration_is_on_the_ranks_device(method: str) -> None:
    ((kept, elsewhere, blocking),) = run_ranks(1, iterate, method)
    assert kept >= M
    assert (elsewhere, blocking) == ([], [])
