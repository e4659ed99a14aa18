"""Run what ``device_record.py`` recorded once more, in any order that a GPU would be free to take.

All ranks' hosts and streams take turns, a few entries at a time, as a seed decides; each host may run ahead
as far as nothing makes it wait. An entry runs when its stream has come to it, and

- a wait, once its event has been recorded;
- a collective, a send or a receive, once all ranks have come to it; then the data is exchanged at one moment.

Memory that was freed is gone as soon as the stream that allocated it comes to that point: another tensor may
lie there. Touching it afterwards is an error, and so is touching what is not there yet. New memory holds NaN.

Not modelled: time, the sizes of memory, transfers that are half done, SMs or connections that run out, the
memory that NCCL itself keeps alive. Host reads are taken as they were recorded.
"""

from __future__ import annotations

import math
import operator
import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache, reduce
from typing import Any

import torch

from tests.runtime.device_record import Entry, Log, Ref

Queue = tuple[int, str]
_HOST = "host"


class HazardError(AssertionError):
    """A stream touched memory that was not its own, or not written yet."""


class DeadlockError(AssertionError):
    """Nothing can go on."""


class Replay:
    """One run of all ranks' logs in an order of its own."""

    def __init__(self, logs: Sequence[Log], seed: int) -> None:
        self._logs = logs
        self._random = random.Random(seed)
        self._memory: list[dict[int, torch.UntypedStorage]] = [
            {number: bytes_.clone().untyped_storage() for number, bytes_ in log.constants.items()}
            for log in logs
        ]
        self._recorded: list[set[int]] = [set() for _ in logs]
        self._queues: dict[Queue, deque[Entry]] = {
            (rank, _HOST): deque(log.entries) for rank, log in enumerate(logs)
        }
        self._weights: dict[Queue, float] = {}

    def run(self) -> list[dict[str, torch.Tensor]]:
        """Run to the end; the results of each rank.

        Raises:
            HazardError: see the module.
            DeadlockError: likewise.
        """
        with torch.no_grad():
            while any(self._queues.values()):
                self._turn()
        return [
            {name: self._tensor(rank, ref) for name, ref in log.results.items()}
            for rank, log in enumerate(self._logs)
        ]

    def _turn(self) -> None:
        """Let one queue run for a while."""
        waiting = [queue for queue, entries in self._queues.items() if entries]
        while waiting:
            (queue,) = self._random.choices(waiting, [self._weight(queue) for queue in waiting])
            for turns in range(self._random.choice((1, 2, 10, 100))):
                if not self._step(queue):
                    if turns:
                        return
                    waiting.remove(queue)
                    break
            else:
                return
        heads = [f"{queue}: {entries[0]}" for queue, entries in self._queues.items() if entries]
        raise DeadlockError("\n".join(heads))

    def _weight(self, queue: Queue) -> float:
        """Some queues are much faster than others."""
        if queue not in self._weights:
            self._weights[queue] = math.exp(self._random.uniform(-4, 4))
        return self._weights[queue]

    def _step(self, queue: Queue) -> bool:
        """Run a queue's next entry; whether it could."""
        rank, stream = queue
        entries = self._queues[queue]
        if not entries:
            return False
        entry = entries[0]
        if stream == _HOST:
            if entry.kind == "host wait":
                if entry.what not in self._recorded[rank]:
                    return False
            else:
                self._queues.setdefault((rank, entry.stream), deque()).append(entry)
        elif entry.kind in ("collective", "p2p"):
            return self._meet(entry)
        elif entry.kind == "wait":
            if entry.what not in self._recorded[rank]:
                return False
        elif entry.kind == "record":
            self._recorded[rank].add(entry.what)
        elif entry.kind == "free":
            del self._memory[rank][entry.arguments]
        else:
            self._compute(rank, entry)
        entries.popleft()
        return True

    def _compute(self, rank: int, entry: Entry) -> None:
        if entry.kind == "allocate":
            for _, number, size in entry.new:
                self._memory[rank][number] = torch.UntypedStorage(size).fill_(255)
            return
        args, kwargs = self._values(rank, entry.arguments)
        try:
            result = _operation(entry.what)(*args, **kwargs)
        except (IndexError, RuntimeError) as error:
            raise HazardError(f"rank {rank}: {entry.what}: {error}") from error
        outputs = result if isinstance(result, (list, tuple)) else [result]
        for place, number, _ in entry.new:
            self._memory[rank][number] = outputs[place].untyped_storage()

    def _values(self, rank: int, arguments: Any) -> Any:
        """Arguments with tensors in the place of references."""
        if isinstance(arguments, Ref):
            return self._tensor(rank, arguments)
        if isinstance(arguments, dict):
            return {name: self._values(rank, value) for name, value in arguments.items()}
        if isinstance(arguments, (list, tuple)):
            return [self._values(rank, value) for value in arguments]
        return arguments

    def _tensor(self, rank: int, ref: Ref) -> torch.Tensor:
        if ref.storage not in self._memory[rank]:
            raise HazardError(f"rank {rank}: memory that is not written yet, or freed: {ref}")
        return torch.empty(0, dtype=ref.dtype).set_(
            self._memory[rank][ref.storage], ref.offset, ref.size, ref.stride
        )

    def _meet(self, entry: Entry) -> bool:
        """Exchange data, if all ranks that take part have come to it."""
        there = [
            (queue, entries[0])
            for queue, entries in self._queues.items()
            if queue[1] != _HOST and entries and entries[0].what == entry.what
        ]
        if len(there) < (2 if entry.kind == "p2p" else len(self._logs)):
            return False
        there.sort(key=lambda found: found[0])
        if entry.kind == "p2p":
            _, source, target, _ = entry.what
            ends = {queue[0]: self._tensor(queue[0], found.arguments[0]) for queue, found in there}
            ends[target].copy_(ends[source])
        else:
            self._collect([found.arguments for _, found in there])
        for queue, _ in there:
            self._queues[queue].popleft()
        return True

    def _collect(self, parts: list[Any]) -> None:
        kinds = {kind for kind, _, _ in parts}
        if len(kinds) > 1:
            raise DeadlockError(f"one collective is {kinds}")
        kind, more = parts[0][0], [part[2] for part in parts]
        tensors = [[self._tensor(rank, ref) for ref in part[1]] for rank, part in enumerate(parts)]
        own = [mine[-1].clone() for mine in tensors]
        if kind == "broadcast":
            values = [own[source] for source in more]
        elif kind == "reduce":
            lost = torch.full_like(own[0], float("nan") if own[0].is_floating_point() else -1)
            values = [reduce(operator.add, own) if rank == more[0] else lost for rank in range(len(parts))]
        elif kind == "gather":
            values = [torch.cat(own)] * len(parts)
        elif kind == "exchange":
            split = [rows.split(send) for rows, (_, send) in zip(own, more, strict=True)]
            values = [torch.cat([rows[rank] for rows in split]) for rank in range(len(parts))]
        else:
            operation: Callable[..., torch.Tensor] = torch.maximum if kind == "maximum" else operator.add
            values = [reduce(operation, own)] * len(parts)
        for mine, value in zip(tensors, values, strict=True):
            mine[0].copy_(value)


@cache
def _operation(name: str) -> Any:
    return reduce(getattr, name.split("."), torch.ops)
