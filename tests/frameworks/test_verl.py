"""verl's engine with our schedules and with Megatron's own: the same results, loss and gradients."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.frameworks import bridge_imports
from tests.frameworks.compare import check_gradients, check_metrics
from tests.frameworks.hugging_face import check_weights, write_checkpoint
from tests.frameworks.verl_step import PROMPTS, RESPONSES, Case, changed, step
from tests.spawn import run_ranks

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(3200),
    pytest.mark.skipif("VERL_PATH" not in os.environ, reason="set VERL_PATH"),
]
_READ = torch.cat([torch.arange(p + r) >= p for p, r in zip(PROMPTS, RESPONSES, strict=True)]).roll(-1)
"""The tokens of responses, at the positions that predict them."""

CASES = {
    "mbridge": Case("sft_loss", vanilla=True),
    "mbridge, tied": Case(tied=True, vanilla=True),
    "mbridge, entropy": Case(entropy_coeff=0.3, vanilla=True),
    "sft": Case("sft_loss"),
    "tied": Case(tied=True),
    "entropy, reference": Case(entropy_coeff=0.3, reference=True),
    "interleaved": Case(chunks=2),
    "lora": Case(lora=True),
    "experts": Case(kind="qwen3_moe", experts=2),
}


def _run(case: Case, ours: bool, folder: Path, load: Path | None = None, save: Path | None = None) -> Any:
    if "megatron.core" in sys.modules:
        pytest.skip("megatron is imported already: run this file in a session of its own")
    if case.vanilla and importlib.util.find_spec("mbridge") is None:
        pytest.skip("install mbridge")
    if not (case.vanilla or bridge_imports.here()):
        pytest.skip("set BRIDGE_PATH, MEGATRON_LM_PATH and TRANSFORMER_ENGINE_PATH")
    found = run_ranks(2 * case.experts, step, case, ours, folder, load, save, fresh=True, timeout=1500)
    return changed(found, np.ndarray, torch.from_numpy)


def _write(case: Case, folder: Path) -> None:
    write_checkpoint(folder, case.tied, case.kind)
    if case.reference:
        (folder / "reference").mkdir()
        write_checkpoint(folder / "reference", case.tied, case.kind, layers=2)


def _last(ranks: list[Any]) -> list[Any]:
    """Those of the loss stage: only they have results."""
    assert all(rank["results"] == {} for rank in ranks[: len(ranks) // 2])
    return ranks[len(ranks) // 2 :]


def _of_all(ranks: list[Any], name: str) -> list[Any]:
    return [rank[name] for rank in ranks]


@pytest.mark.parametrize("name", CASES)
def test_a_step_equals_stock(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    _write(case, tmp_path)
    stock = _run(case, False, tmp_path)
    ours = _run(case, True, tmp_path)
    assert _of_all(ours, "rows") == [[11, 12, 11, 12]] * len(ours)  # response tokens alone
    for mine, theirs in zip(_last(ours), _last(stock), strict=True):
        assert mine["results"].keys() == theirs["results"].keys() == {"log_probs", "entropy"}
        for number, values in theirs["results"].items():
            torch.testing.assert_close(mine["results"][number][_READ], values[_READ], rtol=1e-5, atol=1e-5)
            assert mine["results"][number][~_READ].isnan().all()
        check_metrics(mine["metrics"], theirs["metrics"])
    check_gradients(_of_all(ours, "gradients"), _of_all(stock, "gradients"))
    check_weights(_of_all(ours, "weights"), _of_all(stock, "weights"), tmp_path, frozen=case.lora)


def test_in_16_bits_it_is_as_near_as_stock(tmp_path: Path) -> None:
    """Both beside stock in 32: by norm, ours may be off by half more."""
    case = Case(entropy_coeff=0.3)
    _write(case, tmp_path)
    exact = _run(case, False, tmp_path)
    stock, ours = (_run(Case(entropy_coeff=0.3, dtype="bfloat16"), door, tmp_path) for door in (False, True))

    def numbers(ranks: list[Any]) -> dict[str, torch.Tensor]:
        results = {key: value[_READ] for key, value in _last(ranks)[0]["results"].items()}
        return results | {f"{key} after": value for key, value in ranks[0]["weights"][1].items()}

    for name, right in numbers(exact).items():
        off, stocks = (float((numbers(ranks)[name].float() - right).norm()) for ranks in (ours, stock))
        assert off <= 1.5 * stocks + 1e-6, f"{name}: {off:.2e}, stock {stocks:.2e}"


def test_checkpoints_of_verls_own_go_both_ways(tmp_path: Path) -> None:
    """A second update follows each: the optimizer goes on, too."""
    case = Case(entropy_coeff=0.3)
    _write(case, tmp_path)
    for wrote in (True, False):
        saved = tmp_path / f"saved by {'ours' if wrote else 'stock'}"
        on = _run(case, wrote, tmp_path, save=saved)
        loaded = _run(case, not wrote, tmp_path, load=saved)
        for one, other in zip(_of_all(on, "weights"), _of_all(loaded, "weights"), strict=True):
            for name, weight in one[-2].items():
                assert torch.equal(other[0][name], weight), name
                torch.testing.assert_close(other[1][name], one[-1][name], rtol=1e-5, atol=1e-5)
