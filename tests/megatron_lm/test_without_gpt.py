"""A Megatron-LM without GPTModel, which NVIDIA deprecates: it is read, trained, saved and resumed."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from megatron_vocabpar.cli.doctor import doctor_command
from megatron_vocabpar.megatron_lm.checkout import version_of
from tests.megatron_lm.training import Log, checkout, is_since, pretrain, words

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
