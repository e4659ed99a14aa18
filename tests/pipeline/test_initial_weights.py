"""Initial weights drawn as stock megatron-core draws them, on two stages of two tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron_vocabpar.pipeline.model.gpt import VocabParallelGPTModel
from megatron_vocabpar.pipeline.model.vocab_layers import vocab_shard
from megatron_vocabpar.train.core_on_cpu import megatron_on_cpu
from tests.pipeline.gpt import Case, parallel_groups, transformer_config
from tests.spawn import run_ranks

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


def _drawn(case: Case, stock_vocab_size: int, ours: bool) -> dict[str, np.ndarray]:
    """Weights of this rank's stage, and the random states after them, by Megatron's seed of a stage."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(case.seed + 100 * stage)
    model_parallel_cuda_manual_seed(case.seed + 100 * stage)
    options: dict[str, Any] = {
        "config": transformer_config(case),
        "transformer_layer_spec": get_gpt_layer_local_spec(),
        "max_sequence_length": case.seq_length,
        "pre_process": stage == 0,
        "post_process": stage == case.pp - 1,
        "share_embeddings_and_output_weights": case.tied,
    }
    if ours:
        size, shard = case.vocab_size, vocab_shard(case.vocab_size)
        model: GPTModel = VocabParallelGPTModel(
            vocab_size=size, shard=shard, stock_vocab_size=stock_vocab_size, **options
        )
    else:
        model = GPTModel(vocab_size=stock_vocab_size, **options)
    weights = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
    states = {"default": torch.get_rng_state(), **get_cuda_rng_tracker().get_states()}
    return weights | {f"state {name}": state.numpy() for name, state in states.items()}


def _both(rank: int, case: Case, stock_vocab_size: int) -> tuple[dict[str, np.ndarray], ...]:
    with megatron_on_cpu(), parallel_groups(case):
        return _drawn(case, stock_vocab_size, False), _drawn(case, stock_vocab_size, True)


@pytest.mark.parametrize(("tied", "stock_vocab_size"), [(False, 104), (True, 92)])
def test_weights_and_random_states_are_stocks(tied: bool, stock_vocab_size: int) -> None:
    """Stock has more rows than we have, or fewer."""
    case = Case(pp=2, tp=2, vocab_size=90, tied=tied)
    results = run_ranks(4, _both, case, stock_vocab_size)
    for stock, ours in results:
        assert set(stock) - {EMBEDDING, OUTPUT} == set(ours) - {EMBEDDING, OUTPUT}
        for name in set(stock) - {EMBEDDING, OUTPUT}:
            np.testing.assert_array_equal(ours[name], stock[name], err_msg=name)
    for name, source in ((EMBEDDING, 0),) if tied else ((EMBEDDING, 0), (OUTPUT, 1)):
        whole = np.concatenate([stock[name] for stock, _ in results[2 * source : 2 * source + 2]])
        shards = np.concatenate([ours[name] for _, ours in results])
        shared = min(len(whole), len(shards))
        assert len(whole) == stock_vocab_size != len(shards) == 96
        np.testing.assert_array_equal(shards[:shared], whole[:shared], err_msg=name)
        assert not shards[shared:].any()
