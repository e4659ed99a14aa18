"""A check that raises, crashes or hangs is one failed row, with the reason; the rest go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megatron_vocabpar.doctor.check_runs import Check, Finding, run_all
from tests.doctor import fake_checks


def check(function: Callable[..., Finding], timeout_s: float = 120, **rest: Any) -> Check:
    return Check(function.__name__, function, {}, timeout_s, **rest)


@pytest.mark.slow
def test_whatever_a_check_does_the_rest_go_on() -> None:
    said: list[str] = []
    every = [
        check(fake_checks.raises),
        check(fake_checks.is_killed),
        check(fake_checks.hangs, timeout_s=4),
        check(fake_checks.of_rank, after="hangs"),
        check(fake_checks.of_rank, ranks=2),
    ]
    found = list(run_all(every, said.append))
    assert said == [each.name for each in every]
    assert [(each.outcome, each.reason) for each in found] == [
        ("failed", "rank 0 raised RuntimeError: CUDA error: an illegal memory access was encountered"),
        ("failed", "rank 0 was killed by signal 11, SIGSEGV"),
        ("failed", "the processes did not end within 4 s"),
        ("not run", "hangs: failed"),
        ("ok", ""),
    ]
    assert any("in raises" in line for line in found[0].log)
    assert found[1].log[0] == "said before"
    assert any("Segmentation fault" in line for line in found[1].log)
    assert found[-1].log == ()
    assert found[-1].seconds > 0
