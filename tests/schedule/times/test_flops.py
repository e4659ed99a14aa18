"""Operations of a model, against the iteration times and the MFU that the paper's authors published."""

from __future__ import annotations

import pytest

from megatron_vocabpar.schedule.times.flops import model_flops

_PAPERS_PEAK = 320e12  # Table 5's MFU takes this for the A100


@pytest.mark.parametrize(
    ("iteration_ms", "vocab_size", "mfu"), [(5900.3, 256_000, 0.5012), (5026.5, 32_000, 0.5042)]
)
def test_mfu_of_table_5_follows_from_the_published_iteration_time(
    iteration_ms: float, vocab_size: int, mfu: float
) -> None:
    flops = 128 * 2048 * model_flops(32, 3072, 2048, vocab_size)
    assert flops / (iteration_ms / 1e3) / 8 / _PAPERS_PEAK == pytest.approx(mfu, abs=5e-5)
