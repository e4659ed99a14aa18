"""Which training scripts of Megatron-LM build a model that is not partitioned; standard library only.

A script takes the class by itself (``pretrain_bert.py``), or a function of a module of its own takes it
(``from model_providers.llava_vlm import model_provider_llava_vlm`` in ``examples/mimo/train.py``). So the
functions that the script names are followed, by the names in their code, as far as the training code's own
modules go: not into Megatron, other installed packages and the standard library.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator, Mapping
from functools import partial
from types import CodeType, FunctionType
from typing import Any

OTHER_MODELS = (
    "megatron.core.models.bert.",
    "megatron.core.models.T5.",
    "megatron.core.models.mimo.",
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
        ValueError: if it has imported a class or a function of such a model, or names a function that takes
            one.
    """
    for name, module in _taken(names):
        raise ValueError(
            f"--enable-vocab-parallel: the script takes {name} from {module}, and only GPTModel, "
            "HybridModel and MambaModel have partitioned vocabulary layers; leave the flag out"
        )


def _taken(names: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What belongs to other models, and its module."""
    left = list(names.items())
    seen: set[int] = set()
    while left:
        name, value = left.pop()
        module = getattr(value, "__module__", None)
        if isinstance(module, str) and module.startswith(OTHER_MODELS):
            yield name, module
        if isinstance(value, partial):
            left += [(name, part) for part in (value.func, *value.args, *value.keywords.values())]
        elif isinstance(value, (FunctionType, type)) and id(value) not in seen and _is_own(value):
            seen.add(id(value))
            for function in _functions(value):
                for word in _words(function.__code__):
                    if f"{word}.".startswith(OTHER_MODELS):  # imported when it is called
                        yield word.rpartition(".")[2], word
                    if word in function.__globals__:
                        left.append((word, function.__globals__[word]))


def _functions(value: FunctionType | type) -> list[FunctionType]:
    """A function by itself, or the methods of a class."""
    return [member for member in (value, *vars(value).values()) if isinstance(member, FunctionType)]


def _words(code: CodeType) -> Iterator[str]:
    """The names in a function's code and in that of the functions inside it: globals, attributes, modules."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _words(constant)


def _is_own(value: FunctionType | type) -> bool:
    """Whether it is of the training code: of neither Megatron nor an installed package."""
    if (value.__module__ or "").partition(".")[0] in ("megatron", "megatron_vocabpar"):
        return False
    path = getattr(sys.modules.get(value.__module__), "__file__", None) or ""
    installed = "site-packages" in path or "dist-packages" in path
    return not installed and not path.startswith(sysconfig.get_path("stdlib"))
