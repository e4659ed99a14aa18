"""Megatron's own data path: an indexed dataset read as ``GPTDataset`` and cut into microbatches.

The seed, the step and the place in the step alone decide which sequences a microbatch holds. So every method
sees the same data, and a resumed job goes on where it stopped.
``prepare.py`` has written the dataset. Next: ``trainer.py``.
"""

from __future__ import annotations

import functools
import itertools
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from types import SimpleNamespace

import numpy as np
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from torch.utils.data import default_collate

from megatron_vocabpar.train.config import TrainConfig
from megatron_vocabpar.train.prepare import DataFiles, compile_helpers

Batch = Mapping[str, torch.Tensor | None]
"""``tokens``, ``labels``, ``position_ids`` [b, s] int64, ``loss_mask`` fp32, ``attention_mask`` None."""


def build_datasets(config: TrainConfig, files: DataFiles) -> tuple[GPTDataset, GPTDataset | None]:
    """One shuffled epoch for training and one for evaluation, None where nothing is kept for it.

    All ranks call it: Megatron's builder has barriers.
    """
    valid_documents = files.valid_documents if files.valid_tokens > config.seq_length else 0
    identity = OrderedDict(class_="megatron_vocabpar", vocab_size=files.vocab_size)  # for the cache
    dataset_config = GPTDatasetConfig(
        random_seed=config.seed,
        sequence_length=config.seq_length,
        blend=([files.prefix], None),
        split=f"{files.documents - valid_documents},{valid_documents},0",
        path_to_cache=files.index_cache,
        tokenizer=SimpleNamespace(vocab_size=files.vocab_size, eod=files.eod, unique_identifiers=identity),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    if rank == 0:  # builds the indices; the other ranks load them
        compile_helpers()
    builder = BlendedMegatronDatasetBuilder(GPTDataset, [None, None, None], lambda: True, dataset_config)
    train, valid, _ = builder.build()
    return train, valid


def microbatch(dataset: GPTDataset, config: TrainConfig, step: int, index: int, dp_rank: int = 0) -> Batch:
    """Microbatch ``index`` of a step for one data-parallel rank, on the CPU.

    After the last sequence of the dataset a new epoch begins, shuffled by the seed and the epoch's number.
    """
    size = config.micro_batch_size
    # Sequences are counted by microbatch, then by rank: with dp 2 and size 1, step 0 reads 0 (microbatch 0,
    # rank 0), 1 (microbatch 0, rank 1), 2 (microbatch 1, rank 0), ...
    first = ((step * config.microbatches + index) * config.dp + dp_rank) * size
    batch = default_collate(
        [dataset[_sample(len(dataset), config.seed, position)] for position in range(first, first + size)]
    )
    largest = int(torch.maximum(batch["tokens"], batch["labels"]).max())
    if largest >= config.vocab_size:
        raise ValueError(f"the data holds token id {largest}; give --vocab-size {largest + 1} or more")
    return {**batch, "attention_mask": None}


def microbatches(
    dataset: GPTDataset, config: TrainConfig, start_step: int, dp_rank: int = 0
) -> Iterator[Batch]:
    """An endless ``data_iterator``: the microbatches of ``start_step``, then of the next step, ..."""
    for step in itertools.count(start_step):
        for index in range(config.microbatches):
            yield microbatch(dataset, config, step, index, dp_rank)


def _sample(length: int, seed: int, position: int) -> int:
    epoch, within = divmod(position, length)
    return int(_shuffled(length, seed, epoch)[within]) if epoch else within


@functools.lru_cache(maxsize=2)
def _shuffled(length: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(length)
