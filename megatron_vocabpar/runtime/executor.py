"""Running a schedule is a loop and a table of handlers.

1. Take the next instruction of this rank.
2. Tell the observers which one it is (profiler range, timeline).
3. Call its handler. What the schedule launches inside a pass runs the same way, within the pass.
4. If that fails, say on which rank, in which pass, of which microbatch.

Handlers launch communication and wait for what they consume; the order in which they are called is the
schedule's alone. Before this: ``schedule/play/lower.py`` made the list. Next: ``pipeline/handlers/``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial

from megatron_vocabpar.runtime.between_layers import BetweenLayers
from megatron_vocabpar.schedule.words.passes import Instruction, InstructionType
from megatron_vocabpar.schedule.words.schedule import NONE_LATE, Late, split_late

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
    rank: int,
    instructions: Sequence[Instruction],
    handlers: Handlers,
    observers: Sequence[Observer] = (),
    late: Late = NONE_LATE,
    between: BetweenLayers | None = None,
    ended: Callable[[Instruction], None] | None = None,
) -> None:
    """Run one rank's instructions in order.

    Args:
        rank: global rank, for messages.
        instructions: this rank's part of a lowered schedule.
        handlers: what to do for each type of instruction.
        observers: context managers to hold around each instruction.
        late: what is launched inside the pass behind it; before the pass, where the pass's layers have
            no hooks.
        between: launches inside passes.
        ended: called after each instruction, outside the observers.

    Raises:
        InstructionError: if a handler raises.
    """
    between = between or BetweenLayers()

    def run(instruction: Instruction) -> None:
        if observers:
            with ExitStack() as stack:
                for observer in observers:
                    stack.enter_context(observer(instruction))
                handle(instruction)
        else:
            handle(instruction)
        if ended is not None:
            ended(instruction)

    def handle(instruction: Instruction) -> None:
        try:
            handlers[instruction.type](instruction)
        except InstructionError:
            raise  # of what was launched inside it
        except Exception as cause:
            raise InstructionError(rank, instruction, cause) from cause

    for instruction, inside in split_late(instructions, late):
        if not inside or not between.has_layer_hooks(instruction):
            for launch in inside:
                run(launch)
            run(instruction)
            continue
        with between.within(instruction, [(late[launch], partial(run, launch)) for launch in inside]):
            run(instruction)
