"""Names of compiled modules that have no stand-in: they can be imported, and raise when they are used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class _Members(type):
    """Of a class whose members come into being when they are asked for, as an enumeration's."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        member = object.__new__(cls)
        vars(member).update(name=name, value=len(vars(cls)))
        setattr(cls, name, member)
        return member


def enumeration(name: str) -> Any:
    """A class with any member one asks for, each its own object; it makes no others."""

    def refuse(*_: Any, **__: Any) -> None:
        raise NotImplementedError(f"{name} has no stand-in on the CPU")

    methods = {
        "__init__": refuse,
        "__call__": refuse,
        "__repr__": lambda self: f"{name}.{self.name}",
        "__int__": lambda self: self.value,
    }
    return _Members(name, (), methods)


def unserved(module: str) -> Callable[[str], Any]:
    """What a module's ``__getattr__`` is: classes for names that start so, else functions that raise."""
    made: dict[str, Any] = {}

    def find(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in made:
            made[name] = enumeration(name) if name[0].isupper() else _function(f"{module}.{name}")
        return made[name]

    return find


def _function(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> None:
        raise NotImplementedError(f"{name} has no stand-in on the CPU")

    return refuse
