"""The checkout's ``pretrain_gpt.py`` with a model whose attention and input embedding are frozen."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel

FROZEN = ("self_attention", "word_embeddings")


def _freezing(wrap: Callable[..., None]) -> Callable[..., None]:
    @wraps(wrap)
    def __init__(
        ddp: Any, config: Any, ddp_config: Any, module: torch.nn.Module, *rest: Any, **more: Any
    ) -> None:
        for name, parameter in module.named_parameters():
            if any(part in name for part in FROZEN):
                parameter.requires_grad_(False)
        wrap(ddp, config, ddp_config, module, *rest, **more)

    return __init__


if __name__ == "__main__":
    DistributedDataParallel.__init__ = _freezing(DistributedDataParallel.__init__)
    runpy.run_module("pretrain_gpt", run_name="__main__")
