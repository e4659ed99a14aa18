"""Vocabulary parallelism for pipeline-parallel training with Megatron-LM."""

from megatron_vocabpar import _moved

__version__ = "0.1.0"

_moved.install()
