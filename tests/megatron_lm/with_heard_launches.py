"""The checkout's ``pretrain_gpt.py``, which prints when its buckets of gradients are reduced.

A line ``LAUNCHES {"rank": ..., "all": ..., "in passes": ..., "early": ...}`` for each iteration.
"""

from __future__ import annotations

import json
import runpy
from typing import Any
from unittest import mock

import torch

from megatron_vocabpar.pipeline import compat
from tests.support.launches import LAUNCH, hearing

if __name__ == "__main__":
    finalize = compat.finalize_gradients
    with hearing() as heard:

        def finalize_and_print(*args: Any) -> None:
            finalize(*args)
            line = {
                "rank": torch.distributed.get_rank(),
                "all": heard.events.count(LAUNCH),
                "in passes": heard.in_passes,
                "early": heard.early,
            }
            print(f"LAUNCHES {json.dumps(line)}\n", end="", flush=True)
            heard.clear()

        with mock.patch.object(compat, "finalize_gradients", finalize_and_print):
            runpy.run_module("pretrain_gpt", run_name="__main__")
