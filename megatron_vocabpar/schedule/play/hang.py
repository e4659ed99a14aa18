"""Whether a program can hang on GPUs: NCCL's strictest rules, played on the program.

gloo starts a transfer as soon as it is issued. NCCL does not: an operation holds its stream until all ranks
of its communicator have joined. Some settings make it hold more: the host, the device's only queue, or the
whole device. A ``QueueModel`` is such a setting. In every model the host *issues* an instruction, which then
*starts* on its stream and *ends*. Each of these events waits for others, whatever the times are. So a program
hangs exactly if some events wait for each other in a circle. ``find_hangs`` looks for a circle.

What waits for what in every model:

- the host issues a rank's instructions in order; nothing starts before it is issued;
- a pass starts when the pass before it and everything that it consumes has ended;
- a communication starts when the passes issued before it have ended, and so has the communication before it
  on its stream; it ends when all ranks have started their parts;
- a pass that runs on all ranks together (interlaced's S) has its collectives inside, and waits like one.

Source: NCCL's user guide, "Using multiple NCCL communicators concurrently" and "CUDA stream semantics";
PyTorch's ``torch.distributed`` on ``device_id``; the CUDA guide on ``CUDA_DEVICE_MAX_CONNECTIONS``.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from megatron_vocabpar.schedule.play.waits import QueueModel, Waits, shared_name
from megatron_vocabpar.schedule.times.costs import PassTimes
from megatron_vocabpar.schedule.words.passes import POINT_TO_POINT, Comm, Instruction
from megatron_vocabpar.schedule.words.schedule import NONE_LATE, Late, Program, Schedule

MODELS = (
    QueueModel("streams", "every communicator exists, and each pair of ranks has its streams"),
    QueueModel("device_id", "device_id given to init_process_group: one stream a direction", pairs=False),
    QueueModel("one queue", "CUDA_DEVICE_MAX_CONNECTIONS=1: one hardware queue", one_queue=True),
    QueueModel(
        "first use", "no device_id, no warm-up: a communicator's first use blocks the host", first_use=True
    ),
    QueueModel("collectives block", "a collective blocks the host", blocking="collectives"),
    QueueModel(
        "communication blocks", "every transfer and collective blocks the host", blocking="communication"
    ),
    QueueModel(
        "launch blocking", "CUDA_LAUNCH_BLOCKING=1: every operation blocks the host", blocking="everything"
    ),
    QueueModel(
        "synchronisation",
        "any one rank waits for its device at any point, as a retry of the allocator does",
        blocking="everything",
        one_rank=True,
    ),
)
# No model makes an operation wait for more than the end of the one before it on its rank.
STRICTEST = next(model for model in MODELS if model.blocking == "everything" and not model.one_rank)


@dataclass(frozen=True, slots=True)
class Wait:
    """One step of a circle: on ``rank``, ``behind`` comes after ``item``, which waits for ``peer_item``.

    Attributes:
        rank: whose instruction ``item`` is.
        item: a communication that has not ended.
        behind: the instruction of this rank that the step before waits for; ``item``, or one after it.
        peer: the rank that has not joined ``item``.
        peer_item: that rank's part of it.
    """

    rank: int
    item: Instruction
    behind: Instruction
    peer: int
    peer_item: Instruction

    def __str__(self) -> str:
        behind = "" if self.behind == self.item else f" before {self.behind}"
        return f"rank {self.rank}, {self.item}{behind}: waits for {self.peer_item} of rank {self.peer}"


def find_hangs(
    schedule: Schedule, program: Program, models: Sequence[QueueModel] = MODELS, *, late: Late = NONE_LATE
) -> dict[QueueModel, tuple[Wait, ...]]:
    """For each model a circle of ranks that wait for each other; empty if the program runs to its end.

    The program was lowered from the schedule, and keeps all other rules of ``validate_program``; ``late`` of
    it is launched inside passes.
    """
    waits = Waits(schedule, program, late)
    return {model: _hang(waits, model) for model in models}


def iteration_ms(
    schedule: Schedule, program: Program, times: PassTimes, model: QueueModel, *, late: Late = NONE_LATE
) -> float:
    """The ms that an iteration takes in a model in which it does not hang.

    If the model holds one rank, it is the rank that costs most.
    """
    waits = Waits(schedule, program, late)
    lengths = waits.lengths(times)
    longest = 0.0
    for held in _held(schedule.p, model):
        before = waits.under(model, held)
        ends = [0.0] * len(before)
        for node in _in_order(before):
            ends[node] = max((ends[need] for need in before[node]), default=0.0) + lengths[node]
        longest = max(longest, *ends)
    return longest


def _held(p: int, model: QueueModel) -> list[tuple[int, ...]]:
    ranks = tuple(range(p))
    return [(rank,) for rank in ranks] if model.one_rank else [ranks]


def runs_in_step(schedule: Schedule, program: Program) -> bool:
    """Whether a program runs to its end if each rank stops at each communication until all have come.

    What is launched inside a pass comes in the same order, so it does not matter here.
    ``find_hangs`` says the same for ``STRICTEST``, but takes many times as long.
    """
    waiting: dict[Hashable, list[int]] = {}
    position, awake = [0] * schedule.p, list(range(schedule.p))
    while awake:
        rank = awake.pop()
        row = program[rank]
        while position[rank] < len(row):
            item = row[position[rank]]
            if isinstance(item, Comm) or item.type in schedule.method.in_step:
                joined = waiting.setdefault(shared_name(item), [])
                joined.append(rank)
                if len(joined) < (2 if item.type in POINT_TO_POINT else schedule.p):
                    break
                for other in joined[:-1]:
                    position[other] += 1
                    awake.append(other)
            position[rank] += 1
    return all(at == len(row) for at, row in zip(position, program, strict=True))


def _hang(waits: Waits, model: QueueModel) -> tuple[Wait, ...]:
    for held in _held(waits.schedule.p, model):
        circle = _circle(waits.under(model, held))
        if circle:
            return _in_words(waits, circle)
    return ()


def _circle(before: Sequence[Sequence[int]]) -> list[int]:
    """Nodes that each wait for the next, the last for the first; empty if there are none."""
    done = set(_in_order(before))
    if len(done) == len(before):
        return []
    path: dict[int, None] = {}
    node = next(node for node in range(len(before)) if node not in done)
    while node not in path:
        path[node] = None
        node = next(need for need in before[node] if need not in done)
    nodes = list(path)
    return nodes[nodes.index(node) :]


def _in_order(before: Sequence[Sequence[int]]) -> list[int]:
    """The nodes that can happen, each after those that it waits for; nodes on a circle are left out."""
    missing = [len(needs) for needs in before]
    after: list[list[int]] = [[] for _ in before]
    for node, needs in enumerate(before):
        for need in needs:
            after[need].append(node)
    order = [node for node, count in enumerate(missing) if not count]
    for node in order:
        for later in after[node]:
            missing[later] -= 1
            if not missing[later]:
                order.append(later)
    return order


def _in_words(waits: Waits, circle: Sequence[int]) -> tuple[Wait, ...]:
    """The steps of a circle that lead from one rank to another."""
    steps = [waits.step(node) for node in circle if not waits.is_joined(node)]
    hops = [
        (first, second)
        for first, second in zip(steps, (*steps[1:], steps[0]), strict=True)
        if first.rank != second.rank
    ]
    entered = [second.item for _, second in (hops[-1:] + hops[:-1])]
    return tuple(
        Wait(first.rank, first.waits_in, behind, second.rank, second.item)
        for (first, second), behind in zip(hops, entered, strict=True)
    )
