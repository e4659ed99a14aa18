"""Vocabulary parallelism for pipeline-parallel training with Megatron-LM."""

__version__ = "0.1.0"
