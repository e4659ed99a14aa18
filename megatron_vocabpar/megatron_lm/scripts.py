"""Which training scripts of Megatron-LM build a model that is not partitioned; standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OTHER_MODELS = (
    "megatron.core.models.bert.",
    "megatron.core.models.T5.",
    "megatron.core.models.multimodal.",
    "megatron.core.models.retro.",
    "megatron.legacy.model.",
)
"""Modules of models whose vocabulary layers are not partitioned, or which have others besides."""


def check_script(names: Mapping[str, Any]) -> None:
    """Refuse a script that builds a model which is not partitioned.

    Args:
        names: the names of its module, with those that it has imported.

    Raises:
        ValueError: if it has imported a class or a function of such a model.
    """
    for name, value in names.items():
        module = getattr(value, "__module__", None)
        if isinstance(module, str) and module.startswith(OTHER_MODELS):
            raise ValueError(
                f"--enable-vocab-parallel: the script takes {name} from {module}, and only GPTModel, "
                "HybridModel and MambaModel have partitioned vocabulary layers; leave the flag out"
            )
