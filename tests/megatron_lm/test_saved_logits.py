"""``--logits-save-dir``: the files equal those that stock writes, and trainings read them."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_vocabpar.layers.bins import NOT_STORED
from tests.megatron_lm.training import BY_PATTERN, is_since, pretrain, words

zstandard = pytest.importorskip("zstandard", reason="Megatron compresses stored log-probabilities with it")

ITERATIONS, MICROBATCHES, TOP = 3, 6, 7
UNTIED = "--untie-embeddings-and-output-weights"


def read(folder: Path) -> dict[str, Any]:
    """By file and member what it holds: the metadata, or lists of a tensor for each microbatch."""
    found: dict[str, Any] = {}
    for path in sorted(folder.iterdir()):
        with tarfile.open(path) as archive:
            for entry in archive:
                stream = archive.extractfile(entry)
                assert stream is not None
                data = stream.read()
                if entry.name.endswith(".json"):
                    found[f"{path.name} {entry.name}"] = json.loads(data)
                else:
                    payload = io.BytesIO(zstandard.ZstdDecompressor().decompress(data))
                    found[f"{path.name} {entry.name}"] = torch.load(payload)
    return found


@pytest.mark.parametrize(
    ("method", "sizes", "more", "model"),
    [
        ("vocab-2", {"pp": 2}, (), ()),
        pytest.param(
            "vocab-1",
            {"pp": 4},
            words("--logits-save-top-p 0.02 --logits-save-top-p-min-k 2"),
            (),
            marks=pytest.mark.long,
        ),
        pytest.param(
            "vocab-2",
            {"pp": 2, "tp": 2, "dp": 2},
            words("--freeze-all-layers --save-interval 2"),
            (),
            marks=pytest.mark.long,
        ),
        pytest.param("vocab-2", {"pp": 2}, (), BY_PATTERN, marks=pytest.mark.long),
    ],
)
def test_writes_what_stock_writes(
    tmp_path: Path, method: str, sizes: dict[str, int], more: tuple[str, ...], model: tuple[str, ...]
) -> None:
    if not is_since("0.19"):
        pytest.skip("this Megatron has no --logits-save-dir")
    if is_since("main"):  # where it is refused
        more = tuple(word for word in more if word != "--freeze-all-layers")
    weights, dp = tmp_path / "weights", sizes.get("dp", 1)
    pretrain(*model, "--save", str(weights), UNTIED, "--init-method-std", "0.2", iterations=3)
    start = (*model, "--load", str(weights), "--finetune", "--no-load-optim", "--no-load-rng", UNTIED)

    def save(name: str, *options: str, **sizes: int) -> tuple[Any, dict[str, Any]]:
        folder = tmp_path / name
        log = pretrain(
            *start,
            *("--save", str(folder / "weights"), "--logits-save-dir", str(folder / "logits")),
            *words(f"--logits-save-top-k {TOP} --logits-save-dtype fp32 --async-strategy mcore"),
            *words("--async-save --use-persistent-ckpt-worker"),
            *(*more, *options),
            iterations=ITERATIONS,
            **sizes,
        )
        return log, read(folder / "logits")

    flags = words(f"--enable-vocab-parallel --vocab-parallel-method {method}")
    _, expected = save("stock", dp=dp)  # over a pipeline stock fails, or on main hangs at its end
    log, found = save("ours", *flags, **sizes)
    assert f"vocabulary parallelism: method {method}" in log.text
    assert list(found) == list(expected)
    tensors = 0
    for name, held in expected.items():
        if name.endswith(".json"):
            assert found[name] == held
            continue
        for kind, microbatches in held.items():
            assert len(microbatches) == MICROBATCHES // dp
            for ours, stock in zip(found[name][kind], microbatches, strict=True):
                assert ours.dtype == stock.dtype
                np.testing.assert_allclose(ours.numpy(), stock.numpy(), rtol=2e-6, err_msg=kind)
                tensors += 1
    assert tensors == 3 * ITERATIONS * MICROBATCHES
    values = next(held["values"][0] for name, held in found.items() if not name.endswith(".json"))
    assert ("--logits-save-top-p" in more) == bool((values == NOT_STORED).any())
    assert log.losses == [0.0] * ITERATIONS
    assert log.evaluations == [0.0] * len(log.evaluations)

    student = ("--logits-load-kd-loss-alpha", "1.0", UNTIED, *flags, *model)
    trained = [
        pretrain(
            *("--logits-load-dir", str(tmp_path / name / "logits"), *student), iterations=ITERATIONS, **sizes
        ).scalars["logits distillation loss"]
        for name in ("stock", "ours")
    ]
    assert len(trained[1]) == ITERATIONS
    np.testing.assert_allclose(trained[1], trained[0], rtol=1e-6)
