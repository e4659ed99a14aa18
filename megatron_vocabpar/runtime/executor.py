"""Running a schedule is a loop and a table of handlers.

1. Take the next instruction of this rank.
2. Tell the observers which one it is (progress record, profiler range, timeline).
3. Call its handler.
4. If that fails, say on which rank, in which pass, of which microbatch.

Handlers launch communication and wait for what they consume; the order in which they are called is the
schedule's alone. Before this: ``schedule/play/lower.py`` made the list. Next: ``pipeline/handlers/``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack

from megatron_vocabpar.schedule.words.passes import Instruction, InstructionType

Handler = Callable[[Instruction], None]
Handlers = Mapping[InstructionType, Handler]
Observer = Callable[[Instruction], AbstractContextManager[object]]


class InstructionError(RuntimeError):
    """An instruction failed; the cause is chained."""

    def __init__(self, rank: int, instruction: Instruction, cause: BaseException) -> None:
        self.rank = rank
        self.instruction = instruction
        super().__init__(
            f"rank {rank}, pass {instruction} ({instruction.type.value} of microbatch "
            f"{instruction.microbatch}): {type(cause).__name__}: {cause}"
        )


def execute(
    rank: int, instructions: Sequence[Instruction], handlers: Handlers, observers: Sequence[Observer] = ()
) -> None:
    """Run one rank's instructions in order.

    Args:
        rank: global rank, for messages.
        instructions: this rank's part of a lowered schedule.
        handlers: what to do for each type of instruction.
        observers: context managers to hold around each instruction.

    Raises:
        InstructionError: if a handler raises.
    """
    for instruction in instructions:
        with ExitStack() as stack:
            for observer in observers:
                stack.enter_context(observer(instruction))
            try:
                handlers[instruction.type](instruction)
            except Exception as cause:
                raise InstructionError(rank, instruction, cause) from cause
