"""What passes hand to each other on one rank, keyed by the instruction that produced it.

A value is put once and taken as often as its producer says; then it is gone. A value that is left at the
end of an iteration is a leak.
"""

from __future__ import annotations

from typing import Any

from megatron_vocabpar.schedule.words.passes import Instruction


class BufferError(RuntimeError):
    """A buffer was taken before it was put, put twice, or left behind."""


class Buffers:
    """Values keyed by ``(producer, name)``."""

    def __init__(self) -> None:
        self._values: dict[tuple[Instruction, str], tuple[Any, int]] = {}

    def put(self, producer: Instruction, name: str, value: Any, uses: int = 1) -> None:
        """Keep ``value`` until it has been taken ``uses`` times.

        Raises:
            BufferError: if the producer has already put a value of this name.
        """
        key = (producer, name)
        if key in self._values:
            raise BufferError(f"{name} of {producer} is already there: the instruction ran twice")
        self._values[key] = (value, uses)

    def take(self, producer: Instruction, name: str) -> Any:
        """The value, which can be taken once less from now on.

        Raises:
            BufferError: if it is not there.
        """
        key = (producer, name)
        if key not in self._values:
            raise BufferError(f"{name} of {producer} is not there: it was not produced, or taken too often")
        value, uses = self._values.pop(key)
        if uses > 1:
            self._values[key] = (value, uses - 1)
        return value

    def check_empty(self) -> None:
        """Raise a BufferError that names up to eight values that are left."""
        if self._values:
            names = [f"{name} of {producer}" for producer, name in self._values]
            more = f" and {len(names) - 8} more" if len(names) > 8 else ""
            raise BufferError(
                f"{len(names)} buffers are left after the iteration: {', '.join(names[:8])}{more}"
            )
