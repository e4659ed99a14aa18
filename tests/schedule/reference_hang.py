"""An independent play of programs on GPUs, on the text form: hosts issue, streams are queues, ranks meet.

No graph and no tables of the package: everything is tried again and again until nothing moves.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from tests.schedule import reference
from tests.schedule.random_schedules import Shape
from tests.schedule.reference_queues import needs_of, parts

Words = Sequence[Sequence[str]]


def hangs(program: Words, shape: Shape, model: Any, held: Collection[int]) -> bool:
    """Whether some instruction never ends."""
    return _Play(program, shape, model, held).stuck()


class _Play:
    def __init__(self, program: Words, shape: Shape, model: Any, held: Collection[int]) -> None:
        self.program, self.shape, self.model, self.held = program, shape, model, held
        self.where = [reference.rank_of(s, shape.data) for s in range(shape.p * shape.chunks)]
        self.issued: list[list[str]] = [[] for _ in program]
        self.started: set[tuple[int, str]] = set()
        self.ended: set[tuple[int, str]] = set()

    def stuck(self) -> bool:
        moved = True
        while moved:
            moved = False
            for rank, row in enumerate(self.program):
                while len(self.issued[rank]) < len(row) and self._host_is_free(rank):
                    self.issued[rank].append(row[len(self.issued[rank])])
                    moved = True
                for place, word in enumerate(self.issued[rank]):
                    key = rank, word
                    if key not in self.started and self._can_start(rank, place):
                        self.started.add(key)
                        moved = True
                    if key in self.started - self.ended and self.started.issuperset(
                        self._all_parts(rank, word)
                    ):
                        self.ended.add(key)
                        moved = True
        return len(self.ended) < sum(map(len, self.program))

    def _host_is_free(self, rank: int) -> bool:
        if not self.issued[rank]:
            return True
        word = self.issued[rank][-1]
        blocking = self.model.blocking
        kinds = {"communication": ("C", "SEND", "RECV"), "collectives": ("C",)}.get(blocking, ())
        blocks = blocking == "everything" or parts(word)[1].startswith(kinds)
        if blocks and rank in self.held and (rank, word) not in self.ended:
            return False
        if self.model.first_use and self._is_comm(word):
            name = self._communicator(rank, word)
            mine = [w for w in self.issued[rank] if self._is_comm(w) and self._communicator(rank, w) == name]
            if mine == [word]:
                return all(
                    any(self._is_comm(w) and self._communicator(other, w) == name for w in self.issued[other])
                    for other in self._members(rank, word)
                )
        return True

    def _can_start(self, rank: int, place: int) -> bool:
        before, word = self.issued[rank][:place], self.issued[rank][place]
        if self.model.one_queue and place and (rank, before[-1]) not in self.started:
            return False
        ended = {part for r, w in self.ended if r == rank for part in (w, *w.split("+"))}
        if any(not self._is_comm(w) and w not in ended for w in before):
            return False
        if self._is_comm(word) or self._is_together(word):
            streams = [w for w in before if self._stream(rank, w) == self._stream(rank, word)]
            if not ended.issuperset(streams):
                return False
        return self._is_comm(word) or ended.issuperset(needs_of(word, self.shape, self.where))

    def _is_comm(self, word: str) -> bool:
        return parts(word)[1].startswith(("C", "SEND", "RECV"))

    def _is_together(self, word: str) -> bool:
        return self.shape.algorithm == "interlaced" and parts(word)[1] == "S"

    def _peer(self, word: str) -> tuple[int, str]:
        stage, name, mb = parts(word)
        stage += 1 if name in ("SEND_F", "RECV_B") else -1
        return self.where[stage], f"{stage}{ {'S': 'RECV', 'R': 'SEND'}[name[0]] }{name[4:]}{mb}"

    def _communicator(self, rank: int, word: str) -> str:
        name = parts(word)[1]
        if name.startswith("C"):
            return "collectives"
        peer = self._peer(word)[0]
        source, target = (rank, peer) if name.startswith("SEND") else (peer, rank)
        return f"{'up' if source < target else 'down'} {min(rank, peer)} {max(rank, peer)}"

    def _stream(self, rank: int, word: str) -> str:
        if self._is_together(word):
            return "collectives"
        if not self._is_comm(word):
            return "compute"
        name = self._communicator(rank, word)
        return name if self.model.pairs else name.split()[0]

    def _members(self, rank: int, word: str) -> list[int]:
        return list(range(self.shape.p)) if parts(word)[1].startswith("C") else [rank, self._peer(word)[0]]

    def _all_parts(self, rank: int, word: str) -> list[tuple[int, str]]:
        stage, name, _ = parts(word)
        if name.startswith(("SEND", "RECV")):
            return [(rank, word), self._peer(word)]
        if self._is_comm(word) or self._is_together(word):
            return [(r, f"{r}{word.removeprefix(str(stage))}") for r in range(self.shape.p)]
        return [(rank, word)]
