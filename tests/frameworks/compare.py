"""What two ranks have with whole vocabulary layers, beside what they have with partitioned ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

Tensors = Mapping[str, torch.Tensor]


def check_gradients(ours: Sequence[Tensors], stock: Sequence[Tensors]) -> None:
    """Of all ranks, to 1e-5 of the largest; rows of shards make up whole layers."""
    for theirs, mine in zip(stock, ours, strict=True):
        for key, whole in theirs.items():
            # Stock has a tied weight twice.
            name = key if key in mine else key.replace("output_layer", "embedding.word_embeddings")
            is_shard = name.endswith(("word_embeddings.weight", "output_layer.weight"))
            found = torch.cat([rank[name] for rank in ours]) if is_shard else mine[name]
            found = found[: len(whole)]  # ours may have more padding
            assert found.shape == whole.shape, name
            difference = (found - whole).abs().max() / whole.abs().max()
            assert difference < 1e-5, f"{name}: {difference:.1e}"


def counting_rows(model: Any) -> list[int]:
    """How many rows the output layer is given from now on, call by call."""
    rows: list[int] = []
    if hasattr(model, "output_layer"):
        model.output_layer.register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
    return rows


def check_metrics(ours: Mapping[str, float], stock: Mapping[str, float]) -> None:
    """All that the framework reports, to 1e-5."""
    assert ours.keys() == stock.keys()
    for name, value in stock.items():
        found, expected = torch.as_tensor(ours[name]).float(), torch.as_tensor(value).float()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
