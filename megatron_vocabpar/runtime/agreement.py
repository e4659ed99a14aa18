"""Whether all ranks run the same: each writes what it runs into the job's store, and rank 0 compares.

Ranks with different flags or versions make different schedules, and then wait for each other for ever. The
store needs no communicator, so rank 0 can name a rank that never arrives.
"""

from __future__ import annotations

import hashlib
import json
import platform
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_vocabpar import __version__
from megatron_vocabpar.schedule.words.passes import Instruction


def versions() -> dict[str, str]:
    """The versions on which plans and numbers depend; Python's because 3.12 changed its sum of floats."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"megatron_vocabpar": __version__, "torch": torch.__version__, "Python": python}


def program_digest(program: Sequence[Sequence[Instruction]]) -> str:
    """A short name for the instructions of all ranks of a pipeline, in order."""
    text = "\n".join(" ".join(map(str, instructions)) for instructions in program)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def agree(subject: str, facts: Mapping[str, object], timeout: timedelta) -> None:
    """Compare the text of this rank's facts with those of all ranks; all call it in the same order.

    ``subject`` names the facts in messages, such as "flags and versions".

    Raises:
        ValueError: on every rank, naming what differs and on which ranks, or the ranks that are missing.
    """
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    subject_key = f"vocabpar/{subject}"
    calls = store.add(f"{subject_key}/calls/{rank}", 1)
    keys = [f"{subject_key}/{calls}/{other}" for other in range(dist.get_world_size())]
    verdict_key = f"{subject_key}/{calls}/verdict"
    store.set(keys[rank], json.dumps({name: str(fact) for name, fact in facts.items()}))
    if rank == 0:
        deadline = time.monotonic() + timeout.total_seconds()
        missing = [i for i, key in enumerate(keys) if not _arrives(store, key, deadline - time.monotonic())]
        verdict = _absence(subject, missing, timeout)
        if not missing:
            verdict = difference([json.loads(store.get(key)) for key in keys])
        store.set(verdict_key, verdict)
    else:
        for key, wait_s in ((keys[0], timeout.total_seconds()), (verdict_key, 2 * timeout.total_seconds())):
            if not _arrives(store, key, wait_s):
                raise ValueError(_absence(subject, [0], timeout))
        verdict = store.get(verdict_key).decode()
    if verdict:
        raise ValueError(verdict)


def _arrives(store: dist.Store, key: str, wait_s: float) -> bool:
    """Whether a process sets ``key`` in time."""
    try:
        store.wait([key], timedelta(seconds=max(0.01, wait_s)))
    except RuntimeError:  # stores differ in which
        return store.check([key])
    return True


def _absence(subject: str, ranks: Sequence[int], timeout: timedelta) -> str:
    if not ranks:
        return ""
    return (
        f"{_named(ranks)} did not tell {'its' if len(ranks) == 1 else 'their'} {subject} within "
        f"{timeout.total_seconds():g} s: stuck, or started without the flags of the others; give all ranks "
        "the same flags"
    )


def difference(facts_by_rank: Sequence[Mapping[str, str]]) -> str:
    """A sentence on the facts that differ, and on which ranks; empty if none do.

    ``facts_by_rank`` has the facts of each rank.
    """
    parts = []
    for name in dict.fromkeys(name for facts in facts_by_rank for name in facts):
        holders: dict[str, list[int]] = {}
        for rank, facts in enumerate(facts_by_rank):
            holders.setdefault(facts.get(name, "nothing"), []).append(rank)
        if len(holders) > 1:
            parts.append(f"{name}: " + ", ".join(f"{v} on {_named(ranks)}" for v, ranks in holders.items()))
    if not parts:
        return ""
    return f"the ranks do not run the same; {'; '.join(parts)}. Give all ranks the same flags and versions"


def _named(ranks: Sequence[int]) -> str:
    """``ranks 0-3, 6``, of ranks in order."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {text}"
