"""Other schedules than 1F1B: in real Megatron-LM, and what is asked for in vain.

Stock's own interleaved schedule gives NaN over gloo, so stock's 1F1B is what all are compared with.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron.core import parallel_state

from megatron_vocabpar.megatron_lm.bindings import BINDINGS
from megatron_vocabpar.megatron_lm.flag_config import FlagConfig
from megatron_vocabpar.megatron_lm.replacements import replacement_for
from megatron_vocabpar.train.core_on_cpu import megatron_on_cpu
from tests.megatron_lm.training import Log, pretrain, words
from tests.pipeline import gpt
from tests.spawn import run_ranks
from tests.support.launch_options import CHUNKS, EIGHT_LAYERS, FROM_WEIGHTS, OVERLAP, UNTIED
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
        built: the family that ``search`` builds the model for, where no other has its placement.
    """

    family: str
    method: str = "vocab-2"
    pp: int = 2
    tp: int = 1
    dp: int = 1
    setting: str = "plain"
    options: str = ""
    chunks: tuple[str, ...] = CHUNKS
    built: str = ""

    def __str__(self) -> str:
        sizes = f"pp{self.pp}-tp{self.tp}-dp{self.dp}"
        options = (*words(self.options), *(() if self.chunks == CHUNKS else self.chunks))
        return "-".join([self.family, self.method, sizes, self.setting, *options])


def by_hand(layout: str) -> tuple[str, ...]:
    return "--pipeline-model-parallel-layout", layout


EXCHANGED = "--expert-model-parallel-size 2"
CASES = (
    *(
        Case(family, method, pp)
        for family in ("v-half", "v-zb")
        for method in ("vocab-1", "vocab-2")
        for pp in (2, 4)
    ),
    Case("v-min", "vocab-1", pp=4),
    Case("search", pp=4, built="interleaved"),
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
    Case("v-half", chunks=by_hand("Ett|t|ttt|ttL")),
    Case("v-zb", "baseline", setting="odd", chunks=by_hand("Ett|tt|tt|tL")),
    Case("v-zb", "baseline", chunks=by_hand("Ettttt||tt|tL")),
    Case("zb-h1", "vocab-1", pp=4, setting="odd", chunks=by_hand("Et|ttt|tt|tL")),
    Case("v-half", "baseline", pp=4, setting="odd", chunks=by_hand("Et|t|t|t|t|t|t|L")),
    Case("v-zb", dp=2, setting="experts", options=EXCHANGED, chunks=by_hand("Et|tt|ttt|ttL")),
    Case("zb-h1", "baseline", dp=2, setting="experts", options=EXCHANGED, chunks=by_hand("Ettttt|tttL")),
)


def train(setting: str, *options: str, **sizes: int) -> Log:
    known = setting if setting in ("tied", "experts", "odd") else "plain"
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
    assert f"method {case.method}, family {case.built or case.family}\n" in ours.text
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
