"""Old import paths work through one release, with a warning."""

from __future__ import annotations

import importlib
import sys

import pytest

from megatron_vocabpar._moved import MOVED


@pytest.mark.parametrize("old", MOVED)
def test_an_old_name_works_with_a_warning(old: str) -> None:
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match=f"{old} is now {MOVED[old]}"):
        assert importlib.import_module(old) is importlib.import_module(MOVED[old])
