"""The model called without a forward-backward function, as evaluation harnesses and inference do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron_vocabpar.layers.terms import PLAIN, LossTerms
from megatron_vocabpar.pipeline.model.gpt import VocabParallelGPTModel
from megatron_vocabpar.train.core_on_cpu import megatron_on_cpu
from tests.pipeline.gpt import Case, batch, parallel_groups, transformer_config
from tests.spawn import run_ranks

STOCK_ROWS = 92  # two of them padding
TERMS = LossTerms(logit_scale=2.0, softcap=3.0)


def _model(case: Case, ours: bool, terms: LossTerms) -> GPTModel:
    model_parallel_cuda_manual_seed(case.seed)
    options: dict[str, Any] = {
        "config": transformer_config(case),
        "transformer_layer_spec": get_gpt_layer_local_spec(),
        "max_sequence_length": case.seq_length,
        "pre_process": parallel_state.is_pipeline_first_stage(),
        "post_process": parallel_state.is_pipeline_last_stage(),
        "share_embeddings_and_output_weights": case.tied,
    }
    if not ours:
        return GPTModel(vocab_size=STOCK_ROWS, **options)
    return VocabParallelGPTModel(
        vocab_size=case.vocab_size, stock_vocab_size=STOCK_ROWS, terms=terms, **options
    )


@torch.no_grad()
def _answers(model: GPTModel, case: Case) -> list[np.ndarray]:
    """Gathered logits, losses, and the logits of a sequence whose last token comes after a cache."""
    data = batch(case, 0, 0, 0)
    tokens, positions, labels = data["tokens"], data["position_ids"], data["labels"]
    logits = model(tokens, positions, None, runtime_gather_output=True)
    losses = model(tokens, positions, None, labels=labels)
    return [logits.numpy(), losses.numpy(), _last_by_cache(model.eval(), tokens, positions, case)]


def _last_by_cache(model: GPTModel, tokens: torch.Tensor, positions: torch.Tensor, case: Case) -> np.ndarray:
    if case.tp > 1:
        return np.empty(0)  # sequence parallelism does not divide a single token
    context = StaticInferenceContext(case.micro_batch_size, case.seq_length)
    for part in (slice(0, -1), slice(-1, None)):
        last = model(
            tokens[:, part], positions[:, part], None, inference_context=context, runtime_gather_output=True
        )
        context.sequence_len_offset = tokens.shape[1] - 1
    return last.numpy()


def _run(rank: int, case: Case) -> tuple[list[np.ndarray], ...]:
    with megatron_on_cpu(), parallel_groups(case):
        return tuple(_answers(_model(case, ours, PLAIN), case) for ours in (False, True))


@pytest.mark.parametrize("case", [Case(vocab_size=90, tied=True), Case(vocab_size=90, tp=2)], ids=str)
def test_answers_as_stock_without_its_padding(case: Case) -> None:
    for stock, ours in run_ranks(case.tp, _run, case):
        logits, labels = torch.from_numpy(stock[0])[..., : case.vocab_size], batch(case, 0, 0, 0)["labels"]
        np.testing.assert_allclose(ours[0][..., : case.vocab_size], logits.numpy(), rtol=1e-5, atol=1e-5)
        assert np.isneginf(ours[0][..., case.vocab_size :]).all()
        expected = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        np.testing.assert_allclose(ours[1], expected.numpy(), rtol=1e-5)
        known = min(ours[2].shape[-1], case.vocab_size) if ours[2].ndim > 1 else 0
        np.testing.assert_allclose(ours[2][..., :known], stock[2][..., :known], rtol=1e-5, atol=1e-5)


def _transformed(rank: int, case: Case) -> tuple[list[np.ndarray], ...]:
    with megatron_on_cpu(), parallel_groups(case):
        with_mup = _model(replace(case, mup_output_mult=0.25), True, TERMS)
        assert all(getattr(w, "is_embedding_parameter", False) for w in with_mup.vocabulary_weights())
        return _answers(_model(case, True, PLAIN), case), _answers(with_mup, case)


def test_logits_go_through_scale_mup_and_softcap() -> None:
    case = Case(vocab_size=90)
    ((plain, transformed),) = run_ranks(1, _transformed, case)
    true = plain[0][..., : case.vocab_size]
    np.testing.assert_allclose(
        transformed[0][..., : case.vocab_size], 3.0 * np.tanh(0.5 * true / 3.0), rtol=1e-5, atol=1e-6
    )


def _first_stage(rank: int, case: Case) -> str:
    with megatron_on_cpu(), parallel_groups(case):
        data = batch(case, 0, 0, 0)
        model = _model(case, True, PLAIN)
        if not model.pre_process:
            return ""
        with pytest.raises(ValueError, match="outside a forward-backward function") as error:
            model(data["tokens"], data["position_ids"], None)
        return str(error.value)


def test_several_stages_refuse_by_name() -> None:
    message, _ = run_ranks(2, _first_stage, Case(vocab_size=90, pp=2))
    assert "without --enable-vocab-parallel" in message
