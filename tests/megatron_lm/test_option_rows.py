"""The table of Megatron's options: it has every option of every version, and says what is so."""

from __future__ import annotations

import argparse
from collections import Counter
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_vocabpar.megatron_lm import options, parsed
from megatron_vocabpar.megatron_lm.bindings import VERSIONS, find_version
from megatron_vocabpar.megatron_lm.checkout import source_signatures
from megatron_vocabpar.megatron_lm.flag_config import FlagConfig
from megatron_vocabpar.megatron_lm.options import REFUSED, ROW_OF, ROWS
from megatron_vocabpar.megatron_lm.options_page import page
from megatron_vocabpar.megatron_lm.refusals import REFUSALS, check
from megatron_vocabpar.megatron_lm.replacements import _parse_with_our_options
from tests.megatron_lm.test_doors import PLAIN, inside
from tests.megatron_lm.training import ROOT, checkout, words

FOUND = words(
    "add_bias_linear moe_grouped_gemm mtp_use_repeated_layer freeze_all_layers "
    "use_transformer_engine_op_fuser reuse_grad_buf_for_mxfp8_param_ag reset_attention_mask "
    "logits_load_dir logits_save_dir heterogeneous_layers_config_path iterations_to_skip "
    "overlap_param_gather_with_optimizer_step tensor_parallel_num_weight_shards enable_mhc_connections"
)
"""What was found to be wrong, or late, or neither supported nor refused, before there was a table."""


@cache
def recorded() -> dict[str, set[str]]:
    """The options of each version that was read, by version."""
    versions: dict[str, set[str]] = {}
    now: set[str] = set()
    for line in Path(__file__).with_name("recorded_options.txt").read_text().splitlines():
        sign, *names = line.split() or ["#"]
        if sign.startswith("["):
            versions[sign.strip("[]")] = now = set(now)
        elif sign == "+":
            now |= set(names)
        elif sign == "-":
            now -= set(names)
    return versions


def without_a_row(names: set[str], rows: set[str]) -> list[str]:
    return sorted(names - rows)


def test_every_option_of_every_version_has_one_row() -> None:
    assert {".".join(version.split(".")[:2]) for version in recorded()} == set(VERSIONS)
    assert min(map(len, recorded().values())) > 500
    everywhere = set().union(*recorded().values())
    assert without_a_row(everywhere, set(ROW_OF)) == []
    assert sorted(set(ROW_OF) - everywhere) == []
    assert [
        name for name, count in Counter(n for row in ROWS for n in row.options).items() if count > 1
    ] == []


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_is_found_again(name: str) -> None:
    in_versions = [version for version, names in recorded().items() if name in names]
    assert in_versions
    for version in in_versions:
        assert without_a_row(recorded()[version], set(ROW_OF) - {name}) == [name]


def test_the_checkout_has_no_option_without_a_row() -> None:
    version = find_version(source_signatures(checkout()))
    names = set(inside("parser")["options"])
    assert without_a_row(names, set(ROW_OF)) == []
    of_version = next(known for key, known in recorded().items() if key.startswith(version))
    assert len(names ^ of_version) < 20, "another release: record its options"
    for name in names & set(FOUND):
        assert without_a_row(names, set(ROW_OF) - {name}) == [name]


class Asked(SimpleNamespace):
    """Parsed arguments that keep account of what is asked of them."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):
            self.__dict__.setdefault("asked", set()).add(name)
        raise AttributeError(name)


SITUATIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("1f1b", {"num_layers": 8}),
    ("v-half", {"num_virtual_stages_per_pipeline_rank": 2, "transformer_impl": "local"}),
    ("interleaved", {"num_virtual_stages_per_pipeline_rank": 2, "pipeline_model_parallel_size": 2}),
    ("1f1b", {"dataloader_inter_document_masking": True}),
    ("1f1b", {"reuse_grad_buf_for_mxfp8_param_ag": True, "num_layers": 8}),
    ("zb-h1", {"transformer_impl": "transformer_engine", "tp_comm_overlap": True}),
    ("1f1b", {"logits_load_dir": "teacher", "logits_load_kd_loss_alpha": 1.0}),
    ("1f1b", {"cuda_graph_impl": "transformer_engine"}),
)


def test_what_is_refused_is_asked_for() -> None:
    asked: set[str] = set()
    for schedule, more in SITUATIONS:
        args = Asked(**PLAIN | more)
        with suppress(ValueError):
            check(args, FlagConfig(enabled=True, method="vocab-2", schedule=schedule))
        asked |= args.asked | set(more) | set(PLAIN)
    refused = {name for row in ROWS if row.verdict == REFUSED for name in row.options}
    assert sorted(refused - asked - {"yaml_cfg"}) == []
    known = set().union(*recorded().values())
    for refusal in REFUSALS:
        assert refused & set(refusal.example) or not known & set(refusal.example), refusal.flag


def _megatrons(provider: Any, ignore_unknown_args: bool) -> Any:
    """As Megatron's ``parse_args``, of a version with an option that nobody has read."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden-size", type=int)
    parser.add_argument("--fresh-idea", type=int, default="3")
    parser.add_argument("--no-fresh-trick", action="store_false", dest="fresh_trick")
    parser.add_argument("--batch-invariant-mode", action="store_true")
    args, _ = provider(parser).parse_known_args(_megatrons.argv.split())  # type: ignore[attr-defined]
    args.rank = 0
    return args


def parse(monkeypatch: pytest.MonkeyPatch, argv: str, config: FlagConfig) -> Any:
    monkeypatch.setattr(_megatrons, "argv", f"--enable-vocab-parallel {argv}", raising=False)

    def of_the_script(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument("--of-the-script", default=1, type=int)
        return parser

    parse_args = _parse_with_our_options(_megatrons, config)
    parse_args(of_the_script, False)  # a start of Megatron parses more than once
    return parse_args(of_the_script, False)


OURS = FlagConfig(enabled=True, method="vocab-2")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--hidden-size 8 --fresh-idea 4", "^--fresh-idea 4: nobody has read"),
        (
            "--no-fresh-trick --fresh-idea 4",
            "^--fresh-idea 4, --no-fresh-trick False: nobody has read .* leave",
        ),
    ],
)
def test_an_option_without_a_row_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, argv: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        parse(monkeypatch, argv, OURS)
    assert parse(monkeypatch, argv, FlagConfig(enabled=True, method="redis", redistribute=True))


def test_defaults_and_what_the_script_adds_pass(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = parse(monkeypatch, "--hidden-size 8 --fresh-idea 3 --of-the-script 2", OURS)
    assert (args.fresh_idea, args.fresh_trick, args.of_the_script) == (3, True, 2)
    assert args.enable_vocab_parallel
    assert capsys.readouterr().out == ""


def test_what_nobody_has_run_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parse(monkeypatch, "--batch-invariant-mode", OURS)
    assert capsys.readouterr().out.count("--batch-invariant-mode has not been run with partitioned") == 1


def test_the_page_is_current() -> None:
    assert (ROOT / "docs" / "options.md").read_text() == "\n".join(page()) + "\n"


def test_verdicts_have_reasons() -> None:
    known = {options.WORKS, options.REFUSED, options.NOT_RUN, options.CANNOT_MATTER}
    assert {row.verdict for row in ROWS} == known
    assert all(len(row.reason) > 10 and row.options for row in ROWS)
    assert parsed.declared(argparse.ArgumentParser()) == {}
