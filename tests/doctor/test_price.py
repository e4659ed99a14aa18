"""What layers take beside others, measured: on the CPU, where nothing takes anything, and in arithmetic."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_vocabpar.doctor import price
from megatron_vocabpar.plan.price import read_measured, readings
from tests.support.tiny_checks import TINY


def test_products_lose_what_they_are_slower_by() -> None:
    assert price.lost(7 / 8, 132) == pytest.approx(16.5)
    assert price.lost(1.01, 132) == 0.0


@pytest.mark.parametrize("parts", [("busy",), ("busy", "kernel"), ("busy", "collective", "kernel")])
def test_what_a_collective_holds_counts_before_what_a_kernel_does(
    parts: tuple[str, ...], tmp_path: Path
) -> None:
    values = {"busy": {"slope": 0.1}, "kernel": {"channels": 18.0}, "collective": {"channels": 9.0}}
    for part in parts:
        (tmp_path / f"price-{part}.json").write_text(json.dumps(values[part]))
    expected = {1: {}, 2: {"channels": 18.0}, 3: {"channels": 9.0}}[len(parts)]
    assert price.written(tmp_path) == {"price": {"slope": 0.1, **expected}}


def test_the_slope_is_that_of_the_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Products take 10 ms alone, and 6 % longer on a GPU that is always busy."""
    monkeypatch.setattr(price, "_settled_ms", lambda device, run, busy, seconds: 10.0 * (1.0 + 0.06 * busy))
    assert price.busy_gpu("cpu", str(tmp_path), size=8, count=1).outcome == "ok"
    assert price.written(tmp_path) == {"price": {"slope": pytest.approx(0.06)}}


def test_checks_on_one_device_write_what_plans_read(tmp_path: Path) -> None:
    finding = price.busy_gpu("cpu", str(tmp_path), **TINY["price:busy_gpu"])
    assert finding.figure.startswith("busy for 35 % ")
    assert price.waiting_kernel("cpu", str(tmp_path)).outcome == "not run"
    found = price.written(tmp_path)
    assert found is not None
    file = tmp_path / "price.json"
    file.write_text(json.dumps(found))
    read, costs = read_measured(file)
    assert read is not None
    assert costs is None
    assert (read.slope, read.channels) == (found["price"]["slope"], readings()["waiting"].channels)


def test_nothing_is_written_of_checks_that_did_not_run(tmp_path: Path) -> None:
    assert price.written(tmp_path) is None


@pytest.mark.slow
def test_a_collective_that_waits_is_measured_at_each_limit(tmp_path: Path) -> None:
    sizes = TINY["price:waiting_collective"]
    finding = price.waiting_collective("cpu", 2, folder=str(tmp_path), **sizes)
    assert finding.outcome == "ok", finding
    assert "with 1, " in finding.figure
    assert "channels" in json.loads((tmp_path / "price-collective.json").read_text())


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"price": {"slope": "0.03"}}, "give a number from 0 to 1000"),
        ({"price": {"slope": 0.03, "sms": 4}}, "sms"),
        ({"price": {}}, "slope"),
    ],
)
def test_a_price_that_is_none_is_refused(content: object, words: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.json"
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=words):
        read_measured(file)
