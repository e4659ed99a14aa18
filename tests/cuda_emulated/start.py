"""Run a Python program on the stand-in: ``python tests/cuda_emulated/start.py [-m MODULE | FILE] ...``.

Run it with the Python that ``build.py`` was run with. What the variables do is in ``README.md``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).resolve().parent


def environment(before: Mapping[str, str]) -> dict[str, str]:
    """The variables under which torch's CUDA build finds the stand-in."""
    build = HERE / "build"
    paths = [str(HERE / "site"), str(HERE.parents[1]), before.get("PYTHONPATH", "")]
    return {
        **before,
        "EMULATED_GPUS": "1",
        "LD_PRELOAD": f"{build / 'libgpu.so'} {build / 'libcuda.so.1'}",
        "LD_LIBRARY_PATH": str(build),
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",  # what it would compile are kernels
    }


if __name__ == "__main__":
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], environment(os.environ))
