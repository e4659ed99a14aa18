"""In the checkpoint folder: the costs that a training has measured, and the plan that it made from them.

An earlier run of the same training made the plan. ``training_name`` is a digest of all that the times depend
on. A plan with another name, or one that cannot be read, counts as none.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields, replace
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from megatron.core import __version__ as megatron_version

from megatron_vocabpar import __version__
from megatron_vocabpar.megatron_lm.flag_config import FlagConfig
from megatron_vocabpar.runtime.streams import machine
from megatron_vocabpar.schedule.plan import Plan
from megatron_vocabpar.schedule.serialize import plan_from_json, plan_to_json
from megatron_vocabpar.schedule.times.costs import PassCosts

PLAN_FILE = "vocab_parallel_plan.json"
COSTS_FILE = "vocab_parallel_costs.json"
_PLACED_BY = ("pipeline_model_parallel_layout", "hybrid_layer_pattern", "hybrid_override_pattern")
"""Megatron's arguments that give stages their layers, and are no plain values of its configuration."""


def training_name(
    config: FlagConfig, args: Any, model_config: Any, costs: PassCosts | None, device: torch.device
) -> str:
    """A digest of all that the passes' times depend on: a plan is kept for trainings of this name.

    Args:
        config: our flags' configuration.
        args: Megatron's arguments.
        model_config: megatron-core's configuration of the model; its numbers, strings, dtypes and choices
            count, and lists of them.
        costs: those that the user gives.
        device: of this rank.
    """
    values = {field.name: getattr(model_config, field.name) for field in fields(model_config)}
    model = {name: str(value) for name, value in values.items() if _is_plain(value)}
    facts = {
        "flags": replace(config, costs=None, profile_iterations=0, timeline=None),
        "costs": costs,
        "sizes": (args.world_size, args.seq_length, args.micro_batch_size, args.padded_vocab_size),
        "layers": [getattr(args, name, None) for name in _PLACED_BY],
        "versions": (__version__, torch.__version__, megatron_version),
        "machine": machine(device),
    }
    text = json.dumps([model, {name: str(value) for name, value in facts.items()}], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _is_plain(value: object) -> bool:
    """Whether the text of a value is the same in every run."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | Enum | torch.dtype)


def keep_plan(folder: Path, name: str, plan: Plan, **times_ms: float) -> None:
    """Write the plan of the training ``name`` (a digest), with measured and predicted times.

    Raises:
        OSError: if it cannot be written.
    """
    _write(folder / PLAN_FILE, {"digest": name, **times_ms, "plan": json.loads(plan_to_json(plan))})


def keep_costs(folder: Path, costs: PassCosts, source: str) -> None:
    """Write measured costs as a cost file, which ``vocabpar plan --costs`` reads; ``source`` says whose.

    Raises:
        OSError: if it cannot be written.
    """
    _write(folder / COSTS_FILE, {"source": source, **costs.to_dict()})


def _write(path: Path, data: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(data))
    partial.replace(path)


def kept_plan(folder: Path, name: str) -> str | None:
    """The JSON form of the plan of the training ``name``, checked; None if there is none."""
    try:
        data = json.loads((folder / PLAN_FILE).read_text())
        if data["digest"] != name:
            return None
        text = json.dumps(data["plan"])
        plan_from_json(text)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return text
