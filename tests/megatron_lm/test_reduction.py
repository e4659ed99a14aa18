"""Gradients reduced while W is split off, in real Megatron-LM: on every rank before the passes end."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.megatron_lm.training import pretrain, words
from tests.support.launch_options import CHUNKS, EIGHT_LAYERS

SCRIPT = Path(__file__).with_name("with_heard_launches.py")
EXPERTS = (
    "--disable-bias-linear --num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall "
    "--expert-model-parallel-size 2 --bf16 --overlap-moe-expert-parallel-comm --use-distributed-optimizer"
)
DISTRIBUTED = "--use-distributed-optimizer"
GATHERED = {"v-half": ("--overlap-param-gather",), "dualpipev": ("--overlap-param-gather",)}
"""By family, what needs the overlap."""


@pytest.mark.parametrize(
    ("family", "options", "transformer_engine"),
    [
        ("zb-h1", "", True),
        pytest.param("zb-h1", DISTRIBUTED, False, marks=pytest.mark.long),
        pytest.param("v-half", DISTRIBUTED, True, marks=pytest.mark.long),
        pytest.param("v-min", "--untie-embeddings-and-output-weights", False, marks=pytest.mark.long),
        pytest.param("v-zb", "--bf16", True, marks=pytest.mark.long),
        pytest.param("dualpipev", EXPERTS, False, marks=pytest.mark.long),
    ],
)
def test_every_rank_reduces_while_gradients_are_computed(
    family: str, options: str, transformer_engine: bool
) -> None:
    """With the same bits, but that a distributed optimizer adds up the gradient's norm by other shards."""
    chunks = () if family == "zb-h1" else CHUNKS
    flags = (
        *EIGHT_LAYERS,
        *chunks,
        *words(options),
        "--enable-vocab-parallel",
        "--vocab-parallel-family",
        family,
    )
    sizes: dict[str, Any] = {"pp": 2, "dp": 2, "iterations": 3, "transformer_engine": transformer_engine}
    reduced = ("--overlap-grad-reduce", "--ddp-bucket-size", "10000")
    overlapping = pretrain(*flags, *reduced, *GATHERED.get(family, ()), script=SCRIPT, **sizes)
    apart = pretrain(*flags, **sizes)
    lines = [json.loads(line) for line in re.findall(r"LAUNCHES (.*)", overlapping.text)]
    assert len(lines) == 3 * 4
    for rank in range(4):
        first, *later = (line for line in lines if line["rank"] == rank)
        assert first["in passes"] == 0  # Megatron counts reports in the first iteration
        for line in later:
            assert first["all"] == line["all"] == line["in passes"] > line["early"] > 0
    # Of norms two units of float32's last place.
    losses, norms = (1e-7, 2**-22) if DISTRIBUTED in options else (0.0, 0.0)
    np.testing.assert_allclose(overlapping.losses, apart.losses, rtol=losses)
    np.testing.assert_allclose(overlapping.norms, apart.norms, rtol=norms)
