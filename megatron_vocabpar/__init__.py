"""Vocabulary parallelism for pipeline-parallel training with Megatron-LM."""

from megatron_vocabpar.moved import find_moved_modules

__version__ = "0.1.0"

find_moved_modules()
