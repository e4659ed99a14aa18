"""What users really switch on: with our flag the real pretrain_gpt.py trains as without it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.megatron_lm.training import checkout, pretrain, words

SAVED = 4
"""Iteration whose checkpoint of stock both start from."""

ENABLE = "--enable-vocab-parallel"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2 --disable-bias-linear"
PAIRS = {
    "recomputed logits": ("", "--vocab-parallel-recompute-logits --vocab-parallel-tokens-per-chunk 24"),
    "recomputed logits, vocab-1": (
        "",
        "--vocab-parallel-recompute-logits --vocab-parallel-method vocab-1",
    ),
    "invariant": ("", "--vocab-parallel-invariant"),
    "masked tokens": ("--eod-mask-loss", "--vocab-parallel-drop-masked"),
    "full recompute": (
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "",
    ),
    "selective recompute": ("--recompute-granularity selective", ""),
    "per-token loss": ("--calculate-per-token-loss", ""),
    "batch ramp-up": (
        "--rampup-batch-size 4 4 32 --train-samples 120 --log-throughput --timing-log-level 2",
        "",
    ),
    "uneven stages": ("--decoder-first-pipeline-num-layers 1", ""),
    "layout": ("--pipeline-model-parallel-layout Et|tttL", ""),
    "llama": (
        "--position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear "
        "--group-query-attention --num-query-groups 2",
        "",
    ),
    "decoupled learning rate": ("--decoupled-lr 5e-4 --decoupled-min-lr 5e-5", ""),
    "experts": (f"{EXPERTS} --moe-token-dispatcher-type alltoall", ""),
}
"""By name: options for both, and further ones of ours."""


def check(folder: Path, options: tuple[str, ...], ours: tuple[str, ...], rtol: float, **sizes: int) -> None:
    """Losses and gradient norms after a common checkpoint of stock."""
    checkout()
    options = ("--untie-embeddings-and-output-weights", "--eval-iters", "0", *options)
    save = ("--save", str(folder), "--save-interval", str(SAVED))
    expected = pretrain(*options, *save, iterations=2 * SAVED, **sizes)
    load = ("--load", str(folder), "--ckpt-step", str(SAVED))
    if "--decoupled-lr" in options:  # here stock does not go on from its own optimizer state
        load = (*load, "--finetune", "--no-load-optim", "--no-load-rng")
        expected = pretrain(*options, *load, iterations=SAVED, **sizes)
        result = pretrain(ENABLE, *options, *ours, *load, iterations=SAVED, **sizes)
    else:
        result = pretrain(ENABLE, *options, *ours, *load, iterations=2 * SAVED, **sizes)
    assert "vocabulary parallelism: method" in result.text
    assert len(result.losses) >= SAVED
    np.testing.assert_allclose(result.losses, expected.losses[-len(result.losses) :], rtol=rtol)
    np.testing.assert_allclose(result.norms, expected.norms[-len(result.norms) :], rtol=rtol)


@pytest.mark.long
@pytest.mark.parametrize("name", PAIRS)
def test_trains_as_stock(tmp_path: Path, name: str) -> None:
    options, ours = PAIRS[name]
    check(tmp_path, words(options), words(ours), 1e-5, pp=2)


BLOCK = {
    "attention": {"n_heads_in_group": 2, "no_op": False, "replace_with_linear": False},
    "ffn": {"ffn_mult": 1.0, "no_op": False, "replace_with_linear": False},
}
NO_ATTENTION = {
    "attention": {"n_heads_in_group": None, "no_op": True, "replace_with_linear": False},
    "ffn": {"ffn_mult": 2.0, "no_op": False, "replace_with_linear": False},
}
MODEL_OF_BLOCKS = {
    "hidden_act": "silu",
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "tie_word_embeddings": False,
    "rope_theta": 10000,
    "rope_scaling": {"factor": 8.0},
    "block_configs": [BLOCK, NO_ATTENTION, BLOCK, BLOCK],
}
OF_BLOCKS = (
    "--swiglu --normalization RMSNorm --group-query-attention --num-query-groups 2 "
    "--position-embedding-type rope --use-rope-scaling --use-rotary-position-embeddings "
    "--disable-bias-linear --kv-channels 8"
)


def check_from_seed(options: str, steps: int) -> None:
    """Losses, gradient norms and evaluation on two stages, from the initial weights of stock."""
    both = ("--untie-embeddings-and-output-weights", *words(options))
    expected, result = pretrain(*both, pp=2, iterations=4), pretrain(ENABLE, *both, pp=2, iterations=4)
    assert "vocabulary parallelism: method" in result.text
    assert len(result.losses) == len(result.norms) == steps
    for name in ("losses", "norms", "evaluations"):
        np.testing.assert_allclose(getattr(result, name), getattr(expected, name), rtol=1e-5, err_msg=name)


@pytest.mark.long
def test_layers_of_their_own_kind(tmp_path: Path) -> None:
    file = tmp_path / "layers.json"
    file.write_text(json.dumps(MODEL_OF_BLOCKS))
    check_from_seed(f"{OF_BLOCKS} --heterogeneous-layers-config-path {file}", steps=4)


@pytest.mark.long
def test_skipped_iterations() -> None:
    check_from_seed("--iterations-to-skip 2 3", steps=2)


@pytest.mark.long
def test_experts_over_data_parallel_ranks(tmp_path: Path) -> None:
    experts = words(f"{EXPERTS} --expert-model-parallel-size 2 --moe-token-dispatcher-type allgather")
    check(tmp_path, experts, (), 1e-5, pp=2, dp=2)


@pytest.mark.long
@pytest.mark.parametrize("method", ["vocab-1", "vocab-2"])
@pytest.mark.parametrize("precision", ["--bf16", "--fp16 --initial-loss-scale 4096"])
def test_half_precision(tmp_path: Path, precision: str, method: str) -> None:
    """Within what 16-bit products allow: the reductions of stock are rounded to 16 bits, ours are not."""
    # Stock rounds its logits to 16 bits, 5e-3 of a log-probability; ours are float32.
    check(tmp_path, words(precision), ("--vocab-parallel-method", method), 5e-3, pp=2)
