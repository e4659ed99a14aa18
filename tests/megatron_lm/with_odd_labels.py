"""The checkout's ``pretrain_gpt.py`` with labels that are no ids.

``--odd-labels VALUE MASK``: in every sequence the fourth label has this value, and this loss mask.
"""

from __future__ import annotations

import runpy
import sys
from functools import partial, wraps
from typing import Any

from megatron import training


def pretrain(original: Any, value: int, mask: float, *args: Any, **named: Any) -> Any:
    *others, stock_step = args  # in every version the last one without a name

    @wraps(stock_step)
    def forward_step(batches: Any, *inputs: Any, **options: Any) -> tuple[Any, Any]:
        if batches is not None:
            batch = next(batches)
            batch["labels"][:, 3], batch["loss_mask"][:, 3] = value, mask
            batches = iter([batch])
        return stock_step(batches, *inputs, **options)

    return original(*others, forward_step, **named)


if __name__ == "__main__":
    at = sys.argv.index("--odd-labels")
    _, value, mask = sys.argv[at : at + 3]
    del sys.argv[at : at + 3]
    training.pretrain = partial(pretrain, training.pretrain, int(value), float(mask))
    runpy.run_module("pretrain_gpt", run_name="__main__")
