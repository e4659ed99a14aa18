"""megatron-core on a machine without a GPU.

megatron-core trains on the CPU but for a few names and literals that mean "the current CUDA device".
``megatron_on_cpu`` replaces those names, all in one table, and reads the literals as the CPU while its
context is open; nothing changes on a machine with a GPU, where it is not entered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.tensor_parallel import random as megatron_random
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


class _CudaLiteralsMeanCpu(TorchFunctionMode):
    """``device="cuda"`` in a factory call means the CPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if isinstance(device, (str, torch.device)) and torch.device(device).type == "cuda":
            kwargs = {**kwargs, "device": _CPU}
        return func(*args, **kwargs)


_tensor_type = torch.Tensor.type


def _type_as_on_cuda(self: torch.Tensor, dtype: Any = None, **options: Any) -> Any:
    """``tensor.type()`` with the CUDA spelling, which megatron-core's optimizers compare with."""
    result = _tensor_type(self, dtype, **options)
    return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result


# (where, name, replacement, reason)
_REPLACED: tuple[tuple[Any, str, Any, str], ...] = (
    (torch.cuda, "current_device", lambda: _CPU, "DDP and parameters are allocated on it"),
    (torch.cuda, "get_rng_state", lambda *_, **__: torch.get_rng_state(), "tensor-parallel RNG tracker"),
    (torch.cuda, "set_rng_state", lambda state, *_, **__: torch.set_rng_state(state), "likewise"),
    (torch.cuda, "manual_seed", lambda seed: torch.manual_seed(seed) and None, "likewise"),
    (megatron_random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state(), "likewise"),
    (megatron_random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state), "likewise"),
    (torch.Tensor, "cuda", lambda self, *_, **__: self, "tied embeddings, optimizer state"),
    (torch.Tensor, "type", _type_as_on_cuda, "optimizers sort parameters by type name"),
)


@contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Run megatron-core on the CPU inside this context."""
    originals = [(owner, name, getattr(owner, name)) for owner, name, _, _ in _REPLACED]
    for owner, name, replacement, _ in _REPLACED:
        setattr(owner, name, replacement)
    try:
        with _CudaLiteralsMeanCpu():
            yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)
