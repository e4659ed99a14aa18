"""Megatron's own data path: write an indexed dataset, read it as ``GPTDataset``, cut it into microbatches.

The seed, the step and the place in the step alone decide which sequences a microbatch holds. So every method
sees the same data, and a resumed job goes on where it stopped.
Next: ``prepare.py`` decides what is written; ``trainer.py`` reads it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import os
import shutil
import subprocess
import sysconfig
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from megatron.core.datasets import utils as dataset_utils
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder
from torch.utils.data import default_collate

from megatron_vocabpar.train.config import TrainConfig
from megatron_vocabpar.train.data_files import DataFiles

Batch = Mapping[str, torch.Tensor | None]
"""``tokens``, ``labels``, ``position_ids`` [b, s] int64, ``loss_mask`` fp32, ``attention_mask`` None."""

_INDEX_HEADER = b"MMIDIDX\0\0"
_SCANNED_TOKENS = 1 << 28


def write_dataset(prefix: str, documents: Iterable[Sequence[int]], vocab_size: int) -> None:
    """Write ``prefix.bin`` and ``prefix.idx``: one sequence a document, in the smallest token type.

    The ``.idx`` appears last, when both files are complete.
    """
    partial = f"{prefix}.partial-{os.getpid()}"
    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    builder = IndexedDatasetBuilder(f"{partial}.bin", dtype=DType.optimal_dtype(vocab_size))
    for document in documents:
        builder.add_document(document, [len(document)])
    builder.finalize(f"{partial}.idx")
    for end in (".bin", ".idx"):
        os.replace(partial + end, prefix + end)


def inspect_dataset(prefix: str) -> tuple[list[int], int]:
    """Sequence lengths of an indexed dataset in tokens, and the largest id among its first 2²⁸ tokens."""
    with open(f"{prefix}.idx", "rb") as index:
        if index.read(len(_INDEX_HEADER)) != _INDEX_HEADER:
            raise ValueError(f"{prefix}.idx is not the index of a Megatron dataset; give another --text")
    dataset = IndexedDataset(prefix)
    lengths = dataset.sequence_lengths.tolist()
    if sum(lengths) == 0:
        raise ValueError(f"the indexed dataset {prefix} is empty; give another --text")
    tokens = np.memmap(f"{prefix}.bin", dtype=dataset.index.dtype, mode="r")
    return lengths, int(tokens[:_SCANNED_TOKENS].max())


def compile_helpers() -> None:
    """Compile ``GPTDataset``'s C++ functions unless megatron-core's installation, such as a wheel, has them.

    One process calls it, before the ranks start.
    """
    with contextlib.suppress(ImportError):
        importlib.import_module("megatron.core.datasets.helpers_cpp")
        return
    compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")
    if compiler is None:
        raise ValueError("megatron-core's dataset functions need a C++ compiler; install g++")
    source = Path(dataset_utils.__file__).with_name("helpers.cpp")
    target = source.with_name(f"helpers_cpp{sysconfig.get_config_var('EXT_SUFFIX')}")
    # torch brings pybind11's headers
    includes = [f"-I{Path(torch.__file__).parent / 'include'}", f"-I{sysconfig.get_path('include')}"]
    command = [compiler, "-O3", "-shared", "-std=c++17", "-fPIC", *includes, str(source), "-o", str(target)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        last = (result.stderr.strip().splitlines() or ["no output"])[-1]
        raise ValueError(f"{compiler} could not compile {source}: {last}")


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
