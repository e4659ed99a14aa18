"""``vocabpar doctor --gpu`` on emulated GPUs: every row is answered.

The sizes are those of the doctor's own tests: times are those of a model here, and
the large ones take minutes.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_vocabpar.doctor.checks import checks
from megatron_vocabpar.doctor.guard import run, run_all
from megatron_vocabpar.doctor.result import Check
from tests.support.tiny_checks import TINY


@pytest.mark.timeout(2400)
def test_every_row_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VOCABPAR_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("EMULATED_WAITS", raising=False)
    every = checks("cuda", 2, str(tmp_path), TINY)
    found = list(run_all(every, print))
    assert len(found) == len(every)
    for result in found:
        without_triton = result.check.startswith(("row kernels", "kernel", "products beside a kernel"))
        assert result.outcome == ("not run" if without_triton else "ok"), result


def test_products_run_beside_a_kernel_that_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's kernel is compiled and launched; here it ends at once, so what it costs means nothing."""
    monkeypatch.setenv("EMULATED_TRITON", "1")
    name = "products beside a kernel that waits"
    (check,) = [each for each in checks("cuda", 2, str(tmp_path), TINY) if each.name == name]
    assert run(check).outcome == "ok"


OVERLAPS = {
    "copy_beside_products": {"device": "cuda"},
    "all_reduce_beside_products": {"device": "cuda", "processes": 2},
    "all_to_all_beside_products": {"device": "cuda", "processes": 2},
}


@pytest.mark.parametrize("name", OVERLAPS)
@pytest.mark.parametrize(
    ("module", "blocking", "hidden"),
    [
        ("megatron_vocabpar.doctor.overlap", "0", range(90, 101)),
        ("tests.cuda_emulated.one_stream", "0", range(1)),
        ("megatron_vocabpar.doctor.overlap", "1", range(1)),
    ],
    ids=["beside", "in one stream", "the host waits"],
)
def test_overlap_is_that_of_streams(
    name: str, module: str, blocking: str, hidden: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The figure is of streams, not of the host's processors; without a side stream nothing is hidden."""
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", blocking)
    result = run(Check(name, f"{module}:{name}", {**OVERLAPS[name], "mib": 1, "size": 64}, 240))
    assert result.outcome == ("ok" if hidden[-1] else "failed"), result
    assert int(re.search(r"(-?\d+) % hidden", result.figure)[1]) in hidden
