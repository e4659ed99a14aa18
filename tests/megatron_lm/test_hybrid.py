"""``pretrain_hybrid.py``: each kind of layer in patterns trains as in stock, from a stock checkpoint.

The layers are Megatron's own, those of Transformer Engine and the kernels of Mamba over stand-ins
(``tests/transformer_engine``). Stock runs on one process. The rows take every kind of layer, every family,
every method that partitions the vocabulary and every size of a process grid at least once.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests.megatron_lm.training import Log, is_since, pretrain, words
from tests.megatron_lm.with_layer_graphs import STOCKS_ORDER
from tests.support.engine_models import Record, compare
from tests.support.launch_options import DISTRIBUTED, ENABLE, FROM_WEIGHTS, LATENT, OVERLAP, UNTIED

ITERATIONS = 4
WITH_GRAPHS = Path(__file__).with_name("with_layer_graphs.py")
SPEC = words("--spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec --num-layers 8")
MAMBA = "--mamba-state-dim 8 --mamba-head-dim 4 --mamba-num-groups 2"
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2 --disable-bias-linear --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall"
)
MODELS = {
    "attention": ("*-*-*-*-", "--position-embedding-type rope"),
    "experts": ("*E-E*E-E", f"{EXPERTS} --position-embedding-type rope"),
    "mamba": ("M-M*M-M*", MAMBA),
    "mamba alone": ("M-M-M-M-", MAMBA),
    "delta nets": (
        "G-G*G-G*",
        "--deterministic-mode --linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 8 "
        "--linear-value-head-dim 8 --position-embedding-type rope",
    ),
    "latent": ("+-+-+-+-", LATENT),
    "sparse": (
        "D-D-D-D-",
        f"{LATENT} --dsa-indexer-n-heads 2 --dsa-indexer-head-dim 8 --dsa-indexer-topk 8 "
        "--dsa-indexer-loss-coeff 1e-2 --no-dsa-indexer-rotate-activation",
    ),
    "one head": ("M-M*M-M*/*-", f"{MAMBA} --position-embedding-type rope"),
    "two heads": ("*-*-*-*-/*-/*-", "--position-embedding-type rope"),
    "experts and mamba": ("MEME*EME/E", f"{EXPERTS} {MAMBA} --position-embedding-type rope"),
    "mup": ("M-M*M-M*", f"{MAMBA} --use-mup --mup-base-hidden-size 16"),
}
"""By name: the layers, those of further heads, and options of the architecture."""

SINCE = {"latent": "0.19", "sparse": "0.19"}


@dataclass(frozen=True)
class Case:
    """One training with our flags.

    Attributes:
        model: a key of ``MODELS``.
        family, method: ours.
        sizes: of the process grid; ``chunks`` on each rank.
        both: further options, of stock too.
        ours: further ones that do not change what stock computes.
        tied: whether both vocabulary layers have one weight.
    """

    model: str
    family: str = "1f1b"
    method: str = "vocab-2"
    sizes: dict[str, int] = field(default_factory=dict)
    both: str = ""
    ours: str = ""
    tied: bool = False

    def __str__(self) -> str:
        sizes = [f"{name}{size}" for name, size in self.sizes.items()]
        return "-".join([self.model, self.family, self.method, *sizes, *words(f"{self.both} {self.ours}")])


BLOCKS = "--fp8-format hybrid --fp8-recipe blockwise"
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SELECTIVE = "--recompute-granularity selective --recompute-modules core_attn layernorm"
EXCHANGED = f"--expert-model-parallel-size 2 {DISTRIBUTED}"
V = {"pp": 2, "chunks": 2}
GRAPHS = (
    "--vocab-parallel-profile-iterations 0 --cuda-graph-impl transformer_engine --cuda-graph-warmup-steps 1 "
    "--cuda-graph-scope attn mamba"
)
CHEAP = (
    Case("mamba", "v-zb", sizes=V),
    Case("attention", "zb-h1", "vocab-1", {"pp": 4}),
    Case("experts and mamba", "v-min", sizes={**V, "dp": 2}, ours=EXCHANGED),
)
ROWS = (
    Case("delta nets", "interleaved", "vocab-1", V, ours=GRAPHS, tied=True),
    Case("sparse", "v-half", sizes=V),
    Case("latent", "1f1b", "vocab-1", {"pp": 2, "tp": 2}),
    Case("one head", "zb-h1", sizes={"pp": 2, "tp": 2}, ours=SELECTIVE),
    Case("two heads", "v-half", sizes={**V, "dp": 2}, ours=" ".join(OVERLAP), tied=True),
    Case("experts", "v-zb", "vocab-1", {**V, "dp": 2}, ours=f"{DISTRIBUTED} --overlap-grad-reduce"),
    Case("mup", "1f1b", sizes={"pp": 4}, ours=RECOMPUTED),
    Case("mamba alone", "v-half", "vocab-1", {**V, "cp": 2}),
    Case("delta nets", "auto", "", V),
    Case("mamba", "search", sizes=V),
    Case("mamba", "v-zb", "baseline", V),
    Case("attention", "v-half", "baseline", V, both="--fp8-format hybrid --fp8-recipe tensorwise"),
    Case("mamba alone", "zb-h1", "baseline", {"pp": 2}, both=BLOCKS),
    Case("attention", "v-half", "baseline", V, both="--fp8-format hybrid --fp8-recipe delayed"),
    Case("attention", "zb-h1", "baseline", {"pp": 2}, both="--fp8-format e4m3 --fp8-recipe mxfp8"),
    Case("attention", "zb-h1", "baseline", {"pp": 2}, both="--fp4-format e2m1 --bf16"),
    Case("mamba", sizes={"pp": 2}, ours=f"{GRAPHS} mlp"),
    Case("sparse", sizes={"pp": 2}, ours=f"{GRAPHS} mlp"),
    Case(
        "experts and mamba",
        "interleaved",
        sizes={**V, "dp": 2},
        ours=" ".join([GRAPHS, "moe_router moe_preprocess", EXCHANGED, *OVERLAP]),
    ),
)


def train(case: Case, *options: str, stages: int = 1, script: Path | None = None, **sizes: int) -> Log:
    if not is_since(SINCE.get(case.model, "0.18")):
        pytest.skip("this Megatron has no such layers")
    pattern, architecture = MODELS[case.model]
    layers, *heads = pattern.split("/")
    each = len(layers) // stages
    bars = "|".join(layers[i : i + each] for i in range(0, len(layers), each))
    return pretrain(
        *(*SPEC, "--hybrid-layer-pattern", "/".join([bars, *heads]), *words(architecture)),
        *(() if case.tied else UNTIED),
        *words(case.both),
        *options,
        iterations=ITERATIONS,
        script=script,
        transformer_engine=True,
        **sizes,
    )


@cache
def weights(model: str, tied: bool) -> tuple[str, ...]:
    """Options that load what stock has after four iterations on one process."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    train(Case(model, tied=tied), "--save", str(folder))
    return ("--load", str(folder), *FROM_WEIGHTS)


@cache
def stock(model: str, tied: bool, both: str) -> Log:
    return train(Case(model, tied=tied, both=both), *weights(model, tied))


@pytest.mark.parametrize(
    "case", [*CHEAP, *(pytest.param(row, marks=pytest.mark.long) for row in ROWS)], ids=str
)
def test_trains_as_stock(case: Case, record_property: Record) -> None:
    sizes = dict(case.sizes)
    stages = sizes["pp"] * sizes.pop("chunks", 1)
    method = ["--vocab-parallel-method", case.method] if case.method else []
    flags = [ENABLE, "--vocab-parallel-family", case.family, *method]
    start = weights(case.model, case.tied)
    script = WITH_GRAPHS if GRAPHS in case.ours else None
    ours = train(case, *start, *flags, *words(case.ours), stages=stages, script=script, **sizes)
    assert "vocabulary parallelism: method" in ours.text
    assert len(ours.losses) == ITERATIONS
    expected = stock(case.model, case.tied, case.both)
    compare(ours, expected, record_property, losses=1e-5, norms=1e-5, evaluations=1e-5)
    if case.both:
        assert expected.norms != stock(case.model, case.tied, "").norms  # they matter


@pytest.mark.long
def test_graphs_captured_in_stocks_order_would_be_wrong() -> None:
    """F would find its buffers where a B has yet to read them."""
    case = Case("mamba", sizes={"pp": 2})
    flags = [*weights(case.model, case.tied), ENABLE, *words(GRAPHS), "--no-check-for-nan-in-loss-and-grad"]
    losses = train(case, *flags, STOCKS_ORDER, stages=2, script=WITH_GRAPHS, **case.sizes).losses
    assert np.isnan(losses).any()


@pytest.mark.long
def test_a_translated_gpt_checkpoint_trains_as_in_stock(tmp_path: Path, record_property: Record) -> None:
    """Megatron loads GPTModel's layers as attention and MLP by themselves; so it does with our stages."""
    if not is_since("main"):
        pytest.skip("this Megatron translates no checkpoints")
    case, gpt = Case("attention"), ("--num-layers", "4", "--position-embedding-type", "rope", *UNTIED)
    pretrain(*gpt, "--save", str(tmp_path), iterations=3, transformer_engine=True)
    start = ("--load", str(tmp_path), *FROM_WEIGHTS)
    flags = (ENABLE, "--vocab-parallel-family", "v-zb")
    expected, ours = train(case, *start), train(case, *start, *flags, stages=4, pp=2)
    drawn = train(case)
    assert abs(expected.losses[0] / drawn.losses[0] - 1) > 1e-3  # it was loaded
    compare(ours, expected, record_property, losses=1e-5, norms=1e-5, evaluations=1e-5)
