"""Hides Megatron's warnings that a user cannot act on."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quiet_megatron() -> Iterator[None]:
    """Silence megatron-core's warnings: missing parts for GPUs, its own old names."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"megatron\.core")
        warnings.filterwarnings("ignore", message="Please use DTensor instead", category=FutureWarning)
        yield
