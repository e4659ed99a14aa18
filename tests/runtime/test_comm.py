"""Communication over gloo: who gets what, also while the sender goes on."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megatron_vocabpar.runtime.comm import (
    PointToPoint,
    all_gather,
    all_reduce,
    broadcast,
    create_groups,
    exchange_rows,
    reduce,
    reduce_rows,
    warm_up,
)
from megatron_vocabpar.schedule.words.placement import Placement
from tests.runtime.rendezvous import rendezvous
from tests.spawn import run_ranks

CPU = torch.device("cpu")


def _warmed_up(rank: int, pipeline: int, tensor: int) -> set[tuple[str, int, int]]:
    """The connections of this rank: group, and from which pipeline rank to which."""
    groups = create_groups((0, rank // tensor, rank % tensor), pipeline, tensor)
    seen = set()
    with rendezvous():
        isend, irecv = dist.isend, dist.irecv

        def note(post: Callable[..., Any], sends: bool) -> Callable[..., Any]:
            def call(what: torch.Tensor, peer: int, group: Any) -> Any:
                assert peer % tensor == rank % tensor
                ends = (rank // tensor, peer // tensor)
                seen.add((group.group_desc, *(ends if sends else ends[::-1])))
                return post(what, peer, group=group)

            return call

        with patch.multiple(dist, isend=note(isend, True), irecv=note(irecv, False)):
            warm_up(groups, CPU)
    return seen


@pytest.mark.parametrize(("pipeline", "tensor"), [(1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (4, 1)])
def test_warm_up_makes_every_connection_of_every_placement(pipeline: int, tensor: int) -> None:
    results = run_ranks(pipeline * tensor, _warmed_up, pipeline, tensor)
    wanted = set()
    for placement in (Placement(pipeline), Placement(pipeline, 3), Placement(pipeline, 2, "vshape")):
        for stage in range(placement.last_stage):
            low, high = placement.rank_of(stage), placement.rank_of(stage + 1)
            for source, target in ((low, high), (high, low)):
                name = "VOCAB_STAGES_UPWARD" if source < target else "VOCAB_STAGES_DOWNWARD"
                wanted |= {(name, source, target)} if source != target else set()
    for rank, connections in enumerate(results):
        assert connections == {c for c in wanted if rank // tensor in c[1:]}


def _groups_of_two_replicas(rank: int) -> tuple[Any, list[tuple[str, float]]]:
    # Ranks as Megatron lays them out for tp 2, dp 2, pp 2: tensor fastest, then data, then pipeline.
    coordinates = (rank // 2 % 2, rank // 4, rank % 2)
    groups = create_groups(coordinates, pipeline=2, tensor=2, timeout=timedelta(minutes=7))
    made = (groups.collectives, groups.upward, groups.downward)
    named = [(group.group_desc, group._get_backend(CPU).options._timeout.total_seconds()) for group in made]
    return (groups.ranks, groups.member, groups.stage, groups.tensor_rank), named


def test_members_are_stage_major_within_a_replica_and_groups_have_names_and_the_timeout() -> None:
    results, named = zip(*run_ranks(8, _groups_of_two_replicas), strict=True)
    assert results[0] == ((0, 1, 4, 5), 0, 0, 0)
    assert results[3] == ((2, 3, 6, 7), 1, 0, 1)
    assert results[6] == ((2, 3, 6, 7), 2, 1, 0)
    names = ("COLLECTIVES", "STAGES_UPWARD", "STAGES_DOWNWARD")
    assert all(each == [(f"VOCAB_{name}", 420) for name in names] for each in named)


def _collectives(rank: int) -> dict[str, list[float]]:
    groups = create_groups((0, rank, 0), pipeline=3, tensor=1)
    piece = torch.full((2,), float(rank)) if rank == 2 else torch.empty(2)
    broadcast(groups, [piece], [2])
    rows = torch.full((rank + 1, 2), float(rank))
    counts = [1, 2, 3] if rank == 0 else [0, 0, 0]
    received = torch.empty(sum(counts), 2)
    exchange_rows(groups, received, rows, counts, [rank + 1, 0, 0])
    pieces = list(torch.tensor([[1.0, rank], [10.0, 10.0 * rank]]))
    reduce(groups, pieces, [2, 1])
    return {
        "broadcast": piece.tolist(),
        "reduce": pieces[2 - rank].tolist() if rank else [],
        "gather": all_gather(groups, torch.tensor([rank, rank + 0.5])).flatten().tolist(),
        "sum": all_reduce(groups, torch.tensor([float(rank)])).tolist(),
        "maximum": all_reduce(groups, torch.tensor([float(rank)]), dist.ReduceOp.MAX).tolist(),
        "rows": received[:, 0].tolist(),
    }


def test_collectives() -> None:
    results = run_ranks(3, _collectives)
    for rank, result in enumerate(results):
        assert result["broadcast"] == [2.0, 2.0]
        assert result["gather"] == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]
        assert result["sum"] == [3.0]
        assert result["reduce"] == [[], [30.0, 30.0], [3.0, 3.0]][rank]
        assert result["maximum"] == [2.0]
        assert result["rows"] == ([0.0, 1.0, 1.0, 2.0, 2.0, 2.0] if rank == 0 else [])


def _rows_reduced(rank: int, counts: tuple[int, ...] | None, n: int) -> list[list[float]]:
    groups = create_groups((0, rank // 2, rank % 2), pipeline=2, tensor=2)
    rows = torch.arange(2.0 * n * 3).view(2, n, 3) + 100 * rank
    return reduce_rows(groups, rows, 1, counts).tolist()


@pytest.mark.parametrize(("counts", "n"), [(None, 5), (None, 1), ((3, 2), 5), ((0, 5), 5)])
def test_rows_are_summed_where_a_stage_wants_them(counts: tuple[int, ...] | None, n: int) -> None:
    expected = 4 * torch.arange(2.0 * n * 3).view(2, n, 3) + 600
    wanted = [slice(n)] * 2 if counts is None else [slice(counts[0]), slice(counts[0], n)]
    for found, rows in zip(run_ranks(4, _rows_reduced, counts, n)[2:], wanted, strict=True):
        assert torch.equal(torch.tensor(found)[:, rows], expected[:, rows])


def _ring(rank: int) -> list[float]:
    groups = create_groups((0, rank, 0), pipeline=2, tensor=1)
    link, other = PointToPoint(groups), 1 - rank
    # Both send many messages before either receives: with one queue for both directions this could deadlock.
    for i in range(50):
        message = torch.full((1000,), float(100 * rank + i))
        link.send(message, other)
        del message  # its storage must stay until it has left
    received = [link.receive((1000,), torch.float32, CPU, other) for _ in range(50)]
    values = [float(message.wait().mean()) for message in received]
    link.drain()
    return values


def test_messages_in_both_directions_arrive_in_order_and_intact() -> None:
    first, second = run_ranks(2, _ring)
    assert first == [100.0 + i for i in range(50)]
    assert second == [float(i) for i in range(50)]
