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
from megatron_vocabpar.plan.price import Price, Use, fewest_channels, pair_error, read_measured, usual_price
from megatron_vocabpar.plan.read_config import model_preset

REQUEST = Request(
    replace(model_preset("llama-3.1-8b"), layers=16), Job(p=4, m=16), hardware_named("H100"), limit_gib=1e3
)
NOTHING = Price(0.0, 0.0)


def test_a_factor_is_that_of_a_busy_gpu_times_that_of_what_waits() -> None:
    use = Use(busy=0.9, resident=0.5)
    assert Price(0.04, 8.0).factor(use, 132) == pytest.approx(1.036 * (1 + 4 / 132))


def test_the_usual_price_lies_between_its_ends() -> None:
    price = usual_price()
    for name in ("slope", "channels"):
        low, high = (getattr(end, name) for end in price.ends)
        assert getattr(price, name) == pytest.approx((low * high) ** 0.5, rel=0.01)


def test_layers_take_longer_in_what_is_simulated_in_full() -> None:
    free = replace(REQUEST, price=NOTHING)
    unpriced = play_in_full(choice_of(free, "vocab-1", "1f1b"))
    priced = play_in_full(choice_of(REQUEST, "vocab-1", "1f1b"))
    assert 0.0 < priced.use.resident < 0.5
    factor, length_ms = REQUEST.factor(priced.use), unpriced.iteration_ms - unpriced.tail_ms
    longer = (priced.iteration_ms - priced.tail_ms) / length_ms
    assert min(1.0, factor) <= longer <= max(1.0, factor)
    again = replace(REQUEST, price=replace(REQUEST.price, channels=2 * REQUEST.price.channels))
    at_twice = play_in_full(choice_of(again, "vocab-1", "1f1b"))
    assert priced.at_ms(again.price) == pytest.approx(at_twice.iteration_ms, rel=2e-3)


def test_megatrons_own_schedules_pay_for_busy_gpus_alone() -> None:
    free = {one.name: one for one in stock_choices(replace(REQUEST, price=NOTHING))}
    reference = Use(REQUEST.hardware.rates.busy)
    for one in stock_choices(REQUEST):
        assert one.use.resident == 0.0
        longer = (one.iteration_ms - one.tail_ms) / (free[one.name].iteration_ms - one.tail_ms)
        factor = REQUEST.price.longer(one.use, reference, 132)
        assert longer == pytest.approx(1 + one.layers_share * (factor - 1), abs=0.002)


@pytest.mark.parametrize(
    ("gain", "spread", "word"),
    [
        (1.08, 0.03, "ours"), (0.9, 0.05, "stock's"), (1.04, 0.03, "within the error"),
        (1.015, 0.0, "within the error"),
    ],
)  # fmt: skip
def test_a_gain_that_is_larger_than_its_error_is_a_verdict(gain: float, spread: float, word: str) -> None:
    judged = Verdict(gain, pairs=0.02, spread=spread, alike=True)
    assert judged.word == word
    assert str(judged).startswith(f"Verdict: {word}. Ours is {gain:.2f} times as fast")


def test_ours_and_stock_are_compared_by_the_best_of_each() -> None:
    def choice(method: str, ms: float, resident: float = 0.0) -> Choice:
        return Choice(REQUEST, method, "1f1b", iteration_ms=ms, use=Use(1.0, resident))

    stock = [choice("stock", 110.0), choice("baseline", 130.0)]
    judged = verdict([*stock, choice("vocab-1", 100.0, 0.2), choice("vocab-2", 105.0)])
    assert judged is not None
    assert judged.gain == pytest.approx(1.1)
    low, high = (1 + 0.2 * end.channels / 132 for end in REQUEST.price.ends)
    usual = 1 + 0.2 * REQUEST.price.channels / 132
    assert judged.spread == pytest.approx(1.1 * max(usual / low - 1, 1 - usual / high), rel=1e-6)
    assert verdict(stock) is None
    measured = replace(REQUEST, price=Price(0.1, 20.0))
    alone = [replace(one, request=measured) for one in (*stock, choice("vocab-1", 100.0, 0.2))]
    assert verdict(alone).spread == 0.0  # type: ignore[union-attr]


def test_pairs_of_other_configurations_are_met_less_well_than_pairs_of_schedules() -> None:
    for kind in ("dense", "experts"):
        assert 0.005 < pair_error(kind, alike=True) < pair_error(kind, alike=False)


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
    assert (read.slope, read.channels) == (0.06, usual_price().channels)


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
