"""Which checkpoint a training starts from, and whether we cannot load it. Standard library only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_TRACKER = "latest_checkpointed_iteration.txt"


def starting_checkpoint(args: Any) -> Path | None:
    """The folder that Megatron will load: of ``--load``, else of ``--pretrained-checkpoint``; or None.

    Args:
        args: Megatron's parsed arguments.
    """
    for folder in (getattr(args, "load", None), getattr(args, "pretrained_checkpoint", None)):
        tracker = Path(folder or "", _TRACKER)
        if folder and tracker.is_file():
            step = getattr(args, "ckpt_step", None) or tracker.read_text(encoding="utf-8").strip()
            return Path(folder, f"iter_{int(step):07d}" if str(step).isdigit() else str(step))
    return None


def is_legacy(checkpoint: Path) -> bool:
    """Whether it holds the layers of single ranks (``--ckpt-format torch``), as Megatron itself tells it."""
    return any(checkpoint.glob("mp_rank_0*"))


def is_of_modelopt(checkpoint: Path) -> bool:
    """Whether ModelOpt wrote its state into it, by which Megatron switches ModelOpt on."""
    return (checkpoint / "modelopt_state").is_dir()
