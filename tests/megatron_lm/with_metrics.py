"""The checkout's training script, which also reports entropy and accuracy of stock's logits in double."""

from __future__ import annotations

import runpy
import sys
from functools import partial, wraps
from typing import Any

import torch
from megatron import training
from megatron.core.models.common.language_module.language_module import LanguageModule

from tests.megatron_lm.script_name import script_of


def pretrain(original: Any, *args: Any, **named: Any) -> Any:
    *others, stock_step = args  # in every version the last one without a name
    stock_loss = LanguageModule.compute_language_model_loss
    seen: list[dict[str, torch.Tensor]] = []

    @wraps(stock_loss)
    def compute_language_model_loss(self: Any, labels: torch.Tensor, logits: torch.Tensor) -> Any:
        logs = logits.detach().double().log_softmax(-1).transpose(0, 1)  # [b, s, V]
        entropy = -(logs.exp() * logs).sum(-1)
        seen.append({"entropy": entropy, "accuracy": (logs.argmax(-1) == labels).double()})
        return stock_loss(self, labels, logits)

    def with_metrics(
        loss_func: Any, values: dict[str, torch.Tensor], output: torch.Tensor
    ) -> tuple[Any, ...]:
        *rest, report = loss_func(output)
        return *rest, report | {name: loss_func(value)[-1]["lm loss"] for name, value in values.items()}

    @wraps(stock_step)
    def forward_step(*inputs: Any, **options: Any) -> tuple[Any, Any]:
        output, loss_func = stock_step(*inputs, **options)
        return output, partial(with_metrics, loss_func, seen.pop())

    LanguageModule.compute_language_model_loss = compute_language_model_loss
    return original(*others, forward_step, **named)


if __name__ == "__main__":
    training.pretrain = partial(pretrain, training.pretrain)
    runpy.run_module(script_of(sys.argv), run_name="__main__")
