"""Models of Transformer Engine's layers, their stock weights and trainings."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests.megatron_lm.training import Log, is_since, pretrain, words
from tests.support.launch_options import (
    EIGHT_LAYERS,
    LATENT,
    LLAMA,
    UNTIED,
)

ITERATIONS = 4

NOT_FUSED = "--no-gradient-accumulation-fusion"

EXPERTS = (
    "--disable-bias-linear --num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2 "
    "--moe-token-dispatcher-type alltoall --moe-layer-freq [0,1,1,0,1,0,0,1]"
)

MODELS = {
    "default": "",
    "no biases": "--disable-bias-linear",
    "llama": LLAMA,
    "grouped experts": f"{EXPERTS} --moe-grouped-gemm",
    "sequential experts": EXPERTS,
    "a head": "--mtp-num-layers 1 --position-embedding-type rope",
    "two more heads": "--mtp-num-layers 2 --position-embedding-type rope",
    "a repeated head": (
        "--mtp-num-layers 2 --mtp-use-repeated-layer --position-embedding-type rope --disable-bias-linear"
    ),
    "latent attention": LATENT,
    "deepseek": f"{LATENT} {EXPERTS} --moe-grouped-gemm --mtp-num-layers 1",
    "gpt-oss": (
        f"{EXPERTS.removeprefix('--disable-bias-linear')} --moe-layer-freq 1 --moe-grouped-gemm "
        "--group-query-attention --num-query-groups 2 --position-embedding-type rope --quick-geglu "
        "--glu-linear-offset 1.0 --activation-func-clamp-value 7.0 --normalization RMSNorm "
        "--window-size 15,0 --window-attn-skip-freq 2 --no-bias-dropout-fusion"
    ),
    "fused operations": (
        "--use-transformer-engine-op-fuser --normalization RMSNorm --swiglu --disable-bias-linear"
    ),
}
"""By name, the options of an architecture; ``tied`` before it (``tied, a head``) ties its embeddings."""

SINCE = {
    "grouped experts": "0.15",  # 0.14 has them in 16 bits only
    "a repeated head": "0.17",
    "deepseek": "0.15",
    "gpt-oss": "0.15",
    "fused operations": "0.18",
}
"""The first version of Megatron that has an architecture; for others any."""

Record = Callable[[str, object], None]
"""pytest's ``record_property``."""


@cache
def weights(model: str) -> Path:
    """A stock checkpoint after three iterations on one process."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    train(model, "--save", str(folder), iterations=3)
    return folder


def train(
    model: str, *options: str, iterations: int = ITERATIONS, script: Path | None = None, **sizes: int
) -> Log:
    """``model`` is a key of ``MODELS``, perhaps tied, or the options of an architecture."""
    if not is_since(SINCE.get(model, "0.14")):
        pytest.skip("this Megatron has no such model")
    first, _, rest = model.partition(", ")
    tied = first == "tied"
    architecture = rest if tied else model
    return pretrain(
        *EIGHT_LAYERS,
        *(() if tied else UNTIED),
        *words(MODELS.get(architecture, architecture)),
        *options,
        iterations=iterations,
        script=script,
        transformer_engine=True,
        **sizes,
    )


def compare(ours: Log, expected: Log, record: Record, **tolerances: float) -> None:
    """Each to its relative tolerance; the largest difference goes to the record (``--junit-xml``)."""
    for name, tolerance in tolerances.items():
        found, wanted = (np.array(getattr(log, name)) for log in (ours, expected))
        np.testing.assert_allclose(found, wanted, tolerance, err_msg=name)
        record(name, float(abs(found / wanted - 1).max()))
