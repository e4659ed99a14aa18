"""Any loss of the tokens' losses: training equals that of one unsharded stock model with autograd."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from megatron_vocabpar.pipeline.options import VocabOptions
from megatron_vocabpar.schedule.make.generate import generate
from tests.cases import covering, rest_is_slow
from tests.pipeline.gpt import Case, case_of
from tests.pipeline.losses import LOSSES
from tests.support import equality

Once = partial(Case, micro_batch_size=4, steps=1)
# Adam amplifies rounding more under these losses: a key's bias has gradients of nothing else.
check = partial(equality.check, drift=10.0)

WITH_ENTROPY: dict[str, Any] = {
    "loss": "entropy",
    "output_options": VocabOptions(metrics=("entropy-gradient",)),
}


@covering(
    ("method", ["vocab-1", "vocab-2"]),
    ("pp", [1, 2, 3, 4]),
    ("loss", [name for name in LOSSES if name != "entropy"]),
    ("tied", [False, True]),
    further={"pp": [4]},
)
def test_any_loss_trains_as_stock(method: str, pp: int, loss: str, tied: bool) -> None:
    check_with_metrics(Once(method=method, pp=pp, m=pp + 1, loss=loss, tied=tied, layers=equality.layers(pp)))


def check_with_metrics(case: Case) -> None:
    *_, last = check(case)
    expected = equality.reference(case).metrics
    assert [row.keys() for row in last.metrics] == [row.keys() for row in expected]
    for found, row in zip(last.metrics, expected, strict=True):
        np.testing.assert_allclose(list(found.values()), list(row.values()), rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("method", "pp", "options"),
    [
        ("vocab-2", 3, {"labels": "ignored"}),
        *rest_is_slow(
            [
                ("interlaced", 2, {}),
                *((f"vocab-{k}", pp, {"tied": pp % 2 == 0}) for k in (1, 2) for pp in (1, 2, 3, 4)),
                ("vocab-1", 2, {"tp": 2, "loss_scale": 65536.0}),
                ("vocab-2", 2, {"labels": "one masked microbatch", "vocab_size": 33}),
            ]
        ),
    ],
)
def test_a_loss_may_depend_on_entropies(method: str, pp: int, options: dict[str, Any]) -> None:
    check_with_metrics(
        Once(method=method, pp=pp, m=pp + 1, layers=equality.layers(pp), **WITH_ENTROPY, **options)
    )


@pytest.mark.parametrize(
    ("method", "pp", "loss"),
    [
        ("naive", 3, "ppo"),
        *rest_is_slow([("interlaced", 2, "grpo"), ("baseline", 2, "dpo"), ("redis", 2, "ppo")]),
    ],
)
def test_other_methods(method: str, pp: int, loss: str) -> None:
    check(Once(method=method, pp=pp, m=3, loss=loss, layers=equality.layers(pp)))


@pytest.mark.parametrize(
    ("family", "method", "p", "loss", "sizes"),
    [
        ("v-half", "vocab-2", 3, "grpo", {"dp": 1}),
        *rest_is_slow(
            [
                ("interleaved", "vocab-2", 2, "ppo", {"tp": 2, "tied": True}),
                ("zb-h1", "vocab-1", 2, "focal", {"dp": 2, "overlap_grad_reduce": True}),
                ("v-half", "vocab-1", 2, "dpo", {"tp": 2}),
                ("v-min", "vocab-1", 4, "grpo", {}),
                ("v-zb", "vocab-2", 2, "ppo", {"dp": 2, "overlap_grad_reduce": True}),
                ("v-zb", "naive", 2, "ppo", {}),
                ("v-half", "interlaced", 2, "ppo", {}),
                ("v-half", "baseline", 2, "ppo", {"tp": 2}),
                ("v-zb", "baseline", 3, "grpo", {"dp": 2}),
                ("search", "vocab-2", 3, "focal", {}),
            ]
        ),
    ],
)
def test_in_every_family(family: str, method: str, p: int, loss: str, sizes: dict[str, Any]) -> None:
    """In V shapes the loss function is on another rank than the last stage."""
    schedule = generate(method, p, p + 2, family=family)
    check(case_of(schedule, loss=loss, micro_batch_size=4, steps=1, **sizes))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"loss": "ppo-tokens", "calculate_per_token_loss": True, "dp": 2, "overlap_grad_reduce": True},
        {"loss": "grpo", "tp": 2, "loss_scale": 65536.0},
        {"loss": "ppo", "tp": 2, "dp": 2, "method": "vocab-1"},
        {"tp": 2, "dp": 2, "overlap_grad_reduce": True, **WITH_ENTROPY},
        {"loss": "ppo", "labels": "ignored"},
        {"loss": "ppo", "labels": "one masked microbatch", "method": "vocab-1"},
        {"loss": "focal", "output_options": VocabOptions(recompute=True), "method": "vocab-1"},
        {"loss": "focal", "output_options": VocabOptions(recompute=True)},
        {"loss": "grpo", "output_options": VocabOptions(invariant=True)},
        {"loss": "grpo", "output_options": VocabOptions(invariant=True), "method": "vocab-1"},
        {"loss": "per-microbatch"},
        {"loss": "squared", "vocab_size": 33, "pp": 4, "layers": 4},
    ],
)
def test_with_everything_else(options: dict[str, Any]) -> None:
    check(Once(**{"pp": 2, "m": 3, **options}))
