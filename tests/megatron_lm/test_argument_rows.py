"""The table of Megatron's arguments: it has every argument of every version, and says what is so."""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_vocabpar.megatron_lm import replacements
from megatron_vocabpar.megatron_lm.bindings import VERSIONS
from megatron_vocabpar.megatron_lm.flag_config import FlagConfig
from megatron_vocabpar.megatron_lm.replacements import _check_first, _parse_with_our_flags
from megatron_vocabpar.megatron_lm.rules.check import (
    CANNOT_MATTER,
    NOT_RUN,
    REVIEW_OF,
    REVIEWS,
    RULED,
    WORKS,
    declared,
)
from tests.megatron_lm.training import version_of, words
from tests.support.megatron_parser import PLAIN, inside
from tests.support.recorded_arguments import recorded

FOUND = words(
    "add_bias_linear moe_grouped_gemm mtp_use_repeated_layer freeze_all_layers "
    "use_transformer_engine_op_fuser reuse_grad_buf_for_mxfp8_param_ag reset_attention_mask "
    "logits_load_dir logits_save_dir heterogeneous_layers_config_path iterations_to_skip "
    "overlap_param_gather_with_optimizer_step tensor_parallel_num_weight_shards enable_mhc_connections"
)
"""What was found to be wrong, or late, or neither supported nor refused, before there was a table."""


def without_a_row(names: set[str], rows: set[str]) -> list[str]:
    return sorted(names - rows)


def test_every_argument_of_every_version_has_one_row() -> None:
    read = {".".join(version.split(".")[:2]) for version in recorded()}
    assert read <= set(VERSIONS)
    assert min(map(len, recorded().values())) > 500
    everywhere = set().union(*recorded().values())
    assert without_a_row(everywhere, set(REVIEW_OF)) == []
    # Rows of a version whose arguments are not recorded yet are in no other.
    assert read != set(VERSIONS) or sorted(set(REVIEW_OF) - everywhere) == []
    assert [
        name for name, count in Counter(n for row in REVIEWS for n in row.arguments).items() if count > 1
    ] == []


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_is_found_again(name: str) -> None:
    in_versions = [version for version, names in recorded().items() if name in names]
    assert in_versions
    for version in in_versions:
        assert without_a_row(recorded()[version], set(REVIEW_OF) - {name}) == [name]


def test_the_checkout_has_no_argument_without_a_row() -> None:
    version = version_of()
    names = set(inside("parser")["options"])
    assert without_a_row(names, set(REVIEW_OF)) == []
    for of_version in (known for key, known in recorded().items() if key.startswith(version)):
        assert len(names ^ of_version) < 20, "another release: record its arguments"
    for name in names & set(FOUND):
        assert without_a_row(names, set(REVIEW_OF) - {name}) == [name]


def _megatrons(provider: Any, ignore_unknown_args: bool) -> Any:
    """As Megatron's ``parse_args``, of a version with an argument that has not been read."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden-size", type=int)
    parser.add_argument("--fresh-idea", type=int, default="3")
    parser.add_argument("--no-fresh-trick", action="store_false", dest="fresh_trick")
    parser.add_argument("--batch-invariant-mode", action="store_true")
    args, _ = provider(parser).parse_known_args(_megatrons.argv.split())  # type: ignore[attr-defined]
    return SimpleNamespace(**vars(args) | PLAIN, rank=0)


def parse(monkeypatch: pytest.MonkeyPatch, argv: str, config: FlagConfig) -> Any:
    monkeypatch.setattr(_megatrons, "argv", f"--enable-vocab-parallel {argv}", raising=False)

    def of_the_script(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument("--of-the-script", default=1, type=int)
        return parser

    parse_args = _parse_with_our_flags(_megatrons, config)
    parse_args(of_the_script, False)  # a start of Megatron parses more than once
    return _check_first(lambda args: args, config)(parse_args(of_the_script, False))


OURS = FlagConfig(enabled=True, method="vocab-2")
FRESH = "--fresh-idea 4: its effect on partitioned vocabulary layers is not known; leave it out"


def test_an_argument_without_a_row_is_a_warning_and_strictly_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = "--hidden-size 8 --no-fresh-trick --fresh-idea 4 --batch-invariant-mode"
    args = parse(monkeypatch, argv, OURS)
    assert "not_run" not in " ".join(vars(args))
    printed = capsys.readouterr().out
    assert printed.count("not tested with partitioned vocabulary layers:") == 1
    *_, one, two, three = printed.splitlines()
    assert one == f"  {FRESH}"
    assert two.startswith("  --no-fresh-trick False: its effect")
    assert three.startswith(f"  --batch-invariant-mode: {REVIEW_OF['batch_invariant_mode'].reason}")
    with pytest.raises(ValueError, match="refuses these flags") as error:
        parse(monkeypatch, argv, replace(OURS, strict=True))
    assert FRESH in str(error.value)
    redis = FlagConfig(enabled=True, method="redis", redistribute=True, final_stage_layers=1, strict=True)
    with monkeypatch.context() as patch:
        patch.setattr(replacements, "place_layers", lambda *_: None)
        assert parse(monkeypatch, argv, redis)


def test_a_megatron_that_has_not_been_read_is_in_the_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unread = "this version of Megatron: backward_step, which has not been read"
    monkeypatch.setattr(replacements, "installed", lambda: SimpleNamespace(unread=unread))
    parse(monkeypatch, "--fresh-idea 4", OURS)
    assert capsys.readouterr().out.splitlines()[-2:] == [f"  {unread}", f"  {FRESH}"]


def test_defaults_and_what_the_script_adds_pass(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = parse(monkeypatch, "--hidden-size 8 --fresh-idea 3 --of-the-script 2", replace(OURS, strict=True))
    assert (args.fresh_idea, args.fresh_trick, args.of_the_script) == (3, True, 2)
    assert args.enable_vocab_parallel
    assert "not tested" not in capsys.readouterr().out


def test_what_was_not_run_has_a_reason() -> None:
    known = {WORKS, RULED, NOT_RUN, CANNOT_MATTER}
    assert {row.verdict for row in REVIEWS} == known
    assert all((len(row.reason) > 10) == (row.verdict == NOT_RUN) for row in REVIEWS)
    assert declared(argparse.ArgumentParser()) == {}
