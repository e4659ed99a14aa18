"""The loop: order, observers, and what a failure says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from megatron_vocabpar.runtime.buffers import BufferError, Buffers, Slot
from megatron_vocabpar.runtime.executor import InstructionError, execute
from megatron_vocabpar.schedule.words.passes import CommType, Instruction, Pass, PassType, parse


def program(text: str) -> list[Instruction]:
    return [parse(word) for word in text.split()]


def test_runs_in_order_inside_the_observers() -> None:
    seen: list[str] = []

    @contextmanager
    def observer(instruction: Instruction) -> Iterator[None]:
        seen.append(f"<{instruction}")
        yield
        seen.append(f"{instruction}>")

    handlers = {
        PassType.F: lambda i: seen.append(f"run {i}"),
        CommType.SEND_F: lambda i: seen.append(f"run {i}"),
    }
    ended = [f"end {i}" for i in ("0F0", "0SEND_F0")]
    execute(0, program("0F0 0SEND_F0"), handlers, [observer], ended=lambda i: seen.append(f"end {i}"))
    assert seen == ["<0F0", "run 0F0", "0F0>", ended[0], "<0SEND_F0", "run 0SEND_F0", "0SEND_F0>", ended[1]]
    seen.clear()
    execute(0, program("0F0 0SEND_F0"), handlers)
    assert seen == ["run 0F0", "run 0SEND_F0"]


def test_failure_names_rank_pass_and_microbatch() -> None:
    def fail(_: Instruction) -> None:
        raise ZeroDivisionError("no tokens")

    with pytest.raises(
        InstructionError, match=r"rank 3, pass 2S5 \(S of microbatch 5\): ZeroDivisionError: no tokens"
    ):
        execute(3, program("2S5"), {PassType.S: fail})


STATE = Slot[str]("state")


def test_a_buffer_is_put_once_taken_as_often_as_announced_and_else_named() -> None:
    buffers, producer = Buffers(), Pass(PassType.S, 2, 5)
    buffers.put(producer, STATE, "value", uses=2)
    with pytest.raises(BufferError, match="state of 2S5 is already there"):
        buffers.put(producer, STATE, "another")
    assert buffers.take(producer, STATE) == "value"
    with pytest.raises(BufferError, match="1 buffers are left after the iteration: state of 2S5"):
        buffers.check_empty()
    assert buffers.take(producer, STATE) == "value"
    with pytest.raises(BufferError, match="state of 2S5 is not there"):
        buffers.take(producer, STATE)
    buffers.check_empty()
