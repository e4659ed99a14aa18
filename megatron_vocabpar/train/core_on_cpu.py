"""megatron-core on a machine without a GPU.

megatron-core would train on the CPU, except for nine names and the literals that mean "the current CUDA
device". Inside its context ``megatron_on_cpu`` replaces those names, all in one table, and reads the literals
as the CPU. On a GPU ``megatron_on`` replaces the norm alone, which otherwise needs apex.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from megatron.core.optimizer import clip_grads
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


class _CudaMeansCpu(TorchFunctionMode):
    """``device="cuda"``, ``tensor.to("cuda")`` and ``tensor.cuda()`` mean the CPU; no memory is pinned.

    ``tensor.type()`` names CPU tensors as CUDA tensors: megatron-core's optimizers sort parameters by it.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and isinstance(args[1:] and args[1], str) and args[1] == "cuda":
            args = (args[0], _CPU, *args[2:])
        kwargs = kwargs or {}
        kwargs.pop("pin_memory", None)
        device = kwargs.get("device")
        if isinstance(device, (str, torch.device)) and torch.device(device).type == "cuda":
            kwargs["device"] = _CPU
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.", 1)
        return result


def _torch_norm(
    cls: type, config: Any, hidden_size: int, eps: float = 1e-5, *_: Any, **__: Any
) -> torch.nn.Module:
    """megatron-core's torch norm, with the mark that sequence parallelism needs.

    By it finalize_model_grads sums the gradients over tensor-parallel ranks.
    """
    norm = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}[config.normalization]
    module = norm(hidden_size, eps=eps)
    for parameter in module.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return module


def _gradient_norm(
    chunk_size: int, overflow: torch.Tensor, tensor_lists: list[list[torch.Tensor]], *_: Any
) -> tuple[torch.Tensor, None]:
    """The norm of all tensors together, with the signature of apex's kernel.

    ``torch.norm`` on the CPU adds the squares of a large tensor in too long a float32 chain: for a
    vocabulary layer of 1M elements it is off by 4e-5.
    """
    norms = [torch.linalg.vector_norm(t, dtype=torch.float64) for tensors in tensor_lists for t in tensors]
    return torch.linalg.vector_norm(torch.stack(norms)).float().reshape(1), None


_Replacement = tuple[Any, str, Any, str]
_NORM: _Replacement = (
    WrappedTorchNorm, "__new__", staticmethod(_torch_norm), "sequence parallelism without apex or TE",
)  # fmt: skip

# Each entry: owner, name, replacement, reason.
_REPLACED: tuple[_Replacement, ...] = (
    (torch.cuda, "current_device", lambda: _CPU, "DDP and parameters are allocated on it"),
    (torch.cuda, "synchronize", lambda *_: None, "checkpoints, point-to-point"),
    (torch.cuda, "get_rng_state", lambda *_, **__: torch.get_rng_state(), "tensor-parallel RNG tracker"),
    (torch.cuda, "set_rng_state", lambda state, *_, **__: torch.set_rng_state(state), "likewise"),
    (torch.cuda, "manual_seed", lambda seed: torch.manual_seed(seed) and None, "likewise"),
    (megatron_random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state(), "likewise"),
    (megatron_random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state), "likewise"),
    (clip_grads, "l2_norm_impl", _gradient_norm, "clipping needs the norm to all its digits"),
    _NORM,
)


def _same_generator(record: logging.LogRecord) -> bool:
    # Megatron warns when the CPU's generator moves in a forked state; here it stands in for CUDA's.
    return "CPU RNG state changed" not in record.getMessage()


@contextmanager
def _replaced(entries: Sequence[_Replacement]) -> Iterator[None]:
    originals = [(owner, name, inspect.getattr_static(owner, name)) for owner, name, _, _ in entries]
    for owner, name, replacement, _ in entries:
        setattr(owner, name, replacement)
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def megatron_on(device: torch.device) -> AbstractContextManager[None]:
    """A context in which megatron-core builds and runs its models on ``device``."""
    return megatron_on_cpu() if device.type == "cpu" else _replaced([_NORM])


@contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Run megatron-core on the CPU inside this context."""
    logger = logging.getLogger(megatron_random.__name__)
    logger.addFilter(_same_generator)
    try:
        with _replaced(_REPLACED), _CudaMeansCpu():
            yield
    finally:
        logger.removeFilter(_same_generator)
