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


TWO = {"num_virtual_stages_per_pipeline_rank": 2, "transformer_impl": "local"}
TE = {"transformer_impl": "transformer_engine"}


@pytest.mark.parametrize(
    ("schedule", "changes", "message"),
    [
        ("interleaved", {}, "interleaved: needs 2 model chunks per rank, not 1; give --num-virtual-stages"),
        ("v-half", {"num_virtual_stages_per_pipeline_rank": 3}, r"needs 2 .* not 3; .* one of interleaved\n"),
        ("1f1b", TWO, "1f1b: needs 1 model chunks per rank, not 2; .* interleaved, v-half, v-min, v-zb"),
        ("zb-h1", TWO, "zb-h1: needs 1 model chunks per rank, not 2"),
        ("search", TWO | {"pipeline_model_parallel_size": 1}, "pipeline-model-parallel-size of at least 2"),
        ("interleaved", TWO | {"pipeline_model_parallel_size": 1}, "model-parallel-size of at least 2"),
        ("interleaved", {"pipeline_model_parallel_layout": "Et|t|tL"}, "they give 3/4 model chunks on each"),
        (
            "1f1b",
            {"num_layers": 6},
            "--num-layers 6: 6 layers do not divide into 1 model chunks on each of 4",
        ),
        ("v-zb", TWO | {"num_layers": 12}, "12 layers do not divide into 2 model chunks on each of 4 ranks"),
        ("v-zb", TWO | {"num_layers": 8, "decoder_first_pipeline_num_layers": 1}, "7 layers do not divide"),
        (
            "v-min",
            TWO | {"pipeline_model_parallel_size": 2, "overlap_p2p_comm": False},
            "--no-overlap-p2p-communication: Megatron refuses it",
        ),
        ("v-half", TWO | {"experimental_attention_variant": "dsa"}, "does not place its layers"),
        ("zb-h1", {"transformer_impl": "inference_optimized"}, "zb-h1: splits weight gradients .* local"),
        ("zb-h1", TE | {"overlap_grad_reduce": True}, "after --overlap-grad-reduce would reduce"),
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
        ("interleaved", {"num_layers_per_virtual_pipeline_stage": 1, "num_layers": 8}),
        ("interleaved", {"pipeline_model_parallel_layout": "Et|t|t|t|t|t|t|tL"}),
        ("1f1b", {"num_layers": 7, "decoder_first_pipeline_num_layers": 1}),
        ("zb-h1", {"transformer_impl": "local"}),
        ("zb-h1", TE),
        ("v-half", TWO | {"num_layers": 16}),
        ("search", TWO),
    ],
)
def test_flags_that_fit_the_schedule(schedule: str, changes: dict[str, object]) -> None:
    check(SimpleNamespace(**(PLAIN | changes)), FlagConfig(True, "vocab-2", schedule))
