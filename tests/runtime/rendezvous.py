"""Sends and receives that block the host, as NCCL's do while a connection is made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

PATIENCE = timedelta(seconds=20)


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
