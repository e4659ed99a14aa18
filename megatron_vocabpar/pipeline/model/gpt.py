"""megatron-core's GPTModel with partitioned vocabulary layers."""

from __future__ import annotations

from megatron.core.models.gpt import GPTModel

from megatron_vocabpar.pipeline.model.stage_model import PartitionedModel


class VocabParallelGPTModel(PartitionedModel, GPTModel):
    """megatron-core's GPTModel with partitioned vocabulary layers."""
