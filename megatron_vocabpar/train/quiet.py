"""Keep off the terminal what Megatron warns of and the user cannot act on."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quiet_megatron() -> Iterator[None]:
    """Silence the warnings of megatron-core's modules: parts for GPUs that are missing, its own old names."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"megatron\.core")
        warnings.filterwarnings("ignore", message="Please use DTensor instead", category=FutureWarning)
        yield
