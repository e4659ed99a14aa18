"""What passes hand to each other on one rank, keyed by the instruction that produced it.

A value is put once and taken as often as its producer says; then it is gone. A value that is left at the
end of an iteration is a leak. A ``Slot`` says what lies there, so a reader and a type checker know it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from megatron_vocabpar.schedule.words.passes import Instruction

T = TypeVar("T")


class BufferError(RuntimeError):
    """A buffer was taken before it was put, put twice, or left behind."""


@dataclass(frozen=True, eq=False)
class Slot(Generic[T]):
    """One kind of value that an instruction leaves, such as ``Slot[torch.Tensor]("output")``.

    Every object is a slot of its own, whatever its name.
    """

    name: str


class Buffers:
    """Values keyed by producer and slot."""

    def __init__(self) -> None:
        self._values: dict[tuple[Instruction, Slot[Any]], tuple[Any, int]] = {}

    def put(self, producer: Instruction, slot: Slot[T], value: T, uses: int = 1) -> None:
        """Keep ``value`` until it has been taken ``uses`` times.

        Raises:
            BufferError: if the producer has already put a value there.
        """
        entry = value, uses
        if self._values.setdefault((producer, slot), entry) is not entry:
            raise BufferError(f"{slot.name} of {producer} is already there: the instruction ran twice")

    def take(self, producer: Instruction, slot: Slot[T]) -> T:
        """The value, which can be taken once less from now on.

        Raises:
            BufferError: if it is not there.
        """
        key = (producer, slot)
        if (entry := self._values.pop(key, None)) is None:
            raise BufferError(
                f"{slot.name} of {producer} is not there: it was not produced, or taken too often"
            )
        value: T
        value, uses = entry
        if uses > 1:
            self._values[key] = (value, uses - 1)
        return value

    def check_empty(self) -> None:
        """Raise a BufferError that names up to eight values that are left."""
        if self._values:
            names = [f"{slot.name} of {producer}" for producer, slot in self._values]
            more = f" and {len(names) - 8} more" if len(names) > 8 else ""
            raise BufferError(
                f"{len(names)} buffers are left after the iteration: {', '.join(names[:8])}{more}"
            )
