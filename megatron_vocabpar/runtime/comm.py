"""Communication of the vocabulary layers and between stages, over torch.distributed.

Groups and peers come in as arguments. A pipeline of ``p`` stages with ``t`` tensor-parallel ranks each
has one vocabulary group of ``p * t`` ranks: member ``stage * t + tensor_rank`` owns that shard. It has
one communicator for the collectives of both vocabulary layers: a second one would let two kernels wait at a
time, and no iteration is shorter for it. For point-to-point it has two, towards higher and towards lower
ranks, so that no two directions share a queue. Each communicator is used in one order, the schedule's, on
every rank.

A collective fills memory that its caller has allocated: see ``streams.py``, whose side streams run it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_vocabpar import gather
from megatron_vocabpar.runtime.streams import Event, Stream, communicator_options

# Names of the communicators in NCCL's messages and flight recorder, in the order of VocabGroups.
_DESCRIPTIONS = (
    "VOCAB_COLLECTIVES",
    "VOCAB_STAGES_UPWARD",
    "VOCAB_STAGES_DOWNWARD",
)


@dataclass(frozen=True)
class VocabGroups:
    """The vocabulary group of this rank.

    Attributes:
        ranks: global ranks of the members, stage-major: member ``stage * tensor + tensor_rank``.
        pipeline: number of stages ``p``.
        tensor: tensor-parallel size ``t``.
        member: this rank's number among them.
        collectives: the communicator for the collectives of both vocabulary layers.
        upward, downward: communicators for point-to-point towards higher and lower stages.
    """

    ranks: tuple[int, ...]
    pipeline: int
    tensor: int
    member: int
    collectives: dist.ProcessGroup
    upward: dist.ProcessGroup
    downward: dist.ProcessGroup

    @property
    def stage(self) -> int:
        """Pipeline rank of this process."""
        return self.member // self.tensor

    @property
    def tensor_rank(self) -> int:
        """Tensor-parallel rank of this process."""
        return self.member % self.tensor

    def members_of(self, stage: int) -> range:
        """Members that hold pipeline rank ``stage``."""
        return range(stage * self.tensor, (stage + 1) * self.tensor)


def create_groups(
    coordinates: tuple[int, int, int],
    pipeline: int,
    tensor: int,
    timeout: timedelta | None = None,
    channels: int | None = None,
) -> VocabGroups:
    """Create the communicators; every rank of the job calls this once.

    ``coordinates`` are this rank's (replica, stage, tensor rank); a replica is one data- and context-parallel
    index. A collective that peers have not joined after ``timeout`` ends the process; NCCL's default is 10
    minutes. With NCCL, the kernels of collectives have at most ``channels`` blocks.
    """
    all_coordinates: list[tuple[int, int, int]] = [(0, 0, 0)] * dist.get_world_size()
    dist.all_gather_object(all_coordinates, coordinates)
    rank_at = {coordinate: rank for rank, coordinate in enumerate(all_coordinates)}
    my_groups: list[dist.ProcessGroup] = []
    # Every rank makes the communicators of all replicas: new_group is a call of the whole job.
    for replica in sorted({replica for replica, _, _ in all_coordinates}):
        ranks = [rank_at[replica, stage, t] for stage in range(pipeline) for t in range(tensor)]
        limits = (channels, None, None)  # sends and receives have few channels anyway
        groups = [
            dist.new_group(
                ranks, timeout, pg_options=communicator_options(timeout, limit), group_desc=description
            )
            for description, limit in zip(_DESCRIPTIONS, limits, strict=True)
        ]
        if replica == coordinates[0]:
            my_groups, my_ranks = groups, tuple(ranks)
    member = coordinates[1] * tensor + coordinates[2]
    return VocabGroups(my_ranks, pipeline, tensor, member, *my_groups)


def links(pipeline: int) -> list[tuple[int, int]]:
    """The pairs of pipeline ranks that schedules send between: neighbours, and last and first.

    Interleaved schedules wrap around from the last rank to the first.
    """
    neighbours = [(rank, rank + 1) for rank in range(pipeline - 1)]
    return [*neighbours, (0, pipeline - 1)] if pipeline > 2 else neighbours


def warm_up(groups: VocabGroups, device: torch.device) -> None:
    """Make every connection that training uses, in one order; all ranks of the group call it.

    NCCL connects at the first use of a communicator, and at the first send between each pair of ranks; the
    host blocks until the peer does the same. In a schedule, where each rank has its own order, that can
    deadlock. So all ranks connect here: first by collectives, then link by link, in both directions.

    Example: p = 3. The links are (0, 1), (1, 2), (0, 2). Rank 2 may wait in (1, 2) for rank 1, which is still
    in (0, 1) with rank 0. Nobody waits in (0, 1) for a later link, so all links get done.
    """
    size = len(groups.ranks)
    if size == 1:
        return
    token, received = torch.zeros((size, 1), device=device), torch.empty((size, 1), device=device)
    broadcast(groups, [token], [0])
    all_gather(groups, token[0])
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
        all_reduce(groups, token, op)
    reduce(groups, [token], [0])
    exchange_rows(groups, received, token, [1] * size, [1] * size)
    point_to_point = PointToPoint(groups)
    for low, high in links(groups.pipeline):
        for sender, receiver in ((low, high), (high, low)):
            if groups.stage == sender:
                point_to_point.send(token, receiver)
            elif groups.stage == receiver:
                point_to_point.receive(token.shape, token.dtype, device, sender).wait()
    point_to_point.drain()


class PointToPoint:
    """Sends and receives between stages; what was sent stays alive until it has left.

    gloo and NCCL still read a tensor after ``isend`` has returned: to free or reuse it before the send has
    completed corrupts the message without an error. With NCCL, ``is_completed`` means that the device has
    sent it, so any stream may reuse the memory. ``wait`` lets the current stream go on after it. With gloo,
    ``is_completed`` is False until a thread has waited, so ``waiter`` does that beside the computation, one
    send after the other. Without it, tensors that gloo sends stay until ``drain``.

    Args:
        groups: whose ranks send and receive.
        waiter: ``streams.send_waiter``'s.
    """

    def __init__(self, groups: VocabGroups, waiter: Stream | None = None) -> None:
        self._groups = groups
        self._waiter = waiter
        self._in_flight: list[Event[None]] = []

    def _peer(self, stage: int) -> tuple[int, int]:
        member = stage * self._groups.tensor + self._groups.tensor_rank
        return self._groups.ranks[member], stage - self._groups.stage

    def send(self, tensor: torch.Tensor, stage: int) -> None:
        """Send to the same tensor-parallel rank of pipeline rank ``stage``; returns at once."""
        peer, direction = self._peer(stage)
        group = self._groups.upward if direction > 0 else self._groups.downward
        self.reap()
        work = dist.isend(tensor, peer, group=group)
        assert work is not None
        sent = _Sent(work, tensor)
        self._in_flight.append(sent if self._waiter is None else self._waiter.submit(sent.wait))

    def receive(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, stage: int) -> Receive:
        """Post the receive of a tensor from pipeline rank ``stage``; returns at once."""
        peer, direction = self._peer(stage)
        group = self._groups.downward if direction > 0 else self._groups.upward
        tensor = torch.empty(tuple(shape), dtype=dtype, device=device)
        work = dist.irecv(tensor, peer, group=group)
        assert work is not None
        return Receive(work, tensor)

    def reap(self) -> None:
        """Free the tensors that have been sent."""
        under_way = []
        for sent in self._in_flight:
            if sent.done():
                sent.wait()  # raises what its send has raised
            else:
                under_way.append(sent)
        self._in_flight = under_way

    def drain(self) -> None:
        """Wait until everything has been sent."""
        for sent in self._in_flight:
            sent.wait()
        self._in_flight.clear()


@dataclass(frozen=True)
class _Sent:
    """A tensor on its way."""

    work: dist.Work
    tensor: torch.Tensor

    def done(self) -> bool:
        return self.work.is_completed()

    def wait(self) -> None:
        if not self.done():
            self.work.wait()


@dataclass
class Receive:
    """A posted receive."""

    work: dist.Work
    tensor: torch.Tensor

    def wait(self) -> torch.Tensor:
        """The received tensor."""
        self.work.wait()
        return self.tensor


def broadcast(groups: VocabGroups, pieces: Sequence[torch.Tensor], members: Sequence[int]) -> None:
    """Fill each of ``pieces`` on every rank from the member of the same position in ``members``."""
    if len(groups.ranks) > 1:
        for piece, member in zip(pieces, members, strict=True):
            dist.broadcast(piece, groups.ranks[member], group=groups.collectives)


def reduce(groups: VocabGroups, pieces: Sequence[torch.Tensor], members: Sequence[int]) -> None:
    """Sum each of ``pieces`` over all ranks, in place on the member of the same position in ``members``.

    On all other ranks it may hold anything afterwards.
    """
    if len(groups.ranks) > 1:
        for piece, member in zip(pieces, members, strict=True):
            dist.reduce(piece, groups.ranks[member], group=groups.collectives)


def reduce_rows(
    groups: VocabGroups, rows: torch.Tensor, stage: int, counts: Sequence[int] | None = None
) -> torch.Tensor:
    """Sum ``rows [n, H]``, or ``[k, n, H]``, over all ranks, in place, for those of pipeline rank ``stage``.

    Each of its tensor-parallel ranks sums a piece of the n rows; everywhere else ``rows`` holds anything
    afterwards. Then they send each other their pieces, unless ``counts`` gives the rows that each keeps.
    Example: t = 2, n = 5. One rank sums rows 0 and 1, the other rows 2 to 4, and each sends its sums to both.
    """
    members, n = groups.members_of(stage), rows.shape[-2]
    parts = counts or [n * (k + 1) // groups.tensor - n * k // groups.tensor for k in range(groups.tensor)]
    for matrix in rows.unbind() if rows.dim() == 3 else [rows]:
        pieces = matrix.split(parts) if len(parts) > 1 else [matrix]
        reduce(groups, pieces, members)
        if counts is None and groups.tensor > 1:
            mine, receive, send = pieces[groups.tensor_rank], [0] * len(groups.ranks), [0] * len(groups.ranks)
            if inside := groups.member in members:
                for member, piece in zip(members, pieces, strict=True):
                    receive[member], send[member] = len(piece), len(mine)
            received = matrix.new_empty((sum(receive), matrix.shape[1]))
            exchange_rows(groups, received, mine.repeat(groups.tensor * inside, 1), receive, send)
            matrix[: len(received)].copy_(received)
    return rows


def all_gather(groups: VocabGroups, tensor: torch.Tensor) -> torch.Tensor:
    """``tensor [...]`` of every member, stacked in member order: ``[members, ...]``."""
    if len(groups.ranks) == 1:
        return tensor.unsqueeze(0).clone()
    return gather.all_gather(tensor, groups.collectives)


def all_reduce(
    groups: VocabGroups,
    tensor: torch.Tensor,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> torch.Tensor:
    """Reduce in place over all members; returns ``tensor``."""
    if len(groups.ranks) > 1:
        dist.all_reduce(tensor, op, group=groups.collectives)
    return tensor


def exchange_rows(
    groups: VocabGroups,
    received: torch.Tensor,
    rows: torch.Tensor,
    receive_counts: Sequence[int],
    send_counts: Sequence[int],
) -> None:
    """Send ``send_counts[k]`` consecutive rows to member k, and receive ``receive_counts[k]`` from it.

    Args:
        received: ``[sum(receive_counts), H]``, filled in member order.
        rows: ``[sum(send_counts), H]``.
    """
    if len(groups.ranks) == 1:
        received.copy_(rows)
    else:
        counts = list(receive_counts), list(send_counts)
        dist.all_to_all_single(received, rows, *counts, group=groups.collectives)
