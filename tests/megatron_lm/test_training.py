"""Megatron's own pretrain_gpt.py trains the same with our flags and without, from the same weights."""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests.megatron_lm.training import ROOT, Log, checkout, pretrain, words
from tests.support.launch_options import EMBEDDINGS, FROM_WEIGHTS

LAYOUTS = {
    "pp4": {"pp": 4},
    "pp2 tp2": {"pp": 2, "tp": 2},
    "pp2 dp2": {"pp": 2, "dp": 2},
}
OPTIONS = {"pp2 dp2": ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A stock checkpoint after three iterations on one process, tied and untied."""
    checkout()
    folders = {}
    for name, options in EMBEDDINGS.items():
        folders[name] = tmp_path_factory.mktemp(name)
        pretrain("--save", str(folders[name]), *options, iterations=3)
    return folders


@cache
def stock(weights: Path, layout: str, *options: str) -> Log:
    return pretrain("--load", str(weights), *FROM_WEIGHTS, *options, **LAYOUTS[layout])


def check(weights: Path, layout: str, method: str, options: tuple[str, ...]) -> None:
    """Losses, gradient norms and evaluation of 20 iterations equal stock's to 1e-5."""
    options = (*options, *OPTIONS.get(layout, ()))
    expected = stock(weights, layout, *options)
    flags = ("--enable-vocab-parallel", "--vocab-parallel-method", method)
    ours = pretrain("--load", str(weights), *FROM_WEIGHTS, *flags, *options, **LAYOUTS[layout])
    assert f"vocabulary parallelism: method {method}" in ours.text
    assert re.search(rf"^ +vocab_parallel_method \.+ {method}$", ours.text, re.MULTILINE)
    assert "vocabulary parallelism: method" not in expected.text
    assert len(ours.losses) == len(ours.norms) == 20
    for name in ("losses", "norms", "evaluations"):
        np.testing.assert_allclose(getattr(ours, name), getattr(expected, name), rtol=1e-5, err_msg=name)


@pytest.mark.long
@pytest.mark.parametrize("method", ["vocab-2", "vocab-1"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_trains_as_stock(weights: dict[str, Path], layout: str, method: str) -> None:
    check(weights["untied"], layout, method, EMBEDDINGS["untied"])


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_trains_as_stock_with_tied_embeddings(weights: dict[str, Path], layout: str) -> None:
    check(weights["tied"], layout, "vocab-2", EMBEDDINGS["tied"])


@pytest.mark.long
@pytest.mark.parametrize("method", ["naive", "interlaced"])
def test_other_methods_train_as_stock(weights: dict[str, Path], method: str) -> None:
    check(weights["untied"], "pp2 dp2", method, EMBEDDINGS["untied"])


def test_patched_script_trains(tmp_path: Path) -> None:
    """The third door: the checkout's script with the line of our patch, started by itself."""
    shutil.copy(checkout() / "pretrain_gpt.py", tmp_path)
    patch = ROOT / "patches" / "pretrain_gpt.patch"
    subprocess.run(["git", "apply", "--unidiff-zero", str(patch)], cwd=tmp_path, check=True)
    script = tmp_path / "pretrain_gpt.py"
    v_half = words("--vocab-parallel-family v-half --num-virtual-stages-per-pipeline-rank 2")
    log = pretrain("--enable-vocab-parallel", *v_half, pp=2, iterations=3, script=script, fresh=True)
    assert "vocabulary parallelism: method vocab-2, family v-half" in log.text
    assert len(log.losses) == 3
    assert "vocabulary parallelism" not in pretrain(iterations=3, script=script, fresh=True).text


def test_refuses_before_process_groups_start() -> None:
    log = pretrain("--enable-vocab-parallel", "--inprocess-restart", iterations=3, fails=True)
    assert "--inprocess-restart: the vocabulary groups cannot be rebuilt" in log.text
    assert "initialized tensor model parallel" not in log.text
