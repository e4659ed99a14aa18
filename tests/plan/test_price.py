"""What layers take beside others, and whether that decides between ours and Megatron's own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_vocabpar.plan.advice import Verdict, verdict
from megatron_vocabpar.plan.choice import Choice, Request
from megatron_vocabpar.plan.choices import choice_of
from megatron_vocabpar.plan.hardware import hardware_named
from megatron_vocabpar.plan.job import Job
from megatron_vocabpar.plan.plays import play_in_full, stock_choices
from megatron_vocabpar.plan.price import Price, Use, fewest_channels, gain_error, read_measured, readings
from megatron_vocabpar.plan.read_config import model_preset

REQUEST = Request(
    replace(model_preset("llama-3.1-8b"), layers=16), Job(p=4, m=16), hardware_named("H100"), limit_gib=1e3
)
NOTHING = {"waiting": Price(0.0), "transfers": Price(0.0)}


def test_a_factor_is_that_of_a_busy_gpu_times_that_of_what_waits() -> None:
    use = Use(busy=0.9, resident=0.5, transferring=0.02)
    assert Price(0.04, channels=8.0).factor(use, 132) == pytest.approx(1.036 * (1 + 4 / 132))
    assert Price(0.04, transfers=1.5).factor(use, 132) == pytest.approx(1.036 * 1.03)


def test_layers_take_longer_in_what_is_simulated_in_full() -> None:
    free = replace(REQUEST, prices=NOTHING)
    unpriced = play_in_full(choice_of(free, "vocab-1", "1f1b"))
    priced = play_in_full(choice_of(REQUEST, "vocab-1", "1f1b"))
    assert 0.0 < priced.use.transferring < priced.use.resident < 0.5
    least, most = sorted(REQUEST.factors(priced.use))
    length_ms = unpriced.iteration_ms - unpriced.tail_ms
    for ms in (priced.iteration_ms, priced.other_ms):
        assert min(1.0, least) <= (ms - priced.tail_ms) / length_ms <= max(1.0, most)


def test_megatrons_own_schedules_pay_for_busy_gpus_alone() -> None:
    free = {one.name: one for one in stock_choices(replace(REQUEST, prices=NOTHING))}
    busy = REQUEST.hardware.rates.busy
    for one in stock_choices(REQUEST):
        assert (one.use.resident, one.use.transferring) == (0.0, 0.0)
        longer = (one.iteration_ms - one.tail_ms) / (free[one.name].iteration_ms - one.tail_ms)
        slope = readings()["waiting"].slope
        assert longer == pytest.approx(1 + slope * (one.use.busy - busy), abs=0.002)


@pytest.mark.parametrize(
    ("gains", "words"),
    [((1.08, 1.05), ""), ((0.9, 0.8), ""), ((1.05, 0.96), "disagree"), ((1.2, 1.005), "own error")],
)
def test_what_is_decided(gains: tuple[float, float], words: str) -> None:
    judged = Verdict(gains)
    assert words in judged.reason
    assert bool(judged.reason) == bool(words) == str(judged).startswith("Undecided")
    assert gain_error() > 0.005


def test_ours_and_stock_are_compared_by_the_best_of_each_reading() -> None:
    def choice(method: str, first: float, other: float) -> Choice:
        return Choice(REQUEST, method, "1f1b", iteration_ms=first, other_ms=other)

    stock = [choice("stock", 110.0, 120.0), choice("baseline", 130.0, 115.0)]
    judged = verdict([*stock, choice("vocab-1", 100.0, 110.0), choice("vocab-2", 105.0, 100.0)])
    assert judged is not None
    assert judged.gains == pytest.approx((1.1, 1.15))
    assert verdict(stock) is None


def test_channels_are_as_few_as_the_slack_allows() -> None:
    """dX of 4,096 tokens and a hidden size of 8,192 is 134 MB, of each tensor-parallel rank, sent once.

    A channel carries 20 GB/s.
    """
    model, gpu = model_preset("llama-3.1-70b"), hardware_named("H100")
    model = replace(model, seq_length=4096)
    one_node = Request(model, Job(p=8), gpu, limit_gib=80.0)
    several = replace(one_node, job=Job(p=8, d=2))
    faster = replace(several, hardware=gpu.connected(network_gb_s=100.0))

    def channels(asked: Request, allowed: float) -> int:
        return fewest_channels(asked.model, asked.job, asked.hardware, allowed)

    assert channels(one_node, 2.5) == 3
    assert channels(replace(one_node, job=Job(p=4, t=2)), 2.5) == 3
    assert channels(one_node, 100.0) == 1
    assert channels(several, 100.0) == 3
    assert channels(faster, 100.0) == 5


def test_a_choice_in_full_says_its_channels() -> None:
    assert play_in_full(choice_of(REQUEST, "vocab-2", "v-half")).channels >= 1
    assert play_in_full(choice_of(REQUEST, "baseline", "1f1b")).channels == 0


def test_a_file_of_the_slope_alone(tmp_path: Path) -> None:
    file = tmp_path / "price.json"
    file.write_text(json.dumps({"price": {"slope": 0.06}}))
    read, costs = read_measured(file)
    assert read is not None
    assert costs is None
    assert (read.slope, read.channels) == (0.06, readings()["waiting"].channels)


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
