"""Megatron's default layers, those of Transformer Engine: with our flags they train as in stock with them.

Their Python is Transformer Engine's own, over a stand-in of its compiled part (``tests/transformer_engine``).
Stock runs on one process.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch.distributed.checkpoint as dcp

from megatron_vocabpar.megatron_lm.bindings import find_version
from megatron_vocabpar.megatron_lm.checkout import source_signatures
from tests.megatron_lm.test_schedules import CHUNKS, EIGHT_LAYERS, UNTIED
from tests.megatron_lm.test_training import FROM_WEIGHTS
from tests.megatron_lm.training import Log, checkout, is_since, pretrain, words

ITERATIONS = 4
NOT_FUSED = "--no-gradient-accumulation-fusion"
EXPERTS = (
    "--disable-bias-linear --num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2 "
    "--moe-token-dispatcher-type alltoall --moe-layer-freq [0,1,1,0,1,0,0,1]"
)
LLAMA = (
    "--disable-bias-linear --normalization RMSNorm --swiglu --position-embedding-type rope "
    "--group-query-attention --num-query-groups 2 --qk-layernorm"
)
LATENT = (
    "--disable-bias-linear --multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 8 "
    "--qk-pos-emb-head-dim 8 --v-head-dim 8 --qk-layernorm --normalization RMSNorm "
    "--position-embedding-type rope --no-rope-fusion"
)
MODELS = {
    "default": "",
    "no biases": "--disable-bias-linear",
    "tied": "",
    "llama": LLAMA,
    "grouped experts": f"{EXPERTS} --moe-grouped-gemm",
    "sequential experts": EXPERTS,
    "two more heads": "--mtp-num-layers 2 --position-embedding-type rope",
    "a repeated head": (
        "--mtp-num-layers 2 --mtp-use-repeated-layer --position-embedding-type rope --disable-bias-linear"
    ),
    "latent attention": LATENT,
    "fused operations": (
        "--use-transformer-engine-op-fuser --normalization RMSNorm --swiglu --disable-bias-linear"
    ),
}
"""By name, the options of an architecture."""
SINCE = {
    "grouped experts": "0.15",  # 0.14 has them in 16 bits only
    "a repeated head": "0.17",
    "fused operations": "0.18",
}
"""The first version of Megatron that has an architecture; for others any."""


@dataclass(frozen=True)
class Case:
    """One training with our flags.

    Attributes:
        schedule, method: ours.
        pp, tp, dp: sizes.
        model: a key of ``MODELS``.
        both: further options, of stock too.
        ours: further ones that do not change what stock computes.
    """

    schedule: str
    method: str = "vocab-2"
    pp: int = 2
    tp: int = 1
    dp: int = 1
    model: str = "default"
    both: str = ""
    ours: str = ""

    def __str__(self) -> str:
        sizes = f"pp{self.pp}-tp{self.tp}-dp{self.dp}"
        return "-".join([self.schedule, self.method, sizes, self.model, *words(f"{self.both} {self.ours}")])

    @property
    def flags(self) -> tuple[str, ...]:
        ours = ("--vocab-parallel-family", self.schedule, "--vocab-parallel-method", self.method)
        chunks = () if self.schedule in ("1f1b", "zb-h1") else CHUNKS
        return ("--enable-vocab-parallel", *ours, *chunks, *words(self.ours))


SCHEDULES = ("1f1b", "interleaved", "zb-h1", "v-half", "v-zb")
SPLIT = ("zb-h1", "v-half")
METHODS = ("vocab-1", "vocab-2")
DISTRIBUTED = "--use-distributed-optimizer"
SELECTIVE = "--recompute-granularity selective"
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
GATHERED = f"--fp8-param-gather {DISTRIBUTED} --bf16"
OVERLAPPED = "--overlap-grad-reduce --overlap-param-gather"
REDUCED = "--overlap-grad-reduce --ddp-bucket-size 20000"
SHARDED = f"{REDUCED} --overlap-param-gather {DISTRIBUTED}"
EXCHANGED = "--expert-model-parallel-size 2"
FOUR_BITS = "nvfp4 --bf16"
"""Hadamard transforms are of 16 bits."""
GATHERED_FOUR_BITS = f"{FOUR_BITS} --fp4-param-gather {DISTRIBUTED}"
REUSED = "--reuse-grad-buf-for-mxfp8-param-ag"
NEGLIGIBLE = "--init-method-std 1e-9"
"""With delayed scales a process first writes 8-bit weights by the scales of those that it drew, not of those
that it loaded; stages draw others, in stock too. These are too small to set a scale."""
MATRIX = (
    *(Case(schedule, method, pp) for schedule in SCHEDULES for method in METHODS for pp in (2, 4)),
    *(Case(schedule, both=NOT_FUSED) for schedule in ("1f1b", *SPLIT)),
    *(Case(schedule, model="no biases", both=options) for schedule in SPLIT for options in ("", NOT_FUSED)),
    Case("v-min", model="no biases"),
    *(Case(schedule, tp=2) for schedule in ("1f1b", *SPLIT)),
    Case("zb-h1", tp=2, model="no biases"),
    *(Case(schedule, "vocab-1", dp=2, ours=DISTRIBUTED) for schedule in ("1f1b", *SPLIT)),
    Case("1f1b", dp=2, ours=f"{DISTRIBUTED} {OVERLAPPED}"),
    *(Case(schedule, dp=2, ours=SHARDED) for schedule in ("1f1b", *SPLIT)),
    Case("v-half", "vocab-1", dp=2, model="tied", ours=f"{SHARDED} --no-align-param-gather"),
    Case("v-zb", dp=2, model="no biases", both=NOT_FUSED, ours=REDUCED),
    Case("v-min", dp=2, model="grouped experts", ours=f"{EXCHANGED} {SHARDED}"),
    Case("zb-h1", dp=2, model="sequential experts", both=NOT_FUSED, ours=f"{EXCHANGED} {REDUCED}"),
    Case("zb-h1", "baseline", dp=2, model="tied", ours=REDUCED),
    Case("v-half", dp=2, model="two more heads", ours=SHARDED),
    Case("zb-h1", dp=2, model="a repeated head", both=NOT_FUSED, ours=SHARDED),
    Case("zb-h1", dp=2, model="fused operations", ours=REDUCED),
    Case("v-zb", pp=4, dp=2, both="--global-batch-size 4", ours=REDUCED),
    Case("zb-h1", dp=2, both="--global-batch-size 4", ours=SHARDED),
    Case("v-zb", tp=2, dp=2, model="tied"),
    *(Case(schedule, "vocab-1", model="tied") for schedule in ("1f1b", *SPLIT)),
    *(Case(schedule, model="llama") for schedule in SCHEDULES),
    *(Case(schedule, "baseline", model="llama", both="--bf16") for schedule in SPLIT),  # logits as stock's
    *(
        Case(schedule, model=model, both=options)
        for schedule in ("1f1b", *SPLIT)
        for model in ("grouped experts", "sequential experts")
        for options in ("", NOT_FUSED)
    ),
    *(
        Case("zb-h1", dp=2, model=model, ours=EXCHANGED)
        for model in ("grouped experts", "sequential experts")
    ),
    *(Case(schedule, model="two more heads") for schedule in ("1f1b", *SPLIT)),
    *(Case(schedule, model="a repeated head", both=NOT_FUSED) for schedule in ("1f1b", *SPLIT)),
    *(Case(schedule, model="fused operations") for schedule in ("1f1b", *SPLIT)),
    *(Case(schedule, model="latent attention") for schedule in ("1f1b", *SPLIT)),
    *(Case(schedule, ours=RECOMPUTED) for schedule in ("1f1b", *SPLIT)),
    *(Case(schedule, ours=SELECTIVE) for schedule in SPLIT),
    Case("zb-h1", model="no biases", ours=f"{SELECTIVE} --recompute-modules mlp layernorm"),
)
ROUNDED = tuple(Case(schedule, model="llama", both="--bf16") for schedule in ("1f1b", *SPLIT))

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
    """``model`` is a key of ``MODELS`` or the options of an architecture."""
    if not is_since(SINCE.get(model, "0.14")):
        pytest.skip("this Megatron has no such model")
    tied = () if model == "tied" else UNTIED
    return pretrain(
        *EIGHT_LAYERS,
        *tied,
        *words(MODELS.get(model, model)),
        *options,
        iterations=iterations,
        script=script,
        transformer_engine=True,
        **sizes,
    )


@cache
def stock(model: str, options: str) -> Log:
    return train(model, "--load", str(weights(model)), *FROM_WEIGHTS, *words(options))


def compare(ours: Log, expected: Log, record: Record, **tolerances: float) -> None:
    """Each to its relative tolerance; the largest difference goes to the record (``--junit-xml``)."""
    for name, tolerance in tolerances.items():
        found, wanted = (np.array(getattr(log, name)) for log in (ours, expected))
        np.testing.assert_allclose(found, wanted, tolerance, err_msg=name)
        record(name, float(abs(found / wanted - 1).max()))


def check(case: Case, record: Record, **tolerances: float) -> None:
    """Losses, gradient norms and evaluations are stock's."""
    expected = stock(case.model, case.both)
    load = ("--load", str(weights(case.model)), *FROM_WEIGHTS)
    sizes = {"pp": case.pp, "tp": case.tp, "dp": case.dp}
    ours = train(case.model, *load, *words(case.both), *case.flags, **sizes)
    assert f"method {case.method}, schedule {case.schedule}" in ours.text
    assert len(ours.losses) == len(ours.norms) == ITERATIONS
    assert len(ours.evaluations) > 0
    compare(ours, expected, record, **tolerances)


@pytest.mark.long
@pytest.mark.parametrize("model", ["default", "llama"])
def test_the_stand_in_trains_as_megatrons_own_layers(model: str, record_property: Record) -> None:
    """Stock from one seed: its local layers are PyTorch's products, norms, softmax and Adam."""
    options = (*UNTIED, *words(MODELS[model]), *EIGHT_LAYERS)
    theirs, local = (pretrain(*options, iterations=4, transformer_engine=te) for te in (True, False))
    compare(theirs, local, record_property, losses=2e-6, norms=2e-6, evaluations=2e-6)


DEFAULT = (Case("zb-h1"), Case("v-half", model="grouped experts", both=NOT_FUSED))


@pytest.mark.parametrize(
    "case",
    [*DEFAULT, *(pytest.param(case, marks=pytest.mark.long) for case in MATRIX if case not in DEFAULT)],
    ids=str,
)
def test_trains_as_stock(case: Case, record_property: Record) -> None:
    check(case, record_property, losses=1e-5, norms=1e-5, evaluations=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("case", ROUNDED, ids=str)
def test_trains_as_stock_in_16_bits(case: Case, record_property: Record) -> None:
    """Stock rounds its logits to 16 bits, and ours does not."""
    check(case, record_property, losses=1e-4, norms=1e-2, evaluations=1e-4)


@pytest.mark.long
@pytest.mark.parametrize(
    ("recipe", "schedule", "dp"),
    [
        *product(("delayed", "tensorwise", "blockwise", "mxfp8"), ("zb-h1", "v-half"), (1,)),
        (f"delayed {GATHERED}", "zb-h1", 2),
        *product((f"delayed {GATHERED} {NEGLIGIBLE}",), ("interleaved", "v-half"), (2,)),
        *product((f"tensorwise {GATHERED}", f"blockwise {GATHERED}"), ("zb-h1", "v-half"), (2,)),
        *product((f"mxfp8 {GATHERED} {REUSED}",), ("zb-h1", "v-half"), (2,)),
        *product((f"delayed {RECOMPUTED}", f"mxfp8 {RECOMPUTED}"), ("zb-h1", "v-half"), (1,)),
        *((f"tensorwise {GATHERED} {OVERLAPPED}", schedule, 2) for schedule in ("interleaved", "zb-h1")),
        (f"mxfp8 {GATHERED} {REUSED} {OVERLAPPED}", "v-half", 2),
        *product((FOUR_BITS, f"{FOUR_BITS} {RECOMPUTED}"), ("zb-h1", "v-half"), (1,)),
        *product((GATHERED_FOUR_BITS,), ("zb-h1", "v-half"), (2,)),
        *((f"{GATHERED_FOUR_BITS} {OVERLAPPED}", schedule, 2) for schedule in ("interleaved", "v-half")),
    ],
)
def test_trains_as_stock_in_few_bits(recipe: str, schedule: str, dp: int, record_property: Record) -> None:
    """With whole vocabulary layers each operand is stock's, and so is each of its roundings to 8 or 4 bits.

    Delayed scales follow from what a process has multiplied before, so stock runs on the same stages.
    """
    version = find_version(source_signatures(checkout()))
    if recipe.startswith("blockwise") and version == "0.14":
        pytest.skip(
            "Transformer Engine 2.7 has products of blocks on Hopper alone, and of 32 elements after it"
        )
    if REUSED in recipe and version in ("0.14", "0.15", "0.16"):
        pytest.skip("with 0.16.1 stock over the stand-in stops learning, as ours; earlier ones were not run")
    four = recipe.startswith("nvfp4")
    if four and version in ("0.14", "0.15", *(("0.16", "0.17") if "gather" in recipe else ())):
        pytest.skip(
            "0.16 is the first with NVFP4; 0.18 the first seen whose distributed optimizer casts to it"
        )
    if four and RECOMPUTED in recipe and version == "0.16":
        pytest.skip("stock stops: Transformer Engine 2.11 has no columns of a recomputed layer's weights")
    bits = "--fp4-format e2m1 --fp4-recipe" if four else "--fp8-format hybrid --fp8-recipe"
    case = Case(schedule, "baseline", both=f"{bits} {recipe}")
    load = ("--load", str(weights(case.model)), *FROM_WEIGHTS, *words(case.both))
    theirs, ours = (train(case.model, *load, *flags, pp=2, dp=dp) for flags in ((), case.flags))
    exact = stock(case.model, "--bf16" if "--bf16" in recipe else "")
    if recipe.startswith("mxfp8"):
        # Sums in another order change a weight's last bit, and with it, at times, a scale: a power of two. On
        # one processor of two the third iteration of v-half differed so by 3e-4, its first two by 1e-7.
        assert [*ours.norms[:2], *ours.losses[:2]] == pytest.approx(
            [*theirs.norms[:2], *theirs.losses[:2]], 1e-5
        )
        compare(ours, theirs, record_property, losses=1e-4, norms=1e-2, evaluations=1e-4)
    else:
        compare(ours, theirs, record_property, losses=1e-5, norms=1e-5, evaluations=1e-5)
    assert max(abs(a - b) for a, b in zip(theirs.norms, exact.norms, strict=True)) > 1e-5  # they were rounded
    assert max(theirs.losses) < 9  # and it trains


def keys(folder: Path, iteration: int) -> set[str]:
    """Of all that a checkpoint holds, tensors and others."""
    reader = dcp.FileSystemReader(str(folder / f"iter_{iteration:07d}"))
    return set(reader.read_metadata().state_dict_metadata)


@pytest.mark.long
@pytest.mark.parametrize("case", [Case("zb-h1"), Case("v-half", "vocab-1"), Case("1f1b", tp=2)], ids=str)
def test_checkpoints_go_to_stock_and_back(case: Case, tmp_path: Path) -> None:
    """Of six iterations the last three: ours from stock's, stock's from ours, ours from ours."""
    sizes = {"pp": case.pp, "tp": case.tp, "iterations": 6}
    save = ("--save-interval", "3", "--save")
    start = ("--load", str(weights(case.model)), *FROM_WEIGHTS)
    at_three = ("--ckpt-step", "3", "--load")
    theirs = train(case.model, *start, *save, str(tmp_path / "stock"), iterations=6)
    ours = train(case.model, *start, *save, str(tmp_path / "ours"), *case.flags, **sizes)
    extra = {key for key in keys(tmp_path / "stock", 3) if "_extra_state" in key}
    assert extra
    assert extra == {key for key in keys(tmp_path / "ours", 3) if "_extra_state" in key}
    from_stock = train(case.model, *at_three, str(tmp_path / "stock"), *case.flags, **sizes)
    to_stock = train(case.model, *at_three, str(tmp_path / "ours"), iterations=6)
    resumed = train(case.model, *at_three, str(tmp_path / "ours"), *case.flags, **sizes)
    for name in ("losses", "norms"):
        expected = getattr(theirs, name)[3:]
        assert len(expected) == 3
        np.testing.assert_allclose(getattr(from_stock, name), expected, rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(getattr(to_stock, name), expected, rtol=1e-5, err_msg=name)
        np.testing.assert_array_equal(getattr(resumed, name), getattr(ours, name)[3:], name)
