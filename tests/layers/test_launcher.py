"""Launches past Triton's own way have the arguments of those that it makes, seen by a driver."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter launches nothing", allow_module_level=True)

from tests.cases import rest_is_slow

from .stub_driver import environment


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ builds a driver that does nothing")
@pytest.mark.parametrize(("dtype", "names"), rest_is_slow([("bfloat16", 4), ("float16", 7)], ("bfloat16", 4)))
def test_arguments_are_those_of_tritons_own_launch(dtype: str, names: int, tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tests.layers.stub_driver", dtype],
        env={**os.environ, **environment(tmp_path)},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    kernels, launches, past = (int(word) for word in result.stdout.split() if word.isdigit())
    assert kernels == names
    assert past > launches / 2
