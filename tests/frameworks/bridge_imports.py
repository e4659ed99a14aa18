"""Imports Megatron Bridge on a machine without a GPU, and without libraries that training GPTs never calls.

``BRIDGE_PATH`` names a checkout of Megatron Bridge, ``MEGATRON_LM_PATH`` the Megatron-LM that it pins, and
``TRANSFORMER_ENGINE_PATH`` the files of Transformer Engine's wheel.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.transformer_engine import hook, state_space

_NEVER_CALLED = (
    *("megatron.energon", "diffusers", "modelopt", "imageio", "easydict", "ftfy"),
    "nvidia_resiliency_ext",
)
"""Data of pictures and films, diffusion models, ModelOpt and restarts, which Bridge imports at its start."""
_WITHOUT = "nvidia_resiliency_ext.checkpointing"
"""Megatron looks for it, and does without."""


def here() -> bool:
    """Whether the three checkouts are."""
    return bool(os.environ.get("BRIDGE_PATH") and os.environ.get("MEGATRON_LM_PATH") and hook.wheel())


def install() -> None:
    """Let this process import Bridge."""
    wheel = hook.wheel()
    assert wheel is not None, hook.MISSING
    hook.install(wheel)
    state_space.install()
    sys.path[:0] = [str(Path(os.environ["BRIDGE_PATH"]) / "src"), os.environ["MEGATRON_LM_PATH"]]
    sys.meta_path.append(_Finder())


class _Names(importlib.abc.Loader):
    """A module that has every name: a class if it begins with a capital, else a function that says None.

    Functions of energon decorate with arguments.
    """

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        def named(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            if name[0].isupper():
                return type(name, (), {"__init__": lambda self, *_, **__: None})
            if module.__name__.startswith("megatron.energon"):
                return lambda *_, **__: lambda function: function
            return lambda *_, **__: None

        module.__path__ = []
        vars(module)["__getattr__"] = named


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(_WITHOUT) and any(
            fullname == name or fullname.startswith(f"{name}.") for name in _NEVER_CALLED
        ):
            return importlib.machinery.ModuleSpec(fullname, _Names(), is_package=True)
        return None
