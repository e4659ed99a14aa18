"""Multi-token prediction and layers by pattern in real Megatron-LM: all heads train as in stock.

Stock 0.16 cannot save tied embeddings with several heads and stages, so stock is on one process.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests.megatron_lm.training import Log, checkout, is_since, pretrain, words

SAVED, LAST, LATER = 2, 5, 7
"""Iterations of the checkpoint that all start from, of the next one and the evaluation, and of the end."""
GPT = words("--untie-embeddings-and-output-weights --position-embedding-type rope --num-layers 4")
EXPERTS = words("--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2 --disable-bias-linear")
SETTINGS = {
    "one further head": (*GPT, *words("--mtp-num-layers 1")),
    "two further heads": (*GPT, *words("--mtp-num-layers 2 --calculate-per-token-loss")),
    "tied": words("--position-embedding-type rope --num-layers 4 --mtp-num-layers 2"),
    "repeated layer": (*GPT, *words("--mtp-num-layers 2 --mtp-use-repeated-layer")),
    "detached": (*GPT, *words("--mtp-num-layers 2 --mtp-detach-heads")),
    "experts": (*GPT, *EXPERTS, *words("--mtp-num-layers 1 --moe-token-dispatcher-type alltoall")),
}
SINCE = {"repeated layer": "0.17", "detached": "0.19"}
BY_PATTERN = words(
    "--spec tests.megatron_lm.local_layers spec --position-embedding-type none --num-layers 8 "
    "--untie-embeddings-and-output-weights"
)
PATTERNS = {
    "pattern": ("*-*-*-*-", "", ()),
    "pattern with heads": ("*-*-*-*-", "/*-/*-", ()),
    "pattern with experts": ("*E-E*E-E", "", (*EXPERTS, "--moe-token-dispatcher-type", "alltoall")),
}
"""Of HybridModel (of MambaModel in older versions): layers, those of further heads, other options.

Every rank has experts: to 0.19 Megatron sums tensors of different lengths where one has none, and hangs.
"""
OURS = ("--enable-vocab-parallel",)
V_HALF = (*OURS, *words("--vocab-parallel-family v-half --num-virtual-stages-per-pipeline-rank 2"))
LAYOUTS: dict[str, tuple[tuple[str, ...], dict[str, int]]] = {
    "stock pp1": ((), {}),
    "stock pp2": ((), {"pp": 2}),
    "pp1": (OURS, {"pp": 1}),
    "pp2": (OURS, {"pp": 2}),
    "pp2 vocab-1": ((*OURS, "--vocab-parallel-method", "vocab-1"), {"pp": 2}),
    "pp2 zb-h1": ((*OURS, "--vocab-parallel-family", "zb-h1"), {"pp": 2}),
    "pp4": (OURS, {"pp": 4}),
    "pp2 tp2": (OURS, {"pp": 2, "tp": 2}),
    "pp2 dp2": ((*OURS, "--overlap-grad-reduce"), {"pp": 2, "dp": 2}),
    "v-half pp2": (V_HALF, {"pp": 2}),
    "v-half pp2 baseline": ((*V_HALF, "--vocab-parallel-method", "baseline"), {"pp": 2}),
    "v-zb pp2 baseline, uneven": (
        (
            *OURS,
            *words(
                "--vocab-parallel-method baseline --vocab-parallel-family v-zb "
                "--pipeline-model-parallel-layout Et|tt|t|mL"
            ),
        ),
        {"pp": 2},
    ),
    "ttm|L": ((*OURS, *words("--pipeline-model-parallel-layout Ett|ttm|L")), {"pp": 3}),
    "zb-h1 tt|m|L": (
        (*OURS, *words("--vocab-parallel-family zb-h1 --pipeline-model-parallel-layout Ett|tt|m|L")),
        {"pp": 4},
    ),
    "mm||L": (
        (*OURS, *words("--pipeline-model-parallel-layout Etttt|mm||L --vocab-parallel-method vocab-1")),
        {"pp": 4},
    ),
    "interleaved m|L tp2": (
        (
            *OURS,
            *words("--vocab-parallel-family interleaved --pipeline-model-parallel-layout Et|t|t||t|m||L"),
        ),
        {"pp": 4, "tp": 2},
    ),
}
"""Ours, and stock's; in the last four the further heads' layers have stages before the last."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkout()
    return tmp_path_factory.mktemp("heads")


COMPARED = re.compile(r"mtp_\d( loss|_acceptance_rate)|lm loss|grad-norm")


def train(setting: str, layout: str, until: int, *options: str) -> Log:
    flags, sizes = LAYOUTS[layout]
    options = ("--exit-interval", str(until), "--eval-interval", str(LAST), *options)
    stages = sizes.get("pp", 1) * (2 if "v-half" in layout else 1)
    if not is_since(SINCE.get(setting, "0.14")):
        pytest.skip("this version of Megatron has no such heads")
    if setting in SETTINGS:
        return pretrain(*SETTINGS[setting], *flags, *options, **sizes)
    layers, heads, others = PATTERNS[setting]
    script = checkout() / "pretrain_hybrid.py"
    if script.exists():
        each = len(layers) // stages
        parts = [layers[i : i + each] for i in range(0, len(layers), each)]
        pattern = ("--hybrid-layer-pattern", "|".join(parts) + heads)
        flags = tuple(flag for flag in flags if flag not in V_HALF[-2:])
    elif heads or "v-half" in layout or "E" in layers:
        pytest.skip("MambaModel of this version has neither heads nor model chunks, or no experts")
    else:
        script, pattern = checkout() / "pretrain_mamba.py", ("--hybrid-override-pattern", layers)
    options = (*BY_PATTERN, *pattern, *others, *flags, *options)
    return pretrain(*options, script=script, **sizes)


@cache
def start(folder: Path, setting: str) -> Path:
    """A stock checkpoint of one process."""
    path = folder / setting
    train(setting, "stock pp1", SAVED, "--save", str(path))
    return path


@cache
def run(folder: Path, setting: str, layout: str) -> tuple[Log, Log]:
    """From the common checkpoint; and stock, where that has saved its own."""
    path = folder / f"{setting} {layout}"
    first = train(setting, layout, LAST, "--load", str(start(folder, setting)), "--save", str(path))
    return first, train(setting, "stock pp1", LATER, "--load", str(path))


def check(folder: Path, setting: str, layout: str) -> None:
    """Losses and acceptance rates of all heads, gradient norms, evaluation; likewise stock that goes on.

    Whole layers in a V know no acceptance rates.
    """
    expected, ours = run(folder, setting, "stock pp1"), run(folder, setting, layout)
    assert "vocabulary parallelism: method" in ours[0].text
    for theirs, mine, steps in zip(expected, ours, (LAST - SAVED, LATER - LAST), strict=True):
        tags = [tag for tag in theirs.scalars if COMPARED.fullmatch(tag)]
        assert len(tags) >= (2 if setting in ("pattern", "pattern with experts") else 3)
        assert len(mine.losses) == steps
        for tag in tags:
            if "acceptance" in tag and "baseline" in layout and mine is ours[0]:
                assert tag not in mine.scalars
                continue
            np.testing.assert_allclose(mine.scalars[tag], theirs.scalars[tag], rtol=1e-5, err_msg=tag)
    assert ours[0].evaluations
    np.testing.assert_allclose(ours[0].evaluations, expected[0].evaluations, rtol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(
    ("setting", "layout"),
    [
        *(("one further head", layout) for layout in LAYOUTS if "stock" not in layout and "L" not in layout),
        ("two further heads", "pp4"),
        ("two further heads", "v-half pp2"),
        ("two further heads", "v-half pp2 baseline"),
        ("experts", "v-half pp2 baseline"),
        ("tied", "v-half pp2 baseline"),
        ("tied", "pp2 tp2"),
        ("tied", "v-half pp2"),
        ("experts", "pp2"),
        ("repeated layer", "pp2"),
        ("repeated layer", "pp4"),
        ("detached", "pp2 vocab-1"),
        ("detached", "v-half pp2"),
        ("detached", "mm||L"),
        ("one further head", "ttm|L"),
        ("one further head", "zb-h1 tt|m|L"),
        ("one further head", "interleaved m|L tp2"),
        ("two further heads", "mm||L"),
        ("tied", "mm||L"),
        *((setting, layout) for setting in PATTERNS for layout in ("pp2", "pp4", "v-half pp2")),
    ],
)
def test_trains_as_stock(folder: Path, setting: str, layout: str) -> None:
    check(folder, setting, layout)


@pytest.mark.long
def test_acceptance_rates_of_heads_that_have_learnt(folder: Path) -> None:
    """Elsewhere no head guesses any token yet, and all rates are 0."""
    learnt = str(folder / "learnt")
    learning = (
        *SETTINGS["two further heads"],
        *words("--lr 0.03 --min-lr 0.02"),
    )
    stock = pretrain(*learning, "--exit-interval", "16", "--save", learnt)
    if not any("acceptance_rate" in tag for tag in stock.scalars):
        pytest.skip("this version of Megatron reports no acceptance rates")
    later = (*learning, "--exit-interval", "18", "--load", learnt)
    expected, ours = pretrain(*later), pretrain(*later, *OURS, pp=2)
    for tag in ("mtp_1_acceptance_rate", "mtp_2_acceptance_rate"):
        assert any(expected.scalars[tag]), tag
        np.testing.assert_allclose(ours.scalars[tag], expected.scalars[tag], rtol=1e-5, err_msg=tag)
