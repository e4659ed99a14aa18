"""What ranks that don't run the same are told."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from megatron_vocabpar.runtime.agreement import agree, program_digest, versions
from megatron_vocabpar.schedule.make.generate import make_plan
from tests.spawn import run_ranks

LONG = timedelta(seconds=60)


def _told(facts: dict[str, object], timeout: timedelta = LONG) -> str:
    try:
        agree("flags", facts, timeout)
    except ValueError as error:
        return str(error)
    return ""


def _calls(rank: int) -> list[str]:
    program = make_plan(("vocab-2", "vocab-1")[rank == 2], 3, 4).program
    told = [
        _told(versions() | {"--method": "vocab-2"}),
        _told({"Python": "3.11" if rank < 2 else "3.12", "--costs": None, "--extra": 1}),
        _told({"plan": program_digest(program)}),
        _told({"--method": "vocab-2"}),
    ]
    if rank != 1:  # which has gone on without the others
        told.append(_told({}, timedelta(seconds=2) if rank == 0 else LONG))  # rank 0 has the verdict
    dist.barrier()
    return told


def test_all_ranks_hear_what_differs_where_and_who_has_not_come() -> None:
    first, *others = run_ranks(3, _calls, fresh=True)
    assert first[0] == first[3] == ""
    assert first[1] == (
        "the ranks do not run the same; Python: 3.11 on ranks 0-1, 3.12 on rank 2. Give all ranks the same "
        "flags and versions"
    )
    assert first[2].startswith("the ranks do not run the same; plan: ")
    assert " on ranks 0-1, " in first[2]
    assert first[4].startswith("rank 1 did not tell its flags within 2 s: ")
    for told in others:
        assert told == first[: len(told)]


def _without_rank_0(rank: int) -> str:
    told = _told({}, timedelta(seconds=0.2)) if rank else ""
    dist.barrier()
    return told


def test_rank_0_is_missed_too() -> None:
    assert run_ranks(2, _without_rank_0, fresh=True)[1].startswith("rank 0 did not tell its flags within")
