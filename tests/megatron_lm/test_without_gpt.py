"""A Megatron-LM without GPTModel, which NVIDIA deprecates: it is read, trained, saved and resumed."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from megatron_vocabpar.cli.doctor import doctor_command
from megatron_vocabpar.megatron_lm.checkout import version_of
from megatron_vocabpar.train.config import TrainConfig
from megatron_vocabpar.train.job import run_job
from megatron_vocabpar.train.ranks import WORKER_MODULE
from tests.megatron_lm.training import ROOT, Log, checkout, is_since, pretrain, words

IMPORT = re.compile(r"from (megatron\.core\.models\.gpt)?(\.gpt_model)? import GPTModel( as \w+)?$", re.M)
SAVED, LAST = 3, 6
MODEL = words(
    "--spec tests.megatron_lm.local_layers spec --position-embedding-type rope --num-layers 8 "
    "--untie-embeddings-and-output-weights"
)


@pytest.fixture(scope="module")
def without_gpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout; what imported the class gets None in its place."""
    original, copy = checkout(), tmp_path_factory.mktemp("checkout") / "megatron"
    if not is_since("0.18"):
        pytest.skip("this Megatron has no other model for pretrain_hybrid.py")
    shutil.copytree(original / "megatron", copy / "megatron", ignore=shutil.ignore_patterns("__pycache__"))
    for script in original.glob("*.py"):
        shutil.copy(script, copy)
    (copy / "megatron/core/models/gpt/gpt_model.py").unlink()
    for path in copy.rglob("*.py"):
        path.write_text(IMPORT.sub("GPTModel = None", path.read_text()))
    return copy


def test_doctor_reads_the_other_model(without_gpt: Path) -> None:
    result = CliRunner().invoke(doctor_command, ["--megatron", str(without_gpt)])
    assert result.exit_code == 0, result.output
    assert f"Megatron core {version_of(checkout())}, by its signatures" in result.output
    assert "with a warning of" not in result.output
    assert "hybrid_model.HybridModel" in result.output
    assert "gpt_model.GPTModel" not in result.output
    assert "pretrain_hybrid.py is not patched" in result.output


@pytest.mark.long
@pytest.mark.parametrize("family", ["v-zb", "search"])
def test_trains_saves_and_resumes(
    without_gpt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    monkeypatch.setenv("MEGATRON_LM_PATH", str(without_gpt))

    def train(pattern: str, *options: str, until: int, pp: int = 1) -> Log:
        return pretrain(
            *(*MODEL, "--hybrid-layer-pattern", pattern, "--exit-interval", str(until), *options),
            pp=pp,
        )

    start, saved = str(tmp_path / "start"), str(tmp_path / "saved")
    train("*-*-*-*-", "--save", start, until=1)
    expected = train("*-*-*-*-", "--load", start, until=LAST)
    flags = words(f"--enable-vocab-parallel --vocab-parallel-family {family}")
    ours = [
        train("*-|*-|*-|*-", *flags, "--load", load, "--save", saved, until=until, pp=2)
        for load, until in ((start, SAVED), (saved, LAST))
    ]
    assert all("vocabulary parallelism: method" in log.text for log in ours)
    for name in ("losses", "norms"):
        found = [value for log in ours for value in getattr(log, name)]
        assert len(found) == LAST - 1
        np.testing.assert_allclose(found, getattr(expected, name), rtol=1e-5, err_msg=name)


@pytest.mark.long
def test_vocabpar_train_trains_the_same_model_as_with_gpt(
    without_gpt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside megatron-core as it is installed: HybridModel's weights are drawn as those of GPTModel are."""
    config = TrainConfig(
        pp=2,
        layers=4,
        hidden=16,
        heads=2,
        seq_length=16,
        vocab_size=600,
        tokenizer_vocab_size=500,
        steps=SAVED,
        save_interval=SAVED,
        microbatches=3,
        device="cpu",
        family="v-half",
        method="vocab-1",
    )

    def train(name: str, worker: str) -> list[float]:
        """The losses of a job and of one that goes on from its checkpoint."""
        job = dataclasses.replace(config, output=str(tmp_path / name))
        run_job(job, print, worker)
        run_job(dataclasses.replace(job, steps=LAST, resume=True), print, worker)
        lines = (tmp_path / name / job.method / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines]

    expected = train("installed", WORKER_MODULE)
    paths = [str(without_gpt), str(ROOT), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    found = train("copy", "tests.megatron_lm.train_worker")
    assert len(found) == LAST
    np.testing.assert_allclose(found, expected, rtol=1e-6)
