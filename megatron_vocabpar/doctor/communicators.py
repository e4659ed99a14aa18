"""All communicators of a pipeline over this machine's GPUs: warm-up, then what each operation delivers.

Read ``runtime/comm.py`` first.
"""

from __future__ import annotations

import statistics
import sys

import torch
import torch.distributed as dist

from megatron_vocabpar.doctor.processes import Rank, rank_main, run_processes
from megatron_vocabpar.doctor.result import Finding
from megatron_vocabpar.runtime.comm import (
    PointToPoint,
    VocabGroups,
    all_gather,
    all_reduce,
    broadcast,
    exchange_rows,
    links,
)
from megatron_vocabpar.runtime.streams import clock

_ROUNDS = 11


def communicators(device: str, processes: int, small_kib: int = 16, large_mib: int = 64) -> Finding:
    """Warm-up, every collective and every link of ``processes`` stages; times of two all-reduces.

    Args:
        device: cpu or cuda.
        processes: ranks, one a GPU.
        small_kib: of the all-reduce whose time is latency.
        large_mib: of the one whose time is bandwidth.
    """
    arguments = {"small_kib": small_kib, "large_mib": large_mib}
    return run_processes("megatron_vocabpar.doctor.communicators", device, processes, arguments)


def _body(rank: Rank) -> Finding:
    wrong = [
        *wrong_collectives(rank.groups, rank.device),
        *wrong_links(rank.groups, rank.device),
    ]
    every: list[list[str]] = [[] for _ in rank.groups.ranks]
    dist.all_gather_object(every, wrong)
    figure = f"{len(rank.groups.ranks)} ranks, warm-up {rank.warm_up_s:.1f} s"
    named = [f"rank {k}: {text}" for k, texts in enumerate(every) for text in texts]
    if named:
        return Finding("failed", figure, "; ".join(named[:3]))
    small_ms = _all_reduce_ms(rank, rank.arguments["small_kib"] * 2**8)
    large_ms = _all_reduce_ms(rank, rank.arguments["large_mib"] * 2**18)
    speed = rank.arguments["large_mib"] * 2**20 / large_ms / 1e6
    return Finding(
        "ok",
        f"{figure}; all-reduce of {rank.arguments['small_kib']} KiB {1e3 * small_ms:.0f} µs, "
        f"of {rank.arguments['large_mib']} MiB {speed:.1f} GB/s",
    )


def wrong_collectives(groups: VocabGroups, device: torch.device) -> list[str]:
    """What this rank received that it should not have, one text for each operation; empty if all is well."""
    size, me = len(groups.ranks), groups.member
    own = torch.tensor([float(me)], device=device)
    pieces = [own.clone() if member == me else torch.full_like(own, -1) for member in range(size)]
    broadcast(groups, groups.input, pieces, range(size))
    rows = torch.tensor([[100.0 * me + k] for k in range(size)], device=device)
    received = torch.full_like(rows, -1)
    exchange_rows(groups, received, rows, [1] * size, [1] * size)
    everyone = [float(k) for k in range(size)]
    got = {
        "broadcast": torch.cat(pieces),
        "all-gather": all_gather(groups, groups.output, own).flatten(),
        "all-reduce, sum": all_reduce(groups, groups.output, own.clone()),
        "all-reduce, maximum": all_reduce(groups, groups.output, own.clone(), dist.ReduceOp.MAX),
        "all-to-all": received.flatten(),
    }
    expected = {
        "broadcast": everyone,
        "all-gather": everyone,
        "all-reduce, sum": [sum(everyone)],
        "all-reduce, maximum": [everyone[-1]],
        "all-to-all": [100.0 * k + me for k in range(size)],
    }
    return [f"{name} gave {got[name].tolist()}" for name in got if got[name].tolist() != expected[name]]


def wrong_links(groups: VocabGroups, device: torch.device) -> list[str]:
    """As ``wrong_collectives``, for sends and receives over every link, in both directions."""
    wrong = []
    point_to_point = PointToPoint(groups)
    for low, high in links(groups.pipeline):
        for sender, receiver in ((low, high), (high, low)):
            if groups.stage == sender:
                message = torch.arange(1000, dtype=torch.float32, device=device) + sender
                point_to_point.send(message, receiver)
            elif groups.stage == receiver:
                got = point_to_point.receive((1000,), torch.float32, device, sender).wait().cpu()
                if not torch.equal(got, torch.arange(1000, dtype=torch.float32) + sender):
                    wrong.append(f"the message of stage {sender} is not what it sent")
    point_to_point.drain()
    return wrong


def _all_reduce_ms(rank: Rank, elements: int) -> float:
    """Median milliseconds of an all-reduce of fp32 over all ranks."""
    mark, tensor = clock(rank.device), torch.zeros(elements, device=rank.device)
    times = []
    for r in range(-2, _ROUNDS):
        dist.barrier()
        start = mark()
        all_reduce(rank.groups, rank.groups.output, tensor)
        elapsed = mark()() - start()
        if r >= 0:
            times.append(1e3 * elapsed)
    return statistics.median(times)


if __name__ == "__main__":
    sys.exit(rank_main(sys.argv[1], _body))
