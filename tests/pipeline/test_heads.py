"""Multi-token prediction: all heads train as in one unsharded stock model."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from megatron.core.transformer import multi_token_prediction

from megatron_vocabpar.pipeline import heads
from megatron_vocabpar.pipeline.model.gpt import VocabParallelGPTModel
from megatron_vocabpar.schedule.make.generate import generate
from megatron_vocabpar.schedule.times.costs import PassCosts
from tests.cases import rest_is_slow
from tests.pipeline.gpt import Case, case_of
from tests.support.equality import check, reference

CASES: dict[str, dict[str, Any]] = {
    "pp1": {"pp": 1, "m": 2, "mtp": 2},
    "pp2": {"pp": 2, "m": 3, "mtp": 1},
    "pp4": {"method": "vocab-1", "pp": 4, "m": 5, "mtp": 2},
    "tensor parallel": {"method": "vocab-1", "pp": 2, "tp": 2, "m": 3, "mtp": 2, "tied": True},
    "data parallel": {"pp": 2, "dp": 2, "m": 3, "mtp": 1, "overlap_grad_reduce": True},
    "per-token loss": {"pp": 2, "m": 3, "mtp": 2, "loss": "tokens", "calculate_per_token_loss": True},
    "two heads": {"pp": 2, "m": 3, "mtp": 2},
    "any loss": {
        **{"method": "vocab-1", "pp": 2, "m": 3, "mtp": 2},
        **{"loss": "ppo", "micro_batch_size": 4, "steps": 1},
    },
    "naive": {"method": "naive", "pp": 2, "m": 3, "mtp": 1},
    "interlaced": {"method": "interlaced", "pp": 2, "m": 3, "mtp": 1},
}


def check_heads(case: Case) -> None:
    """Losses, gradients and weights as everywhere, and the losses that Megatron logs of each further head."""
    losses = np.mean([result.head_losses for result in check(case)], axis=0) * case.dp
    assert losses.shape == (case.steps, case.mtp)
    np.testing.assert_allclose(losses, reference(case).head_losses, rtol=1e-5)


@pytest.mark.parametrize("name", rest_is_slow(CASES, "pp1"))
def test_same_training_as_stock(name: str) -> None:
    check_heads(Case(position="rope", **CASES[name]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "method", "tied"),
    [("v-half", "vocab-2", True), ("zb-h1", "vocab-1", False), ("interleaved", "vocab-2", False)],
)
def test_in_other_families(family: str, method: str, tied: bool) -> None:
    schedule = generate(method, 2, 3, family=family, costs=PassCosts.default(2, mtp_depths=2))
    check_heads(case_of(schedule, position="rope", tied=tied, mtp=2))


def test_learned_positions_are_refused() -> None:
    """Megatron's arguments do so, too: the last stage would have a copy that no other stage sees."""
    config = Mock(mtp_num_layers=1, pipeline_model_parallel_size=2)
    with pytest.raises(ValueError, match="prediction with learned positions: the last stage"):
        VocabParallelGPTModel(config, Mock(), 64, 32)


def _track(scale: float, iteration: int, writer: Any, wandb: Any, totals: Any) -> None:
    """Logs as Megatron does, two heads of which the first was not counted."""
    for head, rate in ((1, torch.nan), (2, 0.25)):
        for tag in (f"mtp_{head} loss", f"mtp_{head}_acceptance_rate"):
            writer.add_scalar(tag, scale * torch.tensor(rate), iteration)
            if wandb is not None:
                wandb.log({tag: scale * torch.tensor(rate)}, iteration)


@pytest.mark.parametrize("stock", [staticmethod(_track), _track], ids=["since 0.19", "before"])
@pytest.mark.parametrize("with_wandb", [False, True])
def test_acceptance_rates_that_nobody_has_counted_are_not_logged(
    monkeypatch: pytest.MonkeyPatch, stock: Any, with_wandb: bool
) -> None:
    helper: Any = type("Helper", (), {"track_mtp_metrics": stock})
    monkeypatch.setattr(multi_token_prediction, "MTPLossLoggingHelper", helper)
    writer, wandb = Mock(), Mock()
    with heads.logging_known_rates():
        helper.track_mtp_metrics(2.0, 7, writer, wandb if with_wandb else None, {})
    assert vars(helper)["track_mtp_metrics"] is stock
    known = ["mtp_1 loss", "mtp_2 loss", "mtp_2_acceptance_rate"]
    assert [call.args[0] for call in writer.add_scalar.call_args_list] == known
    writer.add_scalar.assert_called_with(known[-1], torch.tensor(0.5), 7)
    assert [tag for call in wandb.log.call_args_list for tag in call.args[0]] == known * with_wandb
