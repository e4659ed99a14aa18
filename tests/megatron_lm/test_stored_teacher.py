"""``--logits-load-dir``: training with a teacher's stored log-probabilities equals stock's."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.megatron_lm.training import BY_PATTERN, is_since, pretrain, words

zstandard = pytest.importorskip("zstandard", reason="Megatron compresses stored log-probabilities with it")

ITERATIONS, MICROBATCHES, TOP, VOCAB = 4, 6, 5, 4608
SCRIPT = Path(__file__).parent / "with_copied_logits.py"
UNTIED = "--untie-embeddings-and-output-weights"


def store(folder: Path, dp: int = 1) -> None:
    """A teacher's files as Megatron's loader reads them, with random log-probabilities.

    A file ``cp0_dp<rank>__<last iteration>.tar`` has the data's identity, and for each iteration, compressed,
    lists of a tensor for each microbatch: ``values`` [s, b, k], ``indices_low`` and ``bit_17``.
    """
    identity = {
        "seed": 1234,
        "sequence_length": 32,
        "train_samples": ITERATIONS * 12,
        "blend": {"kind": "mock", "mock": True},
    }
    text = json.dumps(identity, separators=(",", ":"))
    members = {"_meta.json": json.dumps({"hash": hashlib.md5(text.encode()).hexdigest()}).encode()}
    for rank in range(dp):
        draw = torch.Generator().manual_seed(rank)
        for iteration in range(ITERATIONS):
            logits = [3 * torch.randn(32, 2, VOCAB, generator=draw) for _ in range(MICROBATCHES // dp)]
            found = [each.log_softmax(2).topk(TOP) for each in logits]
            values = [each.values.half() for each in found]
            values[0][:5, :, 3:] = -1e3  # what a nucleus leaves out
            payload = io.BytesIO()
            low = [each.indices.to(torch.uint16) for each in found]
            high = [torch.zeros_like(each.indices, dtype=torch.bool) for each in found]
            torch.save({"values": values, "indices_low": low, "bit_17": high}, payload)
            members[f"{iteration}.pt.zst"] = zstandard.ZstdCompressor().compress(payload.getvalue())
        with tarfile.open(folder / f"cp0_dp{rank}__{ITERATIONS - 1}.tar", "w") as archive:
            for name, data in members.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))


@pytest.mark.parametrize(
    ("alpha", "method", "sizes", "model"),
    [
        ("0.6", "vocab-2", {"pp": 2}, ()),
        pytest.param("1.0", "vocab-1", {"pp": 2, "tp": 2}, (), marks=pytest.mark.long),
        pytest.param("0.5", "vocab-2", {"pp": 2, "dp": 2}, (), marks=pytest.mark.long),
        pytest.param("0.6", "vocab-1", {"pp": 2}, BY_PATTERN, marks=pytest.mark.long),
    ],
)
def test_trains_as_stock(
    tmp_path: Path, alpha: str, method: str, sizes: dict[str, int], model: tuple[str, ...]
) -> None:
    if not is_since("0.19"):
        pytest.skip("this Megatron has no --logits-load-dir")
    weights, teacher = tmp_path / "weights", tmp_path / "teacher"
    teacher.mkdir()
    store(teacher, dp := sizes.get("dp", 1))
    pretrain("--save", str(weights), UNTIED, *model, iterations=3)
    options = (
        *model,
        *("--load", str(weights), "--finetune", "--no-load-optim", "--no-load-rng", UNTIED),
        *("--logits-load-dir", str(teacher), "--logits-load-kd-loss-alpha", alpha),
    )
    # Stock 0.19.0 takes no pipeline with them.
    expected = pretrain(*options, iterations=ITERATIONS, dp=dp, script=SCRIPT)
    ours = pretrain(
        *options,
        *words(f"--enable-vocab-parallel --vocab-parallel-method {method}"),
        iterations=ITERATIONS,
        **sizes,
    )
    assert f"vocabulary parallelism: method {method}" in ours.text
    for name in ("lm loss", "logits distillation loss", "total loss", "grad-norm"):
        assert len(ours.scalars[name]) == ITERATIONS
        np.testing.assert_allclose(ours.scalars[name], expected.scalars[name], rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(ours.evaluations, expected.evaluations, rtol=1e-5)
