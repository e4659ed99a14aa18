"""The doctor's checks in sizes for a CPU."""

from __future__ import annotations

SMALL = {
    "exponentials": {"n": 8, "columns": 3000},
    "scale_rows": {"n": 9, "hidden": 1030},
    "scatter_add_rows": {"n": 60, "hidden": 300},
}

LAYER = {"n": 96, "hidden": 64, "rows": 1024}

TINY = {
    "kernels:large_exponentials": {"elements": 2**16},
    "kernels:large_rows": {"elements": 2**16},
    "layers:output_layer": LAYER,
    "overlap:copy_beside_products": {"mib": 1, "size": 64},
    "overlap:all_reduce_beside_products": {"mib": 1, "size": 64},
    "overlap:all_to_all_beside_products": {"mib": 1, "size": 64},
    "communicators:communicators": {"large_mib": 1},
    "price:busy_gpu": {"size": 64, "count": 2, "seconds": 0.2},
    "price:waiting_kernel": {"sizes": [64, 128]},
    "price:waiting_collective": {"size": 64, "count": 2, "mib": 1},
    "training:train": {"vocab_size": 300},
} | {f"kernels:{kernel}": sizes for kernel, sizes in SMALL.items()}
