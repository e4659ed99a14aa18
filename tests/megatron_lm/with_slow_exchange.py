"""The checkout's ``pretrain_gpt.py`` with an exchange between experts that a pair of F and B hides in part.

On CPU processes nothing runs beside anything. So an F or a B alone sleeps for its exchange after its plan has
run, and a pair sleeps for less than both.
"""

from __future__ import annotations

import importlib
import runpy
import time
from typing import Any

ALONE_S, TOGETHER_S = 0.2, 0.25
"""The sleep of an F or a B alone, and of both together."""


def slow(original: Any) -> Any:
    def run(forward: Any, backward: Any, **options: Any) -> Any:
        output = original(forward, backward, **options)
        time.sleep(TOGETHER_S if forward and backward else ALONE_S)
        return output

    return staticmethod(run)


if __name__ == "__main__":
    module = importlib.import_module("megatron.core.models.common.model_chunk_schedule_plan")
    plan = module.TransformerModelChunkSchedulePlan
    plan.run = slow(plan.run)
    runpy.run_module("pretrain_gpt", run_name="__main__")
