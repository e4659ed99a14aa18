"""The tensors of a checkpoint that a training saved after three iterations.

The vocabulary size is a prime number, so that shards have padding rows and global shapes differ.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

VOCAB_SIZE = 4603

SAVED = 3

# The learning rate is zero from here on, so that weights can be compared bitwise after an iteration.
STANDING_STILL = ("--override-opt_param-scheduler", "--lr-decay-iters", str(SAVED))

VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


def tensors(folder: Path, iteration: int) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, whole, by their keys, without the padding of the vocabulary."""
    reader = dcp.FileSystemReader(str(folder / f"iter_{iteration:07d}"))
    stored = reader.read_metadata().state_dict_metadata
    whole: dict[str, Any] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in stored.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(whole, storage_reader=reader, no_dist=True)
    return {key: t[:VOCAB_SIZE] if key.endswith(VOCABULARY) else t for key, t in whole.items()}
