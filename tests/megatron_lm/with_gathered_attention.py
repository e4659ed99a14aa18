"""The checkout's training script with an attention that takes what the local one refuses, and its data.

``--sft`` trains on packed sequences, as it does with a file of conversations; ``--lengths vary`` on
microbatches of different lengths, for which no version of Megatron-LM has a flag; ``--documents short`` on
rows of several documents. Masks of the data need no other attention, so that Megatron's own sees them.
"""

from __future__ import annotations

import importlib
import runpy
import sys

import torch
from megatron.core.datasets import gpt_dataset
from megatron.core.models import backends
from megatron.training import training

from tests.gathered_attention import GatheredAttention
from tests.megatron_lm.script_name import script_of


class MaskedDataset(gpt_dataset.MockGPTDataset):
    """Rows of which more or fewer tokens count."""

    def __getitem__(self, index: int | None) -> dict[str, torch.Tensor]:
        row = super().__getitem__(index)
        counts = torch.arange(self.config.sequence_length) >= (index or 0) % 7
        return row | {"loss_mask": row["loss_mask"] * counts}


class PackedDataset(MaskedDataset):
    """Rows of three sequences, as ``SFTDataset`` has them."""

    def __getitem__(self, index: int | None) -> dict[str, torch.Tensor]:
        row, s = super().__getitem__(index), self.config.sequence_length
        ends = torch.tensor([0, s // 4, s // 2 + 4 * ((index or 0) % 3), s], dtype=torch.int32)
        lengths = ends.diff()
        row["position_ids"] = torch.cat([torch.arange(length) for length in lengths.tolist()])
        return row | {"cu_seqlens": ends, "max_seqlen": lengths.max()}


class VariableDataset(MaskedDataset):
    """Rows of four lengths in turn."""

    def __getitem__(self, index: int | None) -> dict[str, torch.Tensor]:
        length = self.config.sequence_length * (1 + (index or 0) % 4) // 4
        return {name: value[:length] for name, value in super().__getitem__(index).items()}


if __name__ == "__main__":
    gpt_dataset.MockGPTDataset = MaskedDataset
    if "--reset-attention-mask" in sys.argv:
        sys.argv.remove("--no-create-attention-mask-in-dataloader")  # which tests have
    else:
        backends.DotProductAttention = GatheredAttention
        if "--transformer-impl" not in sys.argv:  # Transformer Engine's are the default
            provider = importlib.import_module("megatron.core.extensions.transformer_engine_spec_provider")
            provider.TEDotProductAttention = GatheredAttention  # type: ignore[attr-defined]
    # Counts floating-point operations of packed sequences from 0.18 on, on a device that CUDA is asked for.
    training.update_seqlen_stats_from_cu_seqlens = lambda _: None
    if "--sft" in sys.argv:
        importlib.import_module("megatron.training.datasets.sft_dataset").SFTDataset = PackedDataset
    if "--lengths" in sys.argv:
        at = sys.argv.index("--lengths")
        del sys.argv[at : at + 2]
        gpt_dataset.MockGPTDataset = VariableDataset
    if "--documents" in sys.argv:
        at = sys.argv.index("--documents")
        del sys.argv[at : at + 2]
        gpt_dataset.MockGPTLowLevelDataset.max_sequence_length = 24
    runpy.run_module(script_of(sys.argv), run_name="__main__")
