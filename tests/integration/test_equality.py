"""Training through the executor equals one unsharded stock megatron-core model, from the same weights."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from tests.integration.gpt import Case, Result, train
from tests.spawn import run_ranks

METHODS = ("vocab-1", "vocab-2", "naive")


@cache
def reference(case: Case) -> Result:
    return run_ranks(1, train, case.unsharded())[0]


def check(case: Case, tolerance: float = 1e-5) -> None:
    """Losses, evaluation losses, first gradients and final weights of all ranks equal the reference's."""
    expected = reference(case)
    results = run_ranks(case.pp * case.tp * case.dp, train, case, expected)
    reporting = [result for result in results if result.reports_loss]
    combine = np.mean if case.loss == "per-microbatch" else np.sum
    losses = combine([result.losses for result in reporting], axis=0) / (1 if combine is np.mean else case.tp)
    np.testing.assert_allclose(losses, expected.losses, rtol=tolerance)
    for result in reporting:
        np.testing.assert_allclose(result.evaluation, result.losses, rtol=1e-6)
    for kind in ("first_gradients", "weights"):
        covered = set()
        for rank, result in enumerate(results):
            for name, difference in getattr(result, kind).items():
                assert difference <= tolerance, f"{case}: rank {rank}, {kind} of {name}: {difference}"
                covered.add(name)
        assert covered == set(getattr(expected, kind)), case


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("pp", [1, 2, 3, 4])
def test_small(method: str, pp: int) -> None:
    check(Case(method=method, pp=pp, m=3, layers=12 if pp == 3 else 4))
