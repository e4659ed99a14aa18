"""Keep off the terminal what other packages say on import and the user cannot act on."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Import Megatron without its warnings that Transformer Engine and Apex, for GPUs, are missing."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
        yield
