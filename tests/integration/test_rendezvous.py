"""Every family trains where sends and receives block the host until the peer has posted the matching call.

That is what NCCL does when it makes a connection, and what it may do whenever its queues are full. A program
in which ranks post their calls in orders that do not fit together hangs; gloo alone would not show it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_vocabpar.schedule.generate import generate
from tests.integration.gpt import Case, Result, case_of, train
from tests.integration.test_equality import reference
from tests.spawn import run_ranks

PATIENCE = timedelta(seconds=20)
FAMILIES = [
    ("vocab-1", "1f1b"),
    ("vocab-2", "1f1b"),
    ("naive", "1f1b"),
    ("interlaced", "1f1b"),
    ("vocab-1", "interleaved"),
    ("vocab-2", "v-half"),
    ("vocab-1", "v-min"),
    ("vocab-2", "v-zb"),
    ("vocab-1", "zb-h1"),
]


@contextmanager
def rendezvous() -> Iterator[None]:
    """``isend`` and ``irecv`` return when the peer has called the other of the two."""
    isend, irecv = dist.isend, dist.irecv

    def meet(peer: int, group: Any) -> None:
        # A communicator carries messages in one direction between two ranks, so these don't get mixed up.
        here = isend(torch.zeros(1), peer, group=group, tag=1)
        there = irecv(torch.empty(1), peer, group=group, tag=1)
        if not there.wait(PATIENCE) or not here.wait(PATIENCE):
            raise TimeoutError(f"rank {peer} does not come")

    def blocking(post: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: torch.Tensor, peer: int, group: Any) -> Any:
            work = post(tensor, peer, group=group)
            meet(peer, group)
            return work

        return call

    with patch.object(dist, "isend", blocking(isend)), patch.object(dist, "irecv", blocking(irecv)):
        yield


def _train_all(rank: int, cases: list[tuple[Case, Result]]) -> list[Result]:
    with rendezvous():
        return [train(rank, case, expected) for case, expected in cases]


@pytest.mark.parametrize("p", [2, pytest.param(4, marks=pytest.mark.long)])
def test_every_family_trains(p: int) -> None:
    cases = [
        case_of(generate(method, p, m, family=family), steps=1)
        for method, family in FAMILIES
        for m in sorted({1, 2, p})
    ]
    references = [reference(case.unsharded()) for case in cases]
    ranks = run_ranks(p, _train_all, list(zip(cases, references, strict=True)))
    for case, expected, results in zip(cases, references, zip(*ranks, strict=True), strict=True):
        reporting = [result for result in results if result.reports_loss]
        np.testing.assert_allclose(reporting[0].losses, expected.losses, rtol=1e-5, err_msg=str(case))
        for result in results:
            assert max(result.first_gradients.values()) <= 1e-5, case
