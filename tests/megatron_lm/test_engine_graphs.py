"""Transformer Engine's CUDA graphs of layers' parts: our schedules train as stock with the same flags.

Its own ``make_graphed_callables`` captures, over the stand-in of ``tests/pipeline/cpu_graphs.py``, whose
replays fill with NaN whatever was free when a graph was captured.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests.megatron_lm.training import Log, is_since, pretrain, words
from tests.megatron_lm.with_layer_graphs import STOCKS_ORDER
from tests.support.launch_options import FROM_WEIGHTS

UNTIED = "--untie-embeddings-and-output-weights"
GRAPHS = "--cuda-graph-impl transformer_engine --cuda-graph-warmup-steps 1"
OURS = "--enable-vocab-parallel --vocab-parallel-profile-iterations 0"
EXPERTS = (
    "--disable-bias-linear --num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2 "
    "--moe-token-dispatcher-type alltoall --moe-grouped-gemm"
)
DENSE = "--cuda-graph-scope attn mlp"
HEAD = "--mtp-num-layers 1 --position-embedding-type rope"
ROUTED = f"{EXPERTS} --cuda-graph-scope attn moe_router moe_preprocess"
INTERLEAVED = "--vocab-parallel-family interleaved --num-virtual-stages-per-pipeline-rank 2"
REDUCED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"


@dataclass(frozen=True)
class Case:
    """One training: options of both, ours alone, and the number of data-parallel ranks."""

    both: str
    ours: str = ""
    dp: int = 1


@cache
def weights(model: str) -> Path:
    """A stock checkpoint after three iterations on one process."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    pretrain(*words(f"{UNTIED} {model} --save {folder}"), iterations=3, transformer_engine=True)
    return folder


def train(case: Case, *options: str) -> Log:
    """Four iterations from the same weights; graphs are captured after the first."""
    if not is_since("0.16"):
        pytest.skip("Megatron before 0.16 captures in its training script; refused")
    model = " ".join(part for part in (EXPERTS, HEAD) if part in case.both)
    flags = words(f"{UNTIED} {GRAPHS} {case.both} --load {weights(model)}")
    return pretrain(
        *(*flags, *FROM_WEIGHTS, *options),
        pp=2,
        dp=case.dp,
        iterations=4,
        script=Path(__file__).with_name("with_layer_graphs.py"),
        transformer_engine=True,
    )


@cache
def stock(both: str, dp: int) -> Log:
    return train(Case(both, dp=dp))


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [
        Case(DENSE),
        Case(ROUTED),
        Case(DENSE, "--vocab-parallel-method vocab-1"),
        Case(DENSE, INTERLEAVED),
        Case(f"{DENSE} {REDUCED}", dp=2),
        Case(f"{ROUTED} --expert-model-parallel-size 2", dp=2),
        Case(f"{ROUTED} {HEAD}"),
    ],
    ids=lambda case: f"{case.both[-30:]}-{case.ours[-9:]}-{case.dp}",
)
def test_trains_as_stock(case: Case) -> None:
    expected = stock(case.both, case.dp)
    ours = train(case, *words(f"{OURS} {case.ours}"))
    for name in ("losses", "norms", "evaluations"):
        found, wanted = getattr(ours, name), getattr(expected, name)
        assert len(found) > 1
        np.testing.assert_allclose(found, wanted, 1e-5, err_msg=name)


@pytest.mark.long
@pytest.mark.parametrize("order", ["", STOCKS_ORDER])
def test_captured_in_stocks_order_it_would_be_wrong(order: str) -> None:
    """Stock's own order for our row: F finds its buffers where a B has yet to read them."""
    losses = train(Case(DENSE), *words(f"{OURS} --no-check-for-nan-in-loss-and-grad {order}")).losses
    assert np.isnan(losses).any() == bool(order)
