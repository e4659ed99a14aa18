"""The checkout's ``pretrain_gpt.py`` in float32, though Megatron hides exchanges in models of 16 bits alone.

``--bf16`` is given, for Megatron's checks and ours; the model is then made in float32, so that results of
other layouts can be compared to more digits than 16 bits have.
"""

from __future__ import annotations

import importlib
import runpy
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig

_PLANS = ("overlap_moe_expert_parallel_comm", "delay_wgrad_compute")
_made = TransformerConfig.__post_init__


def make(config: Any) -> None:
    """``__post_init__`` without its check of plans, whose first condition is 16 bits."""
    asked = {name: getattr(config, name) for name in _PLANS}
    for name in _PLANS:
        setattr(config, name, False)
    _made(config)
    for name, value in asked.items():
        setattr(config, name, value)


def in_float32(validate: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(validate)
    def validate_args(args: Any, *rest: Any, **named: Any) -> Any:
        validated = validate(args, *rest, **named)
        args.bf16, args.params_dtype = False, torch.float32
        return validated

    return validate_args


def plans_in_float32() -> None:
    """From now on Megatron's plans may train in 32 bits."""
    TransformerConfig.__post_init__ = make  # type: ignore[method-assign]
    for name in ("arguments", "initialize"):
        module = vars(importlib.import_module(f"megatron.training.{name}"))
        if "validate_args" in module:
            module["validate_args"] = in_float32(module["validate_args"])


if __name__ == "__main__":
    plans_in_float32()
    runpy.run_module("pretrain_gpt", run_name="__main__")
