"""The door to frameworks that train with Megatron: importing this module opens it.

    verl        VERL_USE_EXTERNAL_MODULES=megatron_vocabpar.frameworks.door
    slime       --custom-megatron-init-path megatron_vocabpar.frameworks.door.init
    ms-swift    --external_plugins examples/ms_swift_plugin.py, which imports this module

``VOCAB_PARALLEL_FLAGS`` holds flags that go with ``--enable-vocab-parallel``. Next: ``install.py``.
"""

from __future__ import annotations

import os
from typing import Any

from megatron_vocabpar.frameworks.install import config_from, install
from megatron_vocabpar.megatron_lm.patch import installed

if installed() is None:
    install(config_from(os.environ))


def init(_: Any = None) -> None:
    """For slime, which calls a function with its arguments; the import has done everything."""
