"""The checkout's ``pretrain_gpt.py``, which prints the optimizer's parameter groups.

A line ``PARAMETER GROUP {"rank": ..., "name": ..., ...}`` for each parameter, with all that its group sets.
"""

from __future__ import annotations

import json
import runpy
from typing import Any

import torch
from megatron.core import optimizer

_get_param_groups = optimizer._get_param_groups


def get_param_groups(model_chunks: list[torch.nn.Module], *args: Any, **kwargs: Any) -> list[dict[str, Any]]:
    groups = _get_param_groups(model_chunks, *args, **kwargs)
    names = {id(p): name for chunk in model_chunks for name, p in chunk.named_parameters()}
    for group in groups:
        settings = {key: value for key, value in group.items() if key != "params"}
        for parameter in group["params"]:
            line = {"rank": torch.distributed.get_rank(), "name": names[id(parameter)], **settings}
            print(f"PARAMETER GROUP {json.dumps(line, default=str)}\n", end="", flush=True)
    return groups


if __name__ == "__main__":
    optimizer._get_param_groups = get_param_groups
    runpy.run_module("pretrain_gpt", run_name="__main__")
