"""What users really switch on: with our flag the real pretrain_gpt.py trains as without it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from tests.megatron_lm.training import checkout, is_since, pretrain, words

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


OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
ROUTER = f"{EXPERTS} --moe-token-dispatcher-type alltoall --moe-router-score-function sigmoid"
FROM_SEED = {
    "buckets": ("0.14", f"{OVERLAP} --ddp-num-buckets 3 --ddp-pad-buckets-for-high-nccl-busbw", {"dp": 2}),
    "unaligned": ("0.14", f"{OVERLAP} --no-align-grad-reduce --no-align-param-gather", {"dp": 2}),
    "averages": ("0.14", f"{OVERLAP} --ddp-bucket-size 5000 --ddp-average-in-collective", {"dp": 2}),
    "other order of ranks": ("0.14", "--use-tp-pp-dp-mapping", {"dp": 2, "tp": 2}),
    "norms of parameters": (
        "0.14",
        "--use-distributed-optimizer --log-params-norm --log-num-zeros-in-grad",
        {"dp": 2},
    ),
    "zeros beside padding": (  # of 5 rows, which stock does not have
        "0.14",
        "--log-num-zeros-in-grad --make-vocab-size-divisible-by 1",
        {"vocab_size": 4603},
    ),
    "hashes of weights": ("0.14", "--check-weight-hash-across-dp-replicas-interval 2", {"dp": 2}),
    "initial weights": ("0.14", "--embedding-init-method-std 0.1 --init-method-std 0.01", {}),
    "other data": (
        "0.14",
        "--dataloader-type cyclic --num-workers 1 --reset-position-ids --eod-mask-loss",
        {},
    ),
    "experts' biases": (
        "0.14",
        f"{ROUTER} --moe-router-enable-expert-bias --moe-z-loss-coeff 1e-3 --moe-per-layer-logging",
        {},
    ),
    "layers beside the ends": (
        "0.14",
        "--num-layers 6 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
        {"pp": 4},
    ),
    "uneven end": ("0.14", "--decoder-last-pipeline-num-layers 1", {}),
    "weight of further heads": (
        "0.14",
        "--position-embedding-type rope --mtp-num-layers 1 --mtp-loss-scaling-factor 0.7",
        {},
    ),
    "other batches in evaluation": (
        "0.18",
        "--eval-micro-batch-size 1 --eval-global-batch-size 4 --eval-interval 2 --start-eval-at-iter 3",
        {},
    ),
    "frozen": ("0.19", "--freeze-all-layers", {}),
    "heads in one pass": ("main", "--position-embedding-type rope --mtp-num-layers 2 --mtp-hsm", {}),
}
"""By name: the first version that has them, options of both, and sizes other than pp 2."""
COMPARED = re.compile(r"(?!.* vs )(lm loss|grad-norm|params-norm|num-zeros|mtp_1 loss)")


def check_from_seed(options: str, steps: int = 4, **sizes: int) -> None:
    """What both report and evaluate, from the initial weights of stock."""
    both, sizes = ("--untie-embeddings-and-output-weights", *words(options)), {"pp": 2} | sizes
    expected, result = (pretrain(*ours, *both, iterations=4, **sizes) for ours in ((), (ENABLE,)))
    assert "vocabulary parallelism: method" in result.text
    assert len(result.losses) == len(result.norms) == steps
    for tag in filter(COMPARED.match, expected.scalars):
        np.testing.assert_allclose(result.scalars[tag], expected.scalars[tag], rtol=1e-5, err_msg=tag)
    np.testing.assert_allclose(result.evaluations, expected.evaluations, rtol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("name", FROM_SEED)
def test_trains_as_stock_from_its_seed(name: str) -> None:
    since, options, sizes = FROM_SEED[name]
    if not is_since(since):
        pytest.skip(f"needs Megatron {since}")
    check_from_seed(options, **sizes)


@pytest.mark.long
def test_layers_of_their_own_kind(tmp_path: Path) -> None:
    file = tmp_path / "layers.json"
    file.write_text(json.dumps(MODEL_OF_BLOCKS))
    check_from_seed(f"{OF_BLOCKS} --heterogeneous-layers-config-path {file}")


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
