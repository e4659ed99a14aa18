"""verl's plugin, found by its entry point ``verl.plugins`` (v0.9): opens the door if it is asked to.

verl loads every plugin that is installed, so this one waits for ``VOCAB_PARALLEL_FLAGS`` in the environment,
``--enable-vocab-parallel`` or other flags. verl also forgives a plugin that fails and trains on without it,
so a door that does not open ends the process. Rank 0 says that it is on. Next: ``door.py``.
"""

from __future__ import annotations

import os
import sys

if "VOCAB_PARALLEL_FLAGS" in os.environ:
    try:
        import megatron_vocabpar.frameworks.door  # noqa: F401
    except Exception as error:
        print(f"megatron_vocabpar: vocabulary parallelism in verl: {error}", file=sys.stderr, flush=True)
        raise SystemExit(1) from error
    if os.environ.get("RANK", "0") == "0":
        print(
            f"megatron_vocabpar: on in verl: {os.environ['VOCAB_PARALLEL_FLAGS']}",
            file=sys.stderr,
            flush=True,
        )
