"""Trainings one after another, their ranks forked from one interpreter that has imported Megatron already.

Importing torch and Megatron takes longer than the short trainings of the tests, once for every rank of every
job. ``python -m tests.megatron_lm.ranks CHECKOUT [TRANSFORMER_ENGINE]``, the second to train with the layers
that Megatron takes where that can be imported, reads jobs from its input, one JSON object a line:
``{"arguments": [...], "processes": n, "port": of the store where they meet, "output": path}``; runs each as
torchrun would run ``megatron_vocabpar.train.on_cpu``; and prints the exit statuses of its ranks as a JSON
list. What the ranks print goes to ``output``.

Next: ``train/on_cpu.py`` of the package, what a rank does.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import importlib
import inspect
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from megatron_vocabpar.train import on_cpu
from tests.transformer_engine import hook, state_space


def serve(checkout: str, transformer_engine: str | None = None) -> dict[str, Any] | None:
    """Run the jobs; returns None when there are no more, and in a forked rank the job to do."""
    sys.path.insert(0, checkout)
    on_cpu.stand_in()
    if transformer_engine is not None:
        hook.install(Path(transformer_engine))
        state_space.install()
    cpu = importlib.import_module("megatron_vocabpar.train.core_on_cpu")  # imports Megatron
    with cpu.megatron_on_cpu():
        for module in ("megatron.training.training", "megatron.training.checkpointing", "torch._dynamo"):
            importlib.import_module(module)
        gather_separately()
        arguments = importlib.import_module("megatron.training.arguments")
        # Megatron's parser reads and parses many sources: once here, not in every rank.
        inspect.getsource, ast.parse = functools.cache(inspect.getsource), functools.cache(ast.parse)
        arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    for line in sys.stdin:
        job = json.loads(line)
        ranks = []
        for rank in range(job["processes"]):
            pid = os.fork()
            if pid == 0:
                _become(rank, job)
                return job
            ranks.append(pid)
        print(json.dumps(_wait(ranks)), flush=True)
    return None


def gather_separately() -> None:
    """Gather each bucket by itself: coalesced over gloo, buckets of 8-bit and 16-bit weights are mixed up."""
    module = vars(importlib.import_module("megatron.core.distributed.param_and_grad_buffer"))
    coalescing = module["_coalescing_manager"]

    @contextlib.contextmanager
    def manager(group: Any, async_ops: bool = False, **options: Any) -> Iterator[Any]:
        if not async_ops:
            yield None
            return

        def gather(whole: Tensor, part: Tensor, group: Any, async_op: bool) -> None:
            parts = list(whole.chunk(group.size()))
            works.append(dist.all_gather(parts, part, group, async_op=async_op))  # never coalesced

        with (
            coalescing(group, async_ops=True, **options) as works,
            mock.patch.dict(module, dist_all_gather_func=gather),
        ):
            yield works

    module["_coalescing_manager"] = manager


def _become(rank: int, job: dict[str, Any]) -> None:
    """Make this process what torchrun would have started as ``rank``."""
    output = os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(output, stream.fileno())
    os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
    size = str(job["processes"])
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(job["port"])}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}


def _wait(ranks: list[int]) -> list[int]:
    """Exit statuses in the order of exits; the first failure ends the others."""
    codes = []
    left = set(ranks)
    while left:
        pid, status = os.wait()
        left.discard(pid)
        codes.append(os.waitstatus_to_exitcode(status))
        if codes[-1] != 0:
            for other in left:
                os.kill(other, signal.SIGKILL)
    return codes


if __name__ == "__main__":
    mine = serve(*sys.argv[1:])
    if mine is not None:
        on_cpu.main(mine["arguments"])
