"""W over Transformer Engine's own layers: ``te_layers.py`` computes, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache

import pytest

from tests.pipeline.te_layers import CASES, Case
from tests.transformer_engine import hook


@cache
def differences() -> dict[str, float | str]:
    """By case, the largest of a gradient's from autograd's, or what was raised."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.pipeline.te_layers"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_autograds(case: Case) -> None:
    if hook.wheel() is None:
        pytest.skip(hook.MISSING)
    found = differences()[str(case)]
    if isinstance(found, str) and found.endswith("has no stand-in on the CPU"):
        pytest.skip(found)
    assert isinstance(found, float), found
    assert found < 2e-6
