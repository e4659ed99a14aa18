"""What ``vocabpar layout`` prints for a preset places as many small layers in Megatron's own schedule."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from megatron_vocabpar.cli.main import main
from megatron_vocabpar.plan.read_config import model_preset
from tests.megatron_lm.training import pretrain, words


@pytest.mark.long
@pytest.mark.parametrize(
    ("preset", "p", "chunks"),
    [
        ("llama-3.1-70b", 8, 6),
        ("deepseek-v3", 4, 4),
        ("gpt-oss-120b", 4, 3),
        ("kimi-k2", 4, 4),
        ("qwen3-235b-a22b", 8, 4),
    ],
)
def test_megatron_trains_with_it(preset: str, p: int, chunks: int) -> None:
    asked = ["layout", "--preset", preset, "--pp", str(p), "--chunks", str(chunks), "--microbatches", "32"]
    printed = CliRunner().invoke(main, asked).output
    print(repr(printed))
    (layout,) = (line.split("'")[1] for line in printed.splitlines() if line.startswith("--pipeline"))
    model = model_preset(preset)
    heads = words(f"--mtp-num-layers {model.mtp_depths} --position-embedding-type rope")
    log = pretrain(
        *("--num-layers", str(model.layers), "--pipeline-model-parallel-layout", layout),
        *(heads if model.mtp_depths else ()),
        *("--micro-batch-size", "2", "--global-batch-size", str(2 * p)),
        transformer_engine=True,
        iterations=4,
        pp=p,
    )
    assert layout.count("|") == p * chunks - 1
    assert len(log.losses) == 4
