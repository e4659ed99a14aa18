"""Other schedules than 1F1B: in real Megatron-LM, and what is asked for in vain.

Stock's own interleaved schedule gives NaN over gloo, so stock's 1F1B is what all are compared with.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_vocabpar.megatron_lm.flags import FlagConfig
from megatron_vocabpar.megatron_lm.refusals import check
from tests.megatron_lm.test_doors import PLAIN
from tests.megatron_lm.test_training import FROM_WEIGHTS
from tests.megatron_lm.training import Log, pretrain, words

UNTIED = "--untie-embeddings-and-output-weights"
ITERATIONS = 6


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stock checkpoint after three iterations on one process."""
    folder = tmp_path_factory.mktemp("weights")
    pretrain("--save", str(folder), UNTIED, iterations=3)
    return folder


@pytest.fixture(scope="module")
def stock(weights: Path) -> Log:
    """Stock's 1F1B from there on."""
    return pretrain("--load", str(weights), *FROM_WEIGHTS, UNTIED, iterations=ITERATIONS, pp=2)


@pytest.mark.long
@pytest.mark.parametrize(
    ("schedule", "options", "method"),
    [
        ("interleaved", "--num-virtual-stages-per-pipeline-rank 2", "vocab-2"),
        ("interleaved", "--num-layers-per-virtual-pipeline-stage 1", "vocab-1"),
        ("interleaved", "--pipeline-model-parallel-layout Et|t|t|tL", "vocab-2"),
        ("zb-h1", "", "vocab-2"),
        ("zb-h1", "", "vocab-1"),
    ],
)
def test_trains_as_stock(weights: Path, stock: Log, schedule: str, options: str, method: str) -> None:
    flags = ("--enable-vocab-parallel", "--vocab-parallel-schedule", schedule, *words(options))
    load = ("--load", str(weights), *FROM_WEIGHTS, UNTIED)
    ours = pretrain(*load, *flags, "--vocab-parallel-method", method, iterations=ITERATIONS, pp=2)
    assert f"vocabulary parallelism: method {method}, schedule {schedule}" in ours.text
    assert len(ours.losses) == len(ours.norms) == ITERATIONS
    for name in ("losses", "norms", "evaluations"):
        np.testing.assert_allclose(getattr(ours, name), getattr(stock, name), rtol=1e-5, err_msg=name)


@pytest.mark.long
def test_interleaved_saves_and_resumes_with_overlapped_reduction(weights: Path, tmp_path: Path) -> None:
    """Twice three iterations are six, bit for bit."""
    flags = words(
        f"--enable-vocab-parallel --vocab-parallel-schedule interleaved {UNTIED} "
        "--num-virtual-stages-per-pipeline-rank 2 --overlap-grad-reduce"
    )
    sizes = {"pp": 2, "dp": 2, "iterations": ITERATIONS}
    first = ("--load", str(weights), *FROM_WEIGHTS, *flags, "--eval-iters", "0")
    straight = pretrain(*first, "--save", str(tmp_path), "--save-interval", "3", **sizes)
    again = pretrain("--load", str(tmp_path), "--ckpt-step", "3", *flags, "--eval-iters", "0", **sizes)
    assert len(again.losses) == ITERATIONS - 3
    np.testing.assert_array_equal(again.losses, straight.losses[3:])
    np.testing.assert_array_equal(again.norms, straight.norms[3:])


@pytest.mark.parametrize(
    ("schedule", "changes", "message"),
    [
        ("interleaved", {}, "interleaved: needs several model chunks per rank; give --num-virtual-stages"),
        ("zb-h1", {"transformer_impl": "transformer_engine"}, "zb-h1: splits weight gradients .* local"),
        (
            "1f1b",
            {"num_virtual_stages_per_pipeline_rank": 2},
            "they need --vocab-parallel-schedule interleaved",
        ),
        (
            "zb-h1",
            {"num_virtual_stages_per_pipeline_rank": 2, "transformer_impl": "local"},
            "they need --vocab-parallel-schedule interleaved",
        ),
    ],
)
def test_flags_that_do_not_fit_the_schedule(schedule: str, changes: dict[str, object], message: str) -> None:
    config = FlagConfig(enabled=True, method="vocab-2", schedule=schedule)
    with pytest.raises(ValueError, match=message):
        check(SimpleNamespace(**(PLAIN | changes)), config)


@pytest.mark.parametrize(
    ("schedule", "changes"),
    [
        ("interleaved", {"num_virtual_stages_per_pipeline_rank": 2}),
        ("interleaved", {"num_layers_per_virtual_pipeline_stage": 1}),
        ("interleaved", {"pipeline_model_parallel_layout": "Et|t|t|t|t|t|t|tL"}),
        ("zb-h1", {"transformer_impl": "local"}),
    ],
)
def test_flags_that_fit_the_schedule(schedule: str, changes: dict[str, object]) -> None:
    check(SimpleNamespace(**(PLAIN | changes)), FlagConfig(True, "vocab-2", schedule))
