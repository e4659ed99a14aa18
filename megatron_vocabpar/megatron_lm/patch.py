"""Apply the table of ``bindings.py`` to the imported Megatron, and undo it.

Applying is idempotent: a replacement carries the patch that put it there. Modules that Megatron imports later
take the replacement by themselves; modules that are already loaded get it here, if the table lists them. A
name of a module that is not imported itself waits for that (``import_hook.py``).

Next: ``replacements.py``, the replacements.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from functools import wraps
from operator import attrgetter
from typing import Any

from megatron_vocabpar.megatron_lm.bindings import (
    BINDINGS,
    Binding,
    DetectedMegatron,
    Parameters,
    of_a_model,
)
from megatron_vocabpar.megatron_lm.flag_config import FlagConfig
from megatron_vocabpar.megatron_lm.import_hook import ImportHook
from megatron_vocabpar.megatron_lm.teardown import ending_soon

_MARK = "__vocabpar_patch__"
_SCHEDULE = "get_forward_backward_func"


class Patch:
    """The replacements in this process.

    Attributes:
        config: the flags' configuration.
        version: of Megatron, by its signatures.
        unread: a sentence on what has not been read of it; empty if everything is known.
    """

    def __init__(self, config: FlagConfig, found: DetectedMegatron) -> None:
        self.config = config
        self.version = found.version
        self.unread = found.unread
        self._replaced: list[tuple[Binding, Any, Any]] = []
        self._unregister: list[Callable[[], None]] = []
        self._import_hook = ImportHook()
        self._report = sys.excepthook
        sys.excepthook = self._hook = ending_soon(self._report)

    def replace(self, binding: Binding, replacement: Any) -> None:
        """Put ``replacement`` into every loaded module that has the name of ``binding``.

        That of ``get_forward_backward_func`` maps the function that it would return to the one that it is to
        return. A Megatron that has a registry for it (``patches/upstream``) is given it there.
        """
        original = original_of(binding)
        if binding.name == _SCHEDULE:
            if (register := _registry()) is not None:
                self._unregister.append(register(replacement))
                return
            replacement = _instead(original, replacement)
        setattr(replacement, _MARK, self)
        _swap(binding, original, replacement)
        self._replaced.append((binding, original, replacement))

    def replace_when_imported(self, binding: Binding, make: Callable[[Any], Any]) -> None:
        """``replace`` by ``make(original)``, now or when the module is imported, if that has the name."""

        def replace() -> None:
            if has_name(binding):
                self.replace(binding, make(original_of(binding)))

        self._import_hook.when_imported(binding.module, replace)

    def undo(self) -> None:
        """Put every original back, in its own module and in all copies, and ``sys.excepthook``."""
        self._import_hook.end()
        while self._replaced:
            binding, original, replacement = self._replaced.pop()
            _swap(binding, replacement, original)
        while self._unregister:
            self._unregister.pop()()
        if sys.excepthook is self._hook:
            sys.excepthook = self._report


def _registry() -> Callable[..., Callable[[], None]] | None:
    """Megatron's own place for schedules, where it has one."""
    try:
        module = importlib.import_module("megatron.core.pipeline_parallel.schedule_registry")
    except ModuleNotFoundError:
        return None
    return module.register_forward_backward_func


def _instead(original: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original(*args, **kwargs))

    return get_forward_backward_func


def original_of(binding: Binding) -> Any:
    """The object of this name in its module."""
    return attrgetter(binding.name)(importlib.import_module(binding.module))


def has_name(binding: Binding) -> bool:
    """Whether its module is there and has the name."""
    try:
        original_of(binding)
    except AttributeError:
        return False
    except ModuleNotFoundError as error:
        if f"{binding.module}.".startswith(f"{error.name}."):
            return False
        raise  # something that the module imports
    return True


def is_here(binding: Binding, version: str) -> bool:
    """Whether this version has the name; those of a model class alone may be gone from it."""
    return binding.is_in(version) and (not of_a_model(binding.module) or has_name(binding))


def _swap(binding: Binding, current: Any, new: Any) -> None:
    for module, path in binding.places:
        holder: Any = sys.modules.get(module)
        *classes, name = path.split(".")
        for part in classes:
            holder = getattr(holder, part, None)
        if holder is not None and vars(holder).get(name) is current:
            setattr(holder, name, new)


def installed() -> Patch | None:
    """The patch in force, if any; imports nothing."""
    for binding in BINDINGS:
        module = sys.modules.get(binding.module)
        # vars() sees no inherited mark: a subclass of a replaced class is no replacement.
        mark = vars(getattr(module, binding.name, object)).get(_MARK)
        if mark is not None:
            return mark
    return None


def live_signature(module: str, name: str) -> Parameters | None:
    """Parameter names of ``module.name`` in the importable Megatron; None if it has no such name.

    Raises:
        ValueError: if the module cannot be imported, other than a model's.
    """
    try:
        owner: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if of_a_model(module) and f"{module}.".startswith(f"{error.name}."):
            return None
        raise ValueError(
            f"cannot import {module} ({error}); run from a Megatron-LM checkout, or put it on PYTHONPATH"
        ) from error
    for part in name.split("."):
        owner = getattr(owner, part, None)
        if owner is None:
            return None
    return tuple(inspect.signature(owner).parameters)
