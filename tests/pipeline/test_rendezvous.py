"""Every family trains where sends and receives block the host until the peer has posted the matching call.

That is what NCCL does when it makes a connection, and what it may do whenever its queues are full. A program
in which ranks post their calls in orders that do not fit together hangs; gloo alone would not show it.
"""

from __future__ import annotations

import numpy as np
import pytest

from megatron_vocabpar.schedule.make.generate import generate
from tests.pipeline.gpt import Case, Result, case_of, train
from tests.runtime.rendezvous import rendezvous
from tests.spawn import run_ranks
from tests.support.equality import reference

FAMILIES = [
    ("vocab-1", "1f1b"),
    ("vocab-2", "1f1b"),
    ("naive", "1f1b"),
    ("interlaced", "1f1b"),
    ("vocab-1", "interleaved"),
    ("vocab-2", "v-half"),
    ("vocab-1", "v-min"),
    ("vocab-2", "v-zb"),
    ("vocab-1", "zb-h1"),
]
IN_EVERY_RUN = [("vocab-2", "1f1b"), ("vocab-1", "interleaved"), ("vocab-1", "zb-h1")]


def _train_all(rank: int, cases: list[tuple[Case, Result]]) -> list[Result]:
    with rendezvous():
        return [train(rank, case, expected) for case, expected in cases]


@pytest.mark.parametrize(
    ("p", "m", "families"),
    [
        pytest.param(2, 2, IN_EVERY_RUN, id="2-2-in every run"),
        *(
            pytest.param(p, m, FAMILIES, id=f"{p}-{m}", marks=pytest.mark.slow)
            for p, m in [(2, 1), (2, 2), (4, 1), (4, 2), (4, 4)]
        ),
    ],
)
def test_every_family_trains(p: int, m: int, families: list[tuple[str, str]]) -> None:
    cases = [case_of(generate(method, p, m, family=family), steps=1) for method, family in families]
    references = [reference(case.unsharded()) for case in cases]
    ranks = run_ranks(p, _train_all, list(zip(cases, references, strict=True)))
    for case, expected, results in zip(cases, references, zip(*ranks, strict=True), strict=True):
        reporting = [result for result in results if result.reports_loss]
        np.testing.assert_allclose(reporting[0].losses, expected.losses, rtol=1e-5, err_msg=str(case))
        for result in results:
            assert max(result.first_gradients.values()) <= 1e-5, case
