"""What layers take beside others, against the published passes."""

from __future__ import annotations

import pytest

from lab.paper.measured import play
from lab.paper.price import fit_of, gain_errors, held_back, layers_ms, middle, priced, use_of
from lab.paper.published import published_passes
from megatron_vocabpar.plan.price import usual_price

A100 = usual_price().ends[0]


@pytest.mark.slow
def test_a_slope_and_channels_give_what_layers_take() -> None:
    """The package's price of A100: one for all methods, beside runs whose own F + B they have not seen."""
    rows = [row for row in published_passes() if (row.vocab, row.seq_length) == (128000, 2048)]
    uses = [use_of(row, play(row).events) for row in rows]
    alone = [layers_ms(row) / A100.factor(use, 108) for row, use in zip(rows, uses, strict=True)]
    assert max(alone) / min(alone) < 1.015


def test_redis_has_the_others_layers_on_two_ranks() -> None:
    rows = {row.method: row for row in published_passes() if (row.vocab, row.seq_length) == (256000, 2048)}
    assert list(middle(rows["redis"])) == [1, 2]
    assert layers_ms(rows["redis"]) == pytest.approx(layers_ms(rows["baseline"]), rel=0.01)
    assert layers_ms(rows["vocab-1"]) > 1.06 * layers_ms(rows["baseline"])


@pytest.mark.slow
def test_the_packages_price_of_a100_is_the_fit_and_foretells_every_run() -> None:
    rows = published_passes()
    fit = fit_of(rows)
    assert A100.slope == pytest.approx(fit.price.slope, abs=5e-4)
    assert A100.channels == pytest.approx(fit.price.channels, abs=5e-2)
    predictions = [priced(row, fit) for row in rows]
    assert max(abs(one.error) for one in predictions) < 0.0125
    assert max(map(abs, gain_errors(predictions))) <= 0.0245


@pytest.mark.slow
def test_a_vocabulary_that_is_held_back_is_foretold() -> None:
    for vocab, fit, errors in held_back(published_passes()):
        assert max(map(abs, errors)) < 0.0155, (vocab, fit, errors)
