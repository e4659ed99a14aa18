"""Checks all communicators of a pipeline over this machine's GPUs. Read ``runtime/comm.py`` first."""

from __future__ import annotations

import os
import statistics
import time

import torch
import torch.distributed as dist

from megatron_vocabpar.doctor.check_runs import Finding
from megatron_vocabpar.runtime.comm import (
    PointToPoint,
    VocabGroups,
    all_gather,
    all_reduce,
    broadcast,
    create_groups,
    exchange_rows,
    links,
    warm_up,
)
from megatron_vocabpar.runtime.streams import backend, clock, default_device

_ROUNDS = 9


def communicators(device: str, small_kib: int = 16, large_mib: int = 64) -> Finding:
    """Warm-up, every collective and every link of a pipeline; times of two all-reduces.

    Every process calls this.

    Args:
        small_kib: size of the all-reduce that shows latency.
        large_mib: size of the all-reduce that shows bandwidth.
    """
    if int(os.environ["WORLD_SIZE"]) < 2:
        return Finding("not run", reason="it needs two GPUs, and this machine has one")
    own = default_device(device, int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend(own))
    start = time.perf_counter()
    groups = create_groups((0, dist.get_rank(), 0), dist.get_world_size(), 1)
    warm_up(groups, own)
    dist.barrier()
    warm_up_s = time.perf_counter() - start
    finding = _finding(groups, own, warm_up_s, small_kib, large_mib)
    dist.destroy_process_group()
    return finding


def _finding(
    groups: VocabGroups, device: torch.device, warm_up_s: float, small_kib: int, large_mib: int
) -> Finding:
    errors: list[list[str]] = [[] for _ in groups.ranks]
    dist.all_gather_object(errors, wrong_collectives(groups, device) + wrong_links(groups, device))
    figure = f"{len(groups.ranks)} ranks, warm-up {warm_up_s:.1f} s"
    named = [f"rank {k}: {text}" for k, texts in enumerate(errors) for text in texts]
    if named:
        return Finding("failed", figure, "; ".join(named[:3]))

    def all_reduce_ms(elements: int) -> float:
        tensor, mark, times = torch.zeros(elements, device=device), clock(device), []
        for _ in range(2 + _ROUNDS):
            dist.barrier()
            start = mark()
            all_reduce(groups, tensor)
            times.append(1e3 * (mark()() - start()))
        return statistics.median(times[2:])

    small_ms, large_ms = all_reduce_ms(small_kib * 2**8), all_reduce_ms(large_mib * 2**18)
    return Finding(
        "ok",
        f"{figure}; all-reduce of {small_kib} KiB {1e3 * small_ms:.0f} µs, "
        f"of {large_mib} MiB {large_mib * 2**20 / large_ms / 1e6:.1f} GB/s",
    )


def wrong_collectives(groups: VocabGroups, device: torch.device) -> list[str]:
    """Wrong results of this rank, one text for each operation; empty if all are right."""
    size, me = len(groups.ranks), groups.member
    number = torch.tensor([float(me)], device=device)
    pieces = [number.clone() if member == me else torch.full_like(number, -1) for member in range(size)]
    broadcast(groups, pieces, range(size))
    rows = torch.tensor([[100.0 * me + k] for k in range(size)], device=device)
    received = torch.full_like(rows, -1)
    exchange_rows(groups, received, rows, [1] * size, [1] * size)
    everyone = [float(k) for k in range(size)]
    results = {
        "broadcast": (torch.cat(pieces), everyone),
        "all-gather": (all_gather(groups, number).flatten(), everyone),
        "all-reduce, sum": (all_reduce(groups, number.clone()), [sum(everyone)]),
        "all-reduce, maximum": (
            all_reduce(groups, number.clone(), dist.ReduceOp.MAX),
            [everyone[-1]],
        ),
        "all-to-all": (received.flatten(), [100.0 * k + me for k in range(size)]),
    }
    pairs = {name: (got.tolist(), expected) for name, (got, expected) in results.items()}
    return [f"{name} gave {got}" for name, (got, expected) in pairs.items() if got != expected]


def wrong_links(groups: VocabGroups, device: torch.device) -> list[str]:
    """Wrong messages that this rank received, one text each; every link is tried in both directions."""
    errors = []
    point_to_point = PointToPoint(groups)
    for low, high in links(groups.pipeline):
        for sender, receiver in ((low, high), (high, low)):
            if groups.stage == sender:
                message = torch.arange(1000, dtype=torch.float32, device=device) + sender
                point_to_point.send(message, receiver)
            elif groups.stage == receiver:
                got = point_to_point.receive((1000,), torch.float32, device, sender).wait().cpu()
                if not torch.equal(got, torch.arange(1000, dtype=torch.float32) + sender):
                    errors.append(f"the message of stage {sender} has arrived with other values")
    point_to_point.drain()
    return errors
