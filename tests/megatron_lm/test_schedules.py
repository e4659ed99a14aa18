"""Other schedules than 1F1B: in real Megatron-LM, and what is asked for in vain.

Stock's own interleaved schedule gives NaN over gloo, so stock's 1F1B is what all are compared with.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from megatron.core import parallel_state

from megatron_vocabpar.megatron_lm.bindings import BINDINGS
from megatron_vocabpar.megatron_lm.flag_config import FlagConfig
from megatron_vocabpar.megatron_lm.replacements import replacement_for
from megatron_vocabpar.megatron_lm.rules.check import check
from megatron_vocabpar.train.cpu import megatron_on_cpu
from tests.megatron_lm.training import Log, pretrain, words
from tests.pipeline import gpt
from tests.spawn import run_ranks
from tests.support.launch_options import CHUNKS, EIGHT_LAYERS, FROM_WEIGHTS, OVERLAP, UNTIED
from tests.support.megatron_parser import PLAIN
from tests.support.stock_weights import SETTINGS, weights

ITERATIONS = 12


@dataclass(frozen=True)
class Case:
    """One training with our flags.

    Attributes:
        family, method: ours.
        pp, tp, dp: sizes.
        setting: a key of ``SETTINGS``.
        options: further ones, that do not change what stock computes.
        chunks: how Megatron is asked for model chunks.
    """

    family: str
    method: str = "vocab-2"
    pp: int = 2
    tp: int = 1
    dp: int = 1
    setting: str = "plain"
    options: str = ""
    chunks: tuple[str, ...] = CHUNKS

    def __str__(self) -> str:
        sizes = f"pp{self.pp}-tp{self.tp}-dp{self.dp}"
        options = (*words(self.options), *(() if self.chunks == CHUNKS else self.chunks))
        return "-".join([self.family, self.method, sizes, self.setting, *options])


CASES = (
    *(
        Case(family, method, pp)
        for family in ("v-half", "v-zb")
        for method in ("vocab-1", "vocab-2")
        for pp in (2, 4)
    ),
    Case("v-min", "vocab-1", pp=4),
    Case("search", pp=4),
    Case("search", chunks=()),
    Case("interleaved"),
    Case("interleaved", "vocab-1", chunks=words("--num-layers-per-virtual-pipeline-stage 1")),
    Case("interleaved", "baseline"),
    Case("zb-h1", "vocab-1", chunks=()),
    Case("zb-h1", chunks=()),
    Case("v-half", "naive"),
    Case("v-min", "interlaced"),
    Case("v-half", "baseline", pp=4, options="--micro-batch-size 1"),
    Case("v-zb", "redis", options="--final-stage-num-layers 1"),
    Case("v-half", setting="tied"),
    Case("v-zb", "baseline", setting="tied"),
    Case("search", "baseline", setting="tied", chunks=()),
    Case("v-half", "vocab-1", tp=2),
    Case("v-zb", dp=2, options=" ".join(OVERLAP)),
    Case("zb-h1", dp=2, setting="tied", chunks=(), options=f"{' '.join(OVERLAP)} --ddp-bucket-size 20000"),
    Case("v-half", "baseline", tp=2, dp=2, setting="tied", options=" ".join(OVERLAP)),
    Case("v-half", "vocab-1", setting="experts"),
    Case("v-zb", pp=4, setting="few microbatches, per-token loss"),
    Case("v-min", "baseline", pp=4, setting="few microbatches, per-token loss"),
    Case("v-half", setting="batch ramp-up", options="--decoder-first-pipeline-num-layers 2"),
    Case("v-half", chunks=words("--pipeline-model-parallel-layout Ett|t|ttt|ttL")),
)


def train(setting: str, *options: str, **sizes: int) -> Log:
    known = setting if setting in ("tied", "experts") else "plain"
    load = ("--load", str(weights(known)), *FROM_WEIGHTS)
    return pretrain(*load, *EIGHT_LAYERS, *SETTINGS[setting], *options, iterations=ITERATIONS, **sizes)


stock = cache(train)


def vocab_flags(case: Case) -> tuple[str, ...]:
    flags = ("--vocab-parallel-family", case.family, "--vocab-parallel-method", case.method)
    return ("--enable-vocab-parallel", *flags, *case.chunks, *words(case.options))


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=str)
def test_trains_as_stock(case: Case) -> None:
    expected = stock(case.setting)
    ours = train(case.setting, *vocab_flags(case), pp=case.pp, tp=case.tp, dp=case.dp)
    assert f"method {case.method}, family {case.family}" in ours.text
    assert len(ours.losses) == len(ours.norms) == len(expected.losses) >= 7
    assert len(ours.evaluations) > 0
    for name in ("losses", "norms", "evaluations"):
        np.testing.assert_allclose(getattr(ours, name), getattr(expected, name), rtol=1e-5, err_msg=name)


@pytest.mark.long
@pytest.mark.parametrize("family", ["interleaved", "v-half", "v-zb"])
def test_saves_and_resumes_with_overlapped_reduction(family: str, tmp_path: Path) -> None:
    """Twice three iterations are six, bit for bit."""
    case = Case(family, options="--overlap-grad-reduce --eval-iters 0")
    options, sizes = (*UNTIED, *vocab_flags(case)), {"pp": 2, "dp": 2, "iterations": 6}
    straight = pretrain(*options, "--save", str(tmp_path), "--save-interval", "3", **sizes)
    again = pretrain(*options, "--load", str(tmp_path), "--ckpt-step", "3", **sizes)
    assert len(again.losses) == 3
    np.testing.assert_array_equal(again.losses, straight.losses[3:])
    np.testing.assert_array_equal(again.norms, straight.norms[3:])


TWO = {"num_virtual_stages_per_pipeline_rank": 2, "transformer_impl": "local"}
TE = {"transformer_impl": "transformer_engine"}
TWO_RANKS = TWO | {"pipeline_model_parallel_size": 2}
SEPARATE_HEADS = {"mtp_num_layers": 1, "pipeline_model_parallel_layout": "Et|t|tm|L"}
SEPARATE_IN_CHUNKS = SEPARATE_HEADS | {"pipeline_model_parallel_layout": "Et|t|t|t|t|t|tm|L"}
DOCUMENTS = {"dataloader_inter_document_masking": True}
FORMER = {"hybrid_layer_pattern": None, "transformer_impl": "local", "pipeline_model_parallel_size": 2}
"""Beside ``--hybrid-override-pattern``, in versions that have both names."""


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("interleaved", {}, "interleaved: needs 2 model chunks per rank, not 1; give --num-virtual-stages"),
        (
            "v-half",
            {"num_virtual_stages_per_pipeline_rank": 3},
            r"needs 2 .* not 3; .* one of interleaved, 1f1b-overlap\n",
        ),
        ("1f1b", TWO, "1f1b: needs 1 model chunks per rank, not 2; .* interleaved, v-half, v-min, v-zb"),
        ("zb-h1", TWO, "zb-h1: needs 1 model chunks per rank, not 2"),
        (
            "search",
            TWO | {"pipeline_model_parallel_size": 1},
            "give --pipeline-model-parallel-size of at least 2",
        ),
        ("interleaved", TWO | {"pipeline_model_parallel_size": 1}, "model-parallel-size of at least 2"),
        ("interleaved", {"pipeline_model_parallel_layout": "Et|t|tL"}, "they give 3/4 model chunks on each"),
        ("1f1b", {"hybrid_layer_pattern": "*-|*-|*-/*-"}, "they give 3/4 model chunks on each"),
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
        (
            "v-half",
            FORMER | {"hybrid_layer_pattern": "*-*-"},
            r"needs 2 model chunks per rank, not 1; write 3 \| into --hybrid-layer-pattern, or use one of",
        ),
        ("1f1b", FORMER | {"hybrid_override_pattern": "*-|*-|*-|*-"}, r"not 2; write 1 \| into --hybrid-lay"),
        (
            "v-zb",
            {"pipeline_model_parallel_layout": "Et|t|t|tL"},
            r"not 1; write 7 \| into --pipeline-model-",
        ),
        ("v-half", TWO | SEPARATE_IN_CHUNKS, "m before the last stage of .* v-half has .* use 1f1b, zb-h1"),
        ("1f1b", DOCUMENTS, "--dataloader-inter-document-masking: all stages .* use 2 stages of one"),
        ("v-half", TWO_RANKS | DOCUMENTS, "--dataloader-inter-document-masking: all stages"),
        (
            "interleaved",
            TWO_RANKS | {"iterations_to_skip": [3, 4]},
            r"--iterations-to-skip.*\(3 4\): .* on 2 st",
        ),
        (
            "1f1b",
            {"iterations_to_skip": [3]},
            r"--iterations-to-skip.*\(3\): .* use 1f1b or zb-h1 on 2 stages at",
        ),
        (
            "1f1b",
            {"result_rejected_tracker_filename": "a"},
            r"-rejected-tracker-filename \(a\): Megatron skips",
        ),
        (
            "v-half",
            TWO | {"heterogeneous_layers_config_path": "a.json"},
            "-config-path: .* use 1f1b or zb-h1",
        ),
        ("v-half", TWO | {"heterogeneous_layers_config_encoded_json": "{}"}, "one model chunk a rank alone;"),
        ("zb-h1", {"transformer_impl": "inference_optimized"}, "zb-h1 splits weight gradients .* local"),
        ("zb-h1", TE | {"tp_comm_overlap": True}, "--tp-comm-overlap: .* --disable-tp-comm-bulk-wgrad"),
    ],
)
def test_flags_that_do_not_fit_the_schedule(family: str, changes: dict[str, object], message: str) -> None:
    config = FlagConfig(enabled=True, method="vocab-2", family=family)
    with pytest.raises(ValueError, match=message):
        check(SimpleNamespace(**(PLAIN | changes)), config)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"hybrid_layer_pattern": "*|*|*|*|*|*|*|*/*"}, "whole .* v-half have labels"),
        ({"mtp_num_layers": 1, "mtp_detach_heads": True}, "--mtp-detach-heads: .* computes the losses"),
        ({"mtp_num_layers": 1, "position_embedding_type": "learned_absolute"}, "a copy of its own"),
    ],
)
def test_heads_of_whole_layers_in_a_v(asked: dict[str, object], message: str) -> None:
    config = FlagConfig(enabled=True, method="baseline", family="v-half")
    with pytest.raises(ValueError, match=message):
        check(SimpleNamespace(**(PLAIN | TWO | asked)), config)


def test_functions_that_choose_layers_see_the_stage_of_the_chunk() -> None:
    """In a V of two ranks chunk 1 of rank 0 is stage 3, which rank 1 has in Megatron's placement."""
    assert run_ranks(2, _ranks_seen) == [{(0, 1)}, {(1, 0)}]


def _ranks_seen(rank: int) -> set[tuple[int, ...]]:
    """By function, the pipeline rank that it is shown for either chunk of this rank."""
    config = FlagConfig(enabled=True, method="vocab-2", family="v-half")
    functions = [binding for binding in BINDINGS if binding.name.endswith("_spec")]
    assert len(functions) == 3

    def original(*_: Any, **__: Any) -> int:
        return parallel_state.get_pipeline_model_parallel_rank()

    with megatron_on_cpu(), gpt.parallel_groups(gpt.Case(pp=2)):
        parallel_state.set_virtual_pipeline_model_parallel_world_size(2)
        seen = [replacement_for(binding, original, config) for binding in functions]
        return {tuple(function(None, vp_stage=chunk) for chunk in (0, 1)) for function in seen}


def test_a_whole_output_layer_defers_nothing() -> None:
    args = SimpleNamespace(**(PLAIN | TWO_RANKS | {"defer_embedding_wgrad_compute": True}))
    check(args, FlagConfig(enabled=True, method="vocab-2", family="interleaved"))
    with pytest.raises(ValueError, match="--defer-embedding-wgrad-compute: Megatron's own schedule"):
        check(args, FlagConfig(enabled=True, method="baseline", family="interleaved"))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("interleaved", {"num_virtual_stages_per_pipeline_rank": 2}),
        ("interleaved", {"num_layers_per_virtual_pipeline_stage": 1, "num_layers": 8}),
        ("interleaved", {"pipeline_model_parallel_layout": "Et|t|t|t|t|t|t|tL"}),
        ("1f1b", {"num_layers": 7, "decoder_first_pipeline_num_layers": 1}),
        ("1f1b", {"hybrid_layer_pattern": "*-|*-|M-|*E/*-/*-"}),
        ("1f1b", {"hybrid_layer_pattern": "*-*-*-*-", "num_layers": 8}),
        ("v-half", {"hybrid_layer_pattern": "*|-|*|-|*|-|*|-/*-", "transformer_impl": "local"}),
        ("v-half", TWO | {"mtp_num_layers": 1, "pipeline_model_parallel_layout": "Et|t|t|t|t|t|t|tmL"}),
        ("1f1b", SEPARATE_HEADS),
        ("interleaved", TWO | SEPARATE_IN_CHUNKS),
        ("zb-h1", {"transformer_impl": "local"}),
        ("zb-h1", TE),
        ("v-half", TWO | {"num_layers": 16}),
        ("v-half", FORMER | {"hybrid_override_pattern": "*-|*-|*-|*-/*-"}),
        ("v-half", TWO | {"reset_attention_mask": True, "create_attention_mask_in_dataloader": True}),
        ("v-half", TWO | {"experimental_attention_variant": "dsa"}),
        ("1f1b", DOCUMENTS | {"pipeline_model_parallel_size": 2}),
        ("v-half", TWO | DOCUMENTS | {"sft": True}),
        ("1f1b", {"heterogeneous_layers_config_path": "a.json"}),
        ("1f1b", {"iterations_to_skip": [3], "pipeline_model_parallel_size": 2}),
        ("1f1b", {"iterations_to_skip": [3], "sft": True}),
        ("interleaved", TWO | {"iterations_to_skip": []}),
        ("search", TWO),
    ],
)
def test_flags_that_fit_the_schedule(family: str, changes: dict[str, object]) -> None:
    check(SimpleNamespace(**(PLAIN | changes)), FlagConfig(True, "vocab-2", family))
