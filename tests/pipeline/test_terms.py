"""Training with other losses than the cross-entropy equals an unsharded stock model with that loss."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from megatron.core.models.gpt import GPTModel

from megatron_vocabpar.layers.terms import LossTerms
from megatron_vocabpar.pipeline.options import VocabOptions
from tests.cases import rest_is_slow
from tests.pipeline.gpt import Case, Result, run, train
from tests.spawn import run_ranks

CASES = {
    "z-loss": ("vocab-2", LossTerms(z_loss=0.01)),
    "softcap": ("vocab-1", LossTerms(softcap=2.0)),
    "label smoothing": ("vocab-1", LossTerms(label_smoothing=0.1)),
    "logit scale": ("naive", LossTerms(logit_scale=0.6)),
    "scale, softcap, z-loss": ("vocab-2", LossTerms(logit_scale=1.7, softcap=2.0, z_loss=0.02)),
    "scale, smoothing, z-loss": ("interlaced", LossTerms(logit_scale=1.7, label_smoothing=0.2, z_loss=0.02)),
}


def _unsharded(_: int, case: Case, terms: LossTerms) -> Result:
    """The stock model, whose loss is computed by PyTorch on all logits in float64, with muP's factor."""

    def loss(_: Any, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        logits = case.mup_output_mult * terms.logit_scale * logits.double()
        if terms.softcap is not None:
            logits = terms.softcap * torch.tanh(logits / terms.softcap)
        losses = torch.nn.functional.cross_entropy(
            logits.permute(1, 2, 0), labels, reduction="none", label_smoothing=terms.label_smoothing
        )
        return (losses + terms.z_loss * logits.logsumexp(2).square().t()).float()

    with patch.object(GPTModel, "compute_language_model_loss", loss):
        return train(0, case.unsharded())


@pytest.mark.parametrize("name", rest_is_slow(CASES, "scale, softcap, z-loss", "scale, smoothing, z-loss"))
def test_same_training_as_unsharded(name: str) -> None:
    method, terms = CASES[name]
    mup = 0.5 if name == "logit scale" else 1.0
    case = Case(
        method,
        pp=2,
        m=3,
        steps=1,
        vocab_size=97,
        mup_output_mult=mup,
        output_options=VocabOptions(**asdict(terms)),
    )
    (expected,) = run_ranks(1, _unsharded, case, terms)
    results = run(case, expected)
    (reporting,) = [result for result in results if result.reports_loss]
    np.testing.assert_allclose(reporting.losses, expected.losses, rtol=1e-5)
    np.testing.assert_allclose(reporting.evaluation, expected.evaluation, rtol=1e-5)
    differences = [each for result in results for each in (result.first_gradients, result.weights)]
    assert max(difference for each in differences for difference in each.values()) <= 1.5e-5
