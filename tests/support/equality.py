"""Training through the executor beside one unsharded stock model."""

from __future__ import annotations

from functools import cache

import numpy as np

from tests.pipeline.gpt import Case, Result, run

# Adam amplifies rounding: stock whose first weights are disturbed by 1e-7 ends up to 2.4e-5 away.
DRIFT = 3.0


@cache
def reference(case: Case) -> Result:
    (result,) = run(case.unsharded())
    return result


def check(
    case: Case, tolerance: float = 1e-5, drift: float = DRIFT, expected: Result | None = None
) -> list[Result]:
    """Losses, evaluation losses, first gradients and final weights of all ranks equal the reference's."""
    expected = expected or reference(case)
    results = run(case, expected)
    reporting = [result for result in results if result.reports_loss]
    combine = np.sum if case.loss.endswith("tokens") else np.mean
    losses = combine([result.losses for result in reporting], axis=0) / (1 if combine is np.mean else case.tp)
    np.testing.assert_allclose(losses, expected.losses, rtol=tolerance)
    for result in reporting:
        np.testing.assert_allclose(result.evaluation, result.losses, rtol=1e-6)
    for kind, allowed in (("first_gradients", tolerance), ("weights", drift * tolerance)):
        covered = set()
        for rank, result in enumerate(results):
            for name, difference in getattr(result, kind).items():
                assert difference <= allowed, f"{case}: rank {rank}, {kind} of {name}: {difference}"
                covered.add(name)
        assert covered == set(getattr(expected, kind)), case
    return reporting


def layers(pp: int) -> int:
    return 3 if pp == 3 else 4
