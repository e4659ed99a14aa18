"""The checkpoint that a training starts from, and whether we can load it. Standard library only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_TRACKER = "latest_checkpointed_iteration.txt"


def starting_checkpoint(args: Any) -> Path | None:
    """The folder that Megatron will load, from ``--load``, else from ``--pretrained-checkpoint``; or None."""
    for folder in (getattr(args, "load", None), getattr(args, "pretrained_checkpoint", None)):
        tracker = Path(folder or "", _TRACKER)
        if folder and tracker.is_file():
            step = getattr(args, "ckpt_step", None) or tracker.read_text(encoding="utf-8").strip()
            return Path(folder, f"iter_{int(step):07d}" if str(step).isdigit() else str(step))
    return None


def is_legacy(checkpoint: Path) -> bool:
    """Whether it has the layers of single ranks (``--ckpt-format torch``); Megatron's own criterion."""
    return any(checkpoint.glob("mp_rank_0*"))


def is_of_modelopt(checkpoint: Path) -> bool:
    """Whether it has ModelOpt's state, which makes Megatron switch ModelOpt on."""
    return (checkpoint / "modelopt_state").is_dir()
