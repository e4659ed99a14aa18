"""The doctor's checks in sizes for a CPU."""

from __future__ import annotations

SMALL = {
    "exponentials": {"n": 8, "columns": 3000},
    "scale_rows": {"n": 9, "hidden": 1030},
    "scatter_add_rows": {"n": 60, "hidden": 300},
    "gradients": {"n": 40, "hidden": 30},
}

TINY = {
    "large_exponentials": {"elements": 2**16},
    "large_rows": {"elements": 2**16},
    "communicators": {"large_mib": 1},
    "train": {"vocab_size": 300},
    **SMALL,
}
