"""Which of a checkout's scripts has a model of these arguments."""

from __future__ import annotations

from collections.abc import Sequence


def script_of(arguments: Sequence[str]) -> str:
    """The module's name: layers by pattern are HybridModel's."""
    return "pretrain_hybrid" if "--hybrid-layer-pattern" in arguments else "pretrain_gpt"
