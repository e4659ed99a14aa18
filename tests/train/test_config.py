"""The configuration: JSON both ways, derived values, and the command line that asks for it."""

from __future__ import annotations

import dataclasses

import pytest
from click.testing import CliRunner

from megatron_vocabpar.cli import train as verb
from megatron_vocabpar.option import options_of
from megatron_vocabpar.train.config import TrainConfig, command_line, flag

OTHER = TrainConfig(
    method="vocab-1", compare=("baseline", "naive"), pp=2, tp=2, dp=2, tied=True, position="rope",
    dtype="bf16", ffn=100, text="/t/a.txt", sequence_parallel=False, save=False, lr=1e-4, output="x",
    family="interleaved", chunks=3, max_activations=2.5, costs="/t/costs.json",
)  # fmt: skip


@pytest.mark.parametrize("config", [TrainConfig(), OTHER])
def test_json_both_ways(config: TrainConfig) -> None:
    assert TrainConfig.from_json(config.to_json()) == config


def test_derived_values() -> None:
    assert TrainConfig().ffn_hidden == 256
    assert OTHER.ffn_hidden == 100
    assert OTHER.world_size == 8
    assert OTHER.methods == ("vocab-1", "baseline", "naive")
    assert TrainConfig(compare=("vocab-2", "baseline")).methods == ("vocab-2", "baseline")
    assert OTHER.tokens_per_step == 2 * 8 * 2 * 128
    assert not TrainConfig().use_sequence_parallel
    assert TrainConfig(tp=2).use_sequence_parallel
    assert TrainConfig(tokenizer_vocab_size=1000).tokenizer_size == 1000
    assert TrainConfig(vocab_size=65536).tokenizer_size == 8192
    assert TrainConfig(vocab_size=1000).tokenizer_size == 1000


@pytest.mark.parametrize("config", [TrainConfig(), OTHER])
def test_the_command_line_asks_for_the_same(config: TrainConfig) -> None:
    with verb.train_command.make_context("train", command_line(config)[2:]) as context:
        assert verb.config_from_options(context.params, ()) == config


def test_every_field_has_an_option_with_help() -> None:
    shown = CliRunner().invoke(verb.train_command, ["--help"]).output
    assert [*options_of(TrainConfig)] == [field.name for field in dataclasses.fields(TrainConfig)]
    for name, option in options_of(TrainConfig).items():
        assert flag(name) in shown
        assert option.help.split()[0] in shown
