"""The checkout's ``pretrain_gpt.py`` with a clipped surrogate in the place of every token's loss.

Stock's own loss function masks, sums and reports it; the share of clipped tokens is reported beside it.
"""

from __future__ import annotations

import math
import runpy
from functools import partial, wraps
from typing import Any

import torch
from megatron import training

VOCAB = 4608


def ppo(loss_func: Any, output: torch.Tensor) -> tuple[Any, ...]:
    """Old log-probabilities and advantages are made up, by position."""
    places = torch.arange(output.numel(), device=output.device).view(output.shape)
    ratio = (-output.float() + math.log(VOCAB) - 0.3 * torch.sin(places)).exp()
    advantages, clipped = torch.cos(3.0 * places), ratio.clamp(0.8, 1.2)
    *rest, report = loss_func(-torch.minimum(ratio * advantages, clipped * advantages))
    share = (ratio != clipped).sum().float()
    return *rest, report | {"clipped": torch.stack([share, torch.full_like(share, output.numel())])}


def pretrain(original: Any, *args: Any, **named: Any) -> Any:
    *others, stock_step = args  # in every version the last one without a name

    @wraps(stock_step)
    def forward_step(*inputs: Any, **options: Any) -> tuple[Any, Any]:
        output, loss_func = stock_step(*inputs, **options)
        return output, partial(ppo, loss_func)

    return original(*others, forward_step, **named)


if __name__ == "__main__":
    training.pretrain = partial(pretrain, training.pretrain)
    runpy.run_module("pretrain_gpt", run_name="__main__")
