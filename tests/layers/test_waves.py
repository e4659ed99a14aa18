"""Chunks by waves, and the table of ``docs/kernels.md`` for the vocabularies of real models.

``python -m tests.layers.test_waves`` prints the table.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_vocabpar.layers import gemm
from megatron_vocabpar.layers.gemm import product_chunks
from megatron_vocabpar.layers.output.plain import _WORTH_BYTES
from megatron_vocabpar.layers.partition import padded_vocab_size
from megatron_vocabpar.layers.waves import (
    H200,
    Machine,
    chunk_seconds,
    machine_of,
    product_seconds,
    rows_per_chunk,
)
from megatron_vocabpar.plan.read_config import model_preset, model_presets

from .cuda_device import Case, run

PRESETS = {name: raw for name, raw in model_presets().items() if not model_preset(name).pattern}
"""GPT models, whose rows the table has."""

SIZES, SHOWN = (4, 8, 16, 32), (8, 32)
LIMITS = {4: 1.15, 8: 1.12, 16: 1.15, 32: 1.22}
NARROW = "qwen3-30b-a3b"
"""H 2048: the row kernel weighs more beside its product."""
SMALL = "mixtral-8x7b"
"""32,000 ids: what T and TW scale weighs more beside their products."""

BEYOND = {8: {SMALL}, 16: {SMALL}}
"""The models with higher ratios."""

LAUNCHES = 5  # of a microbatch in vocab-1, beside two per chunk
MEMORY = 4.0e12


def bare(n: int, ids: int, hidden: int) -> tuple[float, float]:
    """Seconds of the three products: the logits, and those of T and TW."""
    return product_seconds(n, ids, hidden), product_seconds(n, hidden, ids) + product_seconds(ids, hidden, n)


def rest(n: int, ids: int, hidden: int) -> float:
    """Seconds of T and TW beside their products: rows of dX in 32 bits and of X in 16 are read and written.

    Where that moves far fewer bytes the exponentials are in their place, 16 bits, by one launch more.
    """
    seconds = LAUNCHES * 2e-6
    for scaled in (8 * n * hidden, 4 * n * hidden):
        spared = scaled - 4 * n * ids
        seconds += (scaled - spared) / MEMORY + 2e-6 if spared > _WORTH_BYTES else scaled / MEMORY
    return seconds


def ratio(n: int, ids: int, hidden: int) -> float:
    """Modelled S + T + TW over the three bare products."""
    logits, others = bare(n, ids, hidden)
    rows = rows_per_chunk(n, ids, hidden)
    chunks = sum(chunk_seconds(min(rows, n - start), ids, hidden) for start in range(0, n, rows))
    return (chunks + others + rest(n, ids, hidden)) / (logits + others)


def model_ratio(name: str, p: int) -> float:
    """Of a preset with its own n and H."""
    preset = PRESETS[name]
    n, config = preset["seq_length"], preset["config"]
    hidden = config["hidden_size"]
    ids = padded_vocab_size(config["vocab_size"], p) // p
    return ratio(n, ids, hidden)


def table() -> str:
    """The rows of the documents' table: of each vocabulary the models that have the worst ratios."""
    lines = [
        "| V | models | " + " | ".join(f"p {p}" for p in SHOWN) + " |",
        "|---:|---|" + "---:|" * len(SHOWN),
    ]
    vocabularies: dict[tuple[int, bool], list[str]] = {}
    for name, preset in PRESETS.items():
        vocabularies.setdefault((preset["config"]["vocab_size"], name == NARROW), []).append(name)
    for (size, _), names in sorted(vocabularies.items()):
        cells = " | ".join(f"{max(model_ratio(name, p) for name in names):.2f}" for p in SHOWN)
        lines.append(f"| {size:,} | {', '.join(names)} | {cells} |")
    return "\n".join(lines)


def test_the_document_has_the_table() -> None:
    page = Path(__file__).parents[2] / "docs" / "kernels.md"
    assert table() in page.read_text(encoding="utf-8"), table()


@pytest.mark.parametrize("p", SIZES)
def test_no_vocabulary_is_far_from_the_products(p: int) -> None:
    ratios = {name: model_ratio(name, p) for name in PRESETS}
    assert {name for name, now in ratios.items() if round(now, 2) > LIMITS[p]} == BEYOND.get(p, set())


@pytest.mark.parametrize("ids", [32768, 4096])
def test_the_model_has_the_launches_that_are_made(monkeypatch: pytest.MonkeyPatch, ids: int) -> None:
    monkeypatch.setattr(gemm, "addmm_takes_fp32", lambda version: True)
    launches, _ = run(Case("vocab-1", torch.bfloat16, n=2048, hidden=4096, rows=ids))
    assert len(launches) == 2 * launches.count("exponentials") + LAUNCHES


def test_whole_waves_are_chosen() -> None:
    """32 MiB hold 262 tokens' logits of 32,000 ids: 375 tiles, 3 waves of 132, where 256 tokens need 2.

    1024 tokens need 8, as many for each token, and fewer launches.
    """
    assert rows_per_chunk(2048, 32000, 4096) == 1024
    assert product_seconds(1024, 32000, 4096) == pytest.approx(4 * product_seconds(256, 32000, 4096))
    assert product_seconds(262, 32000, 4096) == pytest.approx(1.5 * product_seconds(256, 32000, 4096))


@pytest.mark.parametrize(
    ("n", "ids", "hidden"), [(2048, 8192, 3072), (8192, 19072, 4096), (4096, 4096, 8192)]
)
def test_fewer_chunks_would_take_more_than_3_percent_longer(n: int, ids: int, hidden: int) -> None:
    def seconds(size: int) -> float:
        return sum(chunk_seconds(min(size, n - start), ids, hidden) for start in range(0, n, size))

    chosen = rows_per_chunk(n, ids, hidden)
    sizes = [min(128 * tiles, n) for tiles in range(1, -(-n // 128) + 1) if 128 * tiles * ids * 4 <= 2**27]
    best = min(map(seconds, sizes))
    assert seconds(chosen) <= 1.03 * best
    assert all(seconds(size) > 1.03 * best for size in sizes if -(-n // size) < -(-n // chosen))
    assert -(-n // chosen) < -(-n // min(sizes, key=seconds))  # without the 3 % there would be more


def test_a_device_with_other_multiprocessors_has_other_chunks() -> None:
    assert rows_per_chunk(4096, 19072, 4096, Machine(108, 40 * 2**20)) != rows_per_chunk(4096, 19072, 4096)
    assert machine_of(torch.device("meta")) == H200


@pytest.mark.parametrize(("n", "ids"), [(2048, 32768), (2048, 50304), (300, 16), (1, 100_000), (77, 10**7)])
def test_chunks_cover_the_tokens_within_their_memory(n: int, ids: int) -> None:
    chunks = product_chunks(torch.device("meta"), n, ids, 1024)
    assert [token for rows in chunks for token in range(rows.start, rows.stop)] == list(range(n))
    size = chunks[0].stop
    assert size == n or size % 128 == 0
    assert size <= 128 or 4 * size * ids <= 128 * 2**20


def test_no_tokens_have_no_chunks() -> None:
    assert product_chunks(torch.device("meta"), 0, 100, 64) == ()


if __name__ == "__main__":
    print(table())
