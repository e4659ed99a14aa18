"""One line that lets a Megatron-LM training script understand ``--enable-vocab-parallel``.

Write ``import megatron_vocabpar.adaptor`` before any import of megatron. If the command line has none of our
options, this imports nothing of Megatron and changes nothing.

Next: ``megatron_lm/bindings.py``, the table of what is replaced.
"""

from __future__ import annotations

import os
import sys

from megatron_vocabpar.megatron_lm.flags import config_from_argv, is_asked_for

if is_asked_for(sys.argv[1:]):
    from megatron_vocabpar.megatron_lm.model_choice import decided

    argv, world_size = sys.argv[1:], int(os.environ.get("WORLD_SIZE", "1"))
    prints = os.environ.get("RANK", "0") == "0"
    config, lines = decided(config_from_argv(argv), argv, world_size, prints=prints)
    for line in lines if prints else ():
        print(f"> vocabulary parallelism: {line}")
    from megatron_vocabpar.megatron_lm.replacements import apply  # imports Megatron

    apply(config)
