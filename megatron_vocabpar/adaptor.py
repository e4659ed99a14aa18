"""One line that lets a Megatron-LM training script understand ``--enable-vocab-parallel``.

Write ``import megatron_vocabpar.adaptor`` before any import of megatron. If the command line has none of our
options, this imports nothing of Megatron and changes nothing.

Next: ``megatron_lm/bindings.py``, the table of what is replaced.
"""

from __future__ import annotations

import sys

from megatron_vocabpar.megatron_lm.flags import config_from_argv, is_asked_for

if is_asked_for(sys.argv[1:]):
    from megatron_vocabpar.megatron_lm.patch import apply

    apply(config_from_argv(sys.argv[1:]))
