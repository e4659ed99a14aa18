"""What ``forward_step`` may pass to a model that never sees it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_vocabpar.pipeline.preparation import _labels
from megatron_vocabpar.pipeline.recording import ModelCall, record_call


def _recorded(**options: Any) -> ModelCall:
    """A call by a script's own ``forward_step``."""
    tokens = torch.arange(6).view(2, 3)

    def forward_step(_: Any, model: Any) -> tuple[torch.Tensor, Any]:
        return model(tokens, tokens, None, labels=tokens + 1, **options), lambda losses: losses.sum()

    return record_call(forward_step, None, torch.nn.Module())


def test_an_output_processor_is_refused_not_left_out() -> None:
    with pytest.raises(ValueError, match=r"passed an output_processor .* leave it out"):
        _labels(_recorded(output_processor=print), SimpleNamespace())  # type: ignore[arg-type]
