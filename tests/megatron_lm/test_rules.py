"""The table of rules: every row applies to a case, at the level that was chosen, and none to a plain one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_vocabpar.megatron_lm.flag_config import FlagConfig
from megatron_vocabpar.megatron_lm.rules.check import REVIEW_OF, RULED, TABLES, check, facts_of, said_of
from megatron_vocabpar.megatron_lm.rules.layout_rules import LINES
from megatron_vocabpar.pipeline.rules.rule import IMPOSSIBLE, UNTESTED, Rule
from megatron_vocabpar.pipeline.rules.rule import said as shown
from tests.support.megatron_parser import PLAIN
from tests.support.rule_cases import ACCEPTED, FITS_EARLY, FLAGS, REFUSED, WAITS

RULES = [rule for table in TABLES for rule in table]

NOT_RUN = {
    "--optimizer-cuda-graph",
    "--overlap-dispatch-backward-with-experts-wgrad",
    "--rerun-mode report_stats",
    "--check-for-spiky-loss",
    "--reuse-grad-buf-for-mxfp8-param-ag with --overlap-param-gather, with Megatron before 0.19",
    "CUDA graphs of layers with …",
    "--overlap-moe-expert-parallel-comm",
}
"""Rows of which some are warnings alone; numbers may be wrong, or a job hang, with all others."""


def config_of(**more: Any) -> FlagConfig:
    return FlagConfig(**{"enabled": True, "method": "vocab-2"} | more)


def cases() -> Iterator[tuple[dict[str, Any], FlagConfig]]:
    yield from ((settings, config_of()) for settings, _ in FLAGS)
    yield from ((settings, config_of(**more)) for settings, more, _ in REFUSED)


def applying(settings: dict[str, Any], config: FlagConfig) -> list[Rule]:
    facts = facts_of(SimpleNamespace(**PLAIN | settings), config)
    return [rule for rule in RULES if rule.sentence(facts)]


@pytest.mark.parametrize(("settings", "remedy"), FLAGS)
def test_a_flag_is_named_with_its_remedy(settings: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        check(SimpleNamespace(**PLAIN | settings), config_of(strict=True))
    assert check(SimpleNamespace(**PLAIN | settings), FlagConfig()) == ""


@pytest.mark.parametrize(("settings", "more", "message"), REFUSED)
def test_a_combination_is_refused_or_warned_of(
    settings: dict[str, Any], more: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check(SimpleNamespace(**PLAIN | settings), config_of(strict=True, **more))


@pytest.mark.parametrize(("settings", "more"), ACCEPTED)
def test_a_combination_is_accepted(settings: dict[str, Any], more: dict[str, Any]) -> None:
    check(SimpleNamespace(**PLAIN | settings), config_of(strict=True, **more))


@pytest.mark.parametrize(
    "name", ["num_virtual_stages_per_pipeline_rank", "decoder_first_pipeline_num_layers"]
)
def test_a_layout_stands_alone_in_a_launch_line(name: str) -> None:
    args = SimpleNamespace(**PLAIN, pipeline_model_parallel_layout="Et|t|t|tL", **{name: 1})
    flag = f"--{name.replace('_', '-')}"
    with pytest.raises(ValueError, match=rf"-layout with {flag}: .*; leave out {flag}$"):
        check(args, config_of(), more=LINES)
    check(args, config_of())  # a configuration of Bridge


@pytest.mark.parametrize(("family", "settings", "message"), WAITS)
def test_a_log_that_waits_is_warned_of(family: str, settings: dict[str, Any], message: str) -> None:
    warning = check(SimpleNamespace(**PLAIN | settings), config_of(family=family), more=LINES)
    assert message in warning
    assert len(warning.splitlines()) == 2


@pytest.mark.parametrize(("family", "settings"), FITS_EARLY)
def test_a_log_with_experts_on_every_rank_is_not(family: str, settings: dict[str, Any]) -> None:
    assert check(SimpleNamespace(**PLAIN | settings), config_of(family=family), more=LINES) == ""


def test_every_row_applies_to_a_case_and_none_to_a_plain_training(tmp_path: Path) -> None:
    assert applying({}, config_of()) == []
    applied = {id(rule) for settings, config in cases() for rule in applying(settings, config)}
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    for name in ("mp_rank_00", "modelopt_state"):
        (tmp_path / "iter_0000003" / name).mkdir(parents=True)
        applied |= {id(rule) for rule in applying({"load": str(tmp_path)}, config_of())}
    assert [rule.why for rule in RULES if id(rule) not in applied] == []


def test_what_is_only_a_warning_was_chosen() -> None:
    assert {shown(rule.asked, SimpleNamespace(), "…") for rule in RULES if rule.level == UNTESTED} == NOT_RUN


def test_what_has_not_been_run_is_one_warning_and_strictly_an_error() -> None:
    args = SimpleNamespace(**PLAIN, check_for_spiky_loss=True, optimizer_cuda_graph=True)
    warning = check(args, config_of(), ["--fresh-idea 4: it is not known"])
    assert warning.startswith("> --enable-vocab-parallel: not tested")
    assert [line.split(":")[0].strip() for line in warning.splitlines()[1:]] == [
        "--fresh-idea 4",
        "--optimizer-cuda-graph",
        "--check-for-spiky-loss",
    ]
    with pytest.raises(ValueError, match=r"refuses these flags:\n  --fresh-idea 4"):
        check(args, config_of(strict=True), ["--fresh-idea 4: it is not known"])
    args.inprocess_restart = True
    with pytest.raises(ValueError, match="--inprocess-restart") as error:
        check(args, config_of())
    assert "spiky" not in str(error.value)


def test_rules_have_texts_that_can_be_filled_in() -> None:
    for settings, config in cases():
        said = said_of(SimpleNamespace(**PLAIN | settings), config)
        assert not any("{" in line or "None" in line for line in (*said[IMPOSSIBLE], *said[UNTESTED]))


class Asked(SimpleNamespace):
    """Settings that keep account of what is asked of them."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):
            self.__dict__.setdefault("asked", set()).add(name)
        raise AttributeError(name)


def test_rules_look_at_the_options_that_are_said_to_be_ruled() -> None:
    asked: set[str] = set()
    for settings, config in cases():
        args = Asked(**PLAIN | settings)
        said_of(args, config)
        asked |= vars(args).pop("asked", set()) | set(settings)
    ruled = {name for name, row in REVIEW_OF.items() if row.verdict == RULED}
    assert sorted(ruled - asked - {"yaml_cfg", "wgrad_deferral_limit", "pretrained_checkpoint"}) == []
