"""``python -m lab losses`` on a checkout that the test writes: the definition, with whole logits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from lab.__main__ import main
from lab.losses.compared import Setting
from lab.losses.theirs import MODULES
from tests.slime_module import PLAIN


@pytest.mark.slow
def test_beside_the_plain_definition(tmp_path: Path) -> None:
    (file,) = MODULES["slime"].values()
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(PLAIN)
    arguments = ["losses", "--slime", str(tmp_path), "--tokens", "8", "--vocab-size", "96"]
    shown = CliRunner().invoke(main, [*arguments, "--rounds", "1", "--format", "json"])
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.stdout)
    assert "slime" in found["environment"]
    assert len(found["rows"]) == 3
    for row in found["rows"]:
        assert row["shapes_equal"]
        assert row["value_difference"] < 1e-6
        assert row["gradient_difference"] < 1e-6
        assert not row["ours_writes_input"]
        assert row["ours_ms"] > 0


def test_refusals(tmp_path: Path) -> None:
    wrong = CliRunner().invoke(main, ["losses", "--verl", str(tmp_path)])
    assert wrong.exit_code == 2
    assert "has no verl/utils/megatron/tensor_parallel.py" in wrong.output
    assert CliRunner().invoke(main, ["losses"]).exit_code == 2
    with pytest.raises(ValueError, match="ids must divide by 3"):
        Setting({}, ranks=3)
