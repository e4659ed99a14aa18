"""``--overlap-moe-expert-parallel-comm`` with schedules of pairs: beside stock with the same flag, refused.

Stock runs it without a pipeline, F of a microbatch beside B of the one before: its interleaved schedule gives
NaN over gloo.
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_vocabpar.megatron_lm.flag_config import FlagConfig
from megatron_vocabpar.megatron_lm.flags import ENABLE, OVERLAP, config_from_argv
from megatron_vocabpar.megatron_lm.kept_plan import PLAN_FILE
from megatron_vocabpar.megatron_lm.replacements import leave_to_w
from megatron_vocabpar.megatron_lm.rules.check import check
from megatron_vocabpar.megatron_lm.rules.flag_rules import DELAY
from megatron_vocabpar.schedule.serialize import plan_from_json
from megatron_vocabpar.schedule.times.costs import PassCosts
from tests.megatron_lm.training import Log, is_since, pretrain, words
from tests.megatron_lm.with_slow_exchange import ALONE_S, TOGETHER_S
from tests.support.launch_options import FROM_WEIGHTS
from tests.support.megatron_parser import PLAIN
from tests.support.rule_cases import PAIRED, TE

IN_FLOAT32 = Path(__file__).with_name("with_fp32_plans.py")
MODEL = words(
    "--num-layers 8 --untie-embeddings-and-output-weights --num-experts 4 --moe-router-topk 2 "
    "--moe-aux-loss-coeff 1e-2 --disable-bias-linear --moe-token-dispatcher-type alltoall "
    "--expert-model-parallel-size 2 --bf16 --global-batch-size 24"
)
OURS = words(
    "--enable-vocab-parallel --num-virtual-stages-per-pipeline-rank 2 --vocab-parallel-profile-iterations 0"
)
LAYOUT = "--pipeline-model-parallel-layout"
HEADS = "--mtp-num-layers 1 --position-embedding-type rope"
FAMILIES = ("dualpipev", "1f1b-overlap")
CAPTURED = Path(__file__).with_name("with_layer_graphs.py")
ROUTED = (
    "--cuda-graph-impl transformer_engine --cuda-graph-warmup-steps 1 "
    "--cuda-graph-scope attn moe_router moe_preprocess"
)
REDUCED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"


@cache
def weights(*options: str, transformer_engine: bool = False) -> Path:
    """A stock checkpoint after three iterations."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    saved = ("--save", str(folder), *MODEL, *options)
    pretrain(*saved, iterations=3, dp=2, transformer_engine=transformer_engine)
    return folder


def train(
    *options: str,
    given: tuple[str, ...] = (),
    pp: int = 1,
    script: Path = IN_FLOAT32,
    transformer_engine: bool = False,
) -> Log:
    """Six iterations from the same weights, with the exchange hidden; ``given`` are options of the model."""
    load = ("--load", str(weights(*given, transformer_engine=transformer_engine)), *FROM_WEIGHTS)
    options = (*MODEL, *given, *load, OVERLAP, *options)
    return pretrain(*options, pp=pp, dp=2, iterations=6, script=script, transformer_engine=transformer_engine)


stock = cache(train)


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "method", "pp", "given", "options"),
    [
        ("dualpipev", "vocab-2", 2, "", ""),
        ("1f1b-overlap", "vocab-2", 2, "", ""),
        ("dualpipev", "vocab-1", 4, "--moe-shared-expert-intermediate-size 32", REDUCED),
        ("1f1b-overlap", "baseline", 2, "", REDUCED),
        ("dualpipev", "baseline", 2, "", ""),
        ("dualpipev", "vocab-2", 2, "", f"{REDUCED} --ddp-bucket-size 20000"),
        ("dualpipev", "baseline", 4, "", f"{LAYOUT} Et|t|t|t|t|t|tt|L"),
        ("dualpipev", "vocab-1", 2, HEADS, f"{LAYOUT} Ett|ttt|tt|tmL"),
        ("dualpipev", "baseline", 2, HEADS, f"{LAYOUT} Ett|ttt|tt|tmL"),
    ],
)
def test_trains_as_stock(family: str, method: str, pp: int, given: str, options: str) -> None:
    expected = stock(given=words(given))
    ours = (*OURS[:1], *OURS[3:]) if LAYOUT in options else OURS
    flags = (*ours, "--vocab-parallel-family", family, "--vocab-parallel-method", method, *words(options))
    ours = train(*flags, given=words(given), pp=pp)
    assert f"method {method}, family {family}" in ours.text
    assert len(ours.losses) == len(ours.norms) == 6
    for name in ("losses", "norms", "evaluations"):
        np.testing.assert_allclose(getattr(ours, name), getattr(expected, name), rtol=1e-5, err_msg=name)


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_trains_in_4_bits_as_stock_that_hides_nothing(family: str) -> None:
    """Megatron's own plans leave 4 bits out; whole vocabulary layers have stock's operands."""
    if not is_since("0.16"):
        pytest.skip("Megatron 0.16 is the first with NVFP4")
    grouped = "--moe-grouped-gemm"
    load = (*MODEL, grouped, "--load", str(weights(grouped, transformer_engine=True)), *FROM_WEIGHTS)
    four = words("--fp4-format e2m1 --fp4-recipe nvfp4")
    flags = (OVERLAP, *OURS, "--vocab-parallel-family", family, "--vocab-parallel-method", "baseline")
    expected, in_16_bits, ours = (
        pretrain(*load, *options, pp=pp, dp=2, iterations=3, transformer_engine=True)
        for options, pp in ((four, 1), ((), 1), ((*four, *flags), 2))
    )
    for name in ("losses", "norms", "evaluations"):
        found, wanted = getattr(ours, name), getattr(expected, name)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, err_msg=name)
        assert not np.allclose(getattr(in_16_bits, name), wanted, rtol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("head", ["", "--mtp-num-layers 1 --position-embedding-type rope"])
@pytest.mark.parametrize("delayed", ["", DELAY])
def test_trains_with_captured_layers_as_stock_without(head: str, delayed: str) -> None:
    """Graphs of B, and with a delay others of its weight gradients, over the stand-in for CUDA graphs."""
    if not is_since("0.16"):
        pytest.skip("Megatron before 0.16 captures in its training script; refused")
    given = words(f"--moe-grouped-gemm {head}")
    expected = stock(given=given, transformer_engine=True)
    flags = (*OURS, "--vocab-parallel-family", "1f1b-overlap", *words(f"{ROUTED} {delayed}"))
    ours = train(*flags, given=given, pp=2, script=CAPTURED, transformer_engine=True)
    for name in ("losses", "norms", "evaluations"):
        np.testing.assert_allclose(getattr(ours, name), getattr(expected, name), rtol=1e-5, err_msg=name)


@pytest.mark.long
@pytest.mark.parametrize("family", ["dualpipev", "search", "auto"])
def test_what_pairs_hide_is_measured_while_training_goes_on(family: str, tmp_path: Path) -> None:
    """The first plan is made with wrong times; the measured one has what the pairs of the first hid."""
    wrong = {"F_ms": 10, "B_ms": 10, "W_ms": 10, "methods": {"vocab-2": {"S_ms": 60, "T_ms": 60}}}
    costs, plans = tmp_path / "costs.json", tmp_path / "plans"
    costs.write_text(json.dumps(wrong | {"hidden_ms": 5}))
    flags = (*MODEL, *OURS[:-2], "--vocab-parallel-family", family, OVERLAP, "--eval-iters", "0")
    if family == "auto":  # as the file has the times of one method
        flags += ("--vocab-parallel-method", "vocab-2")
    measured = ("--vocab-parallel-costs", str(costs), "--vocab-parallel-profile-iterations", "2")
    script = Path(__file__).with_name("with_slow_exchange.py")
    log = pretrain(*flags, *measured, "--save", str(plans), pp=2, dp=2, iterations=12, script=script)
    assert "; switched" in log.text
    plan = plan_from_json(json.dumps(json.loads((plans / PLAN_FILE).read_text())["plan"]))
    assert plan.schedule.pairs
    expected = 2 * 1e3 * (2 * ALONE_S - TOGETHER_S)  # of both chunks
    # Processes share processors: what runs alone may take longer than it sleeps.
    assert all(0.5 * expected < hidden < 1.9 * expected for hidden in plan.costs.hidden_ms)


@pytest.mark.parametrize("family", ["search", "auto"])
@pytest.mark.parametrize("chunks", [2, 4])
def test_a_search_hides_the_exchange_if_ranks_have_chunks(family: str, chunks: int) -> None:
    config = config_from_argv([ENABLE, "--vocab-parallel-family", family, OVERLAP])
    args = SimpleNamespace(**PLAIN | PAIRED | {"num_virtual_stages_per_pipeline_rank": chunks})
    check(args, config)
    args.num_virtual_stages_per_pipeline_rank = None
    with pytest.raises(ValueError, match=rf"{family} runs F and B .* use dualpipev or 1f1b-overlap"):
        check(args, config)


def test_a_search_leaves_weight_gradients_to_megatron_where_no_family_splits_them_off() -> None:
    config = config_from_argv([ENABLE, "--vocab-parallel-family", "search", OVERLAP])
    for chunks, delays in ((2, False), (4, True)):
        args = SimpleNamespace(
            **PLAIN
            | PAIRED
            | TE
            | {"num_virtual_stages_per_pipeline_rank": chunks, "delay_wgrad_compute": True}
        )
        check(args, config)
        leave_to_w(args, config)
        assert args.delay_wgrad_compute is delays


@pytest.mark.parametrize(("family", "delays"), [("dualpipev", False), ("1f1b-overlap", True), ("v-zb", True)])
def test_weight_gradients_are_left_to_w_where_it_is_a_pass(family: str, delays: bool) -> None:
    args = SimpleNamespace(**PLAIN | PAIRED | {"delay_wgrad_compute": True})
    leave_to_w(args, FlagConfig(True, "vocab-2", family))
    assert args.delay_wgrad_compute is delays


def test_the_first_plan_has_something_to_hide() -> None:
    costs = PassCosts(F_ms=(1.0, 3.0), B_ms=2.0, W_ms=0.0).with_hidden(0.4, 2)
    assert costs.hidden_ms == pytest.approx((0.4, 0.8))
    assert costs.with_hidden(0.4, 2) is costs
