"""Compile the stand-in against the headers that come with torch's CUDA build.

    python tests/cuda_emulated/build.py

It makes ``build/libgpu.so`` (CUDA's runtime, cuBLAS, NCCL), ``build/libcuda.so.1`` (the driver) and
``build/libfreed.so``, for the torch of the Python that runs it. Functions of these libraries that torch links
to and nobody needs here return 0: their names are read from torch's own libraries.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).parent
NATIVE, BUILD = HERE / "native", HERE / "build"
RUNTIME = ("streams", "memory", "runtime", "nccl", "cublas")
_OF_CUDA = re.compile(r"(__cuda|cuda[A-Z]|cublas|nccl|cuFile)\w+")


def missing() -> str | None:
    """Why it cannot be built here, on one line; None if it can."""
    site = Path(sysconfig.get_paths()["purelib"])
    if shutil.which("g++") is None:
        return "there is no g++"
    if not (site / "torch/lib/libtorch_cuda.so").exists():
        return "this Python has no CUDA build of torch"
    if not (site / "nvidia/cu13/include/cuda.h").exists():
        return "this torch is not built for CUDA 13"
    return None


def symbols(file: Path, *options: str) -> set[str]:
    """Names of a library's or an object's symbols, without their versions."""
    text = subprocess.run(["nm", *options, str(file)], check=True, capture_output=True, text=True).stdout
    return {line.split()[-1].split("@")[0] for line in text.splitlines() if line.split()[-2] in "TU"}


def build() -> None:
    """Compile all three libraries."""
    site = Path(sysconfig.get_paths()["purelib"])
    torch, cuda = site / "torch", site / "nvidia/cu13/include"
    includes = [
        f"-I{path}" for path in (cuda, site / "nvidia/nccl/include", site / "triton/backends/nvidia/include")
    ]
    # The headers of 16-bit and 8-bit numbers are for nvcc; their guards keep them out.
    own_numbers = [f"-D__CUDA_{kind}_H__" for kind in ("FP16", "BF16", "FP8")] + ["-include", "numbers.h"]
    compile_ = ["g++", "-O1", "-g", "-fPIC", "-w"]
    BUILD.mkdir(exist_ok=True)
    objects = []
    for name in RUNTIME:
        objects.append(BUILD / f"{name}.o")
        _run(*compile_, "-std=c++17", *includes, *own_numbers, "-c", f"{name}.cpp", "-o", objects[-1])
    ours = set().union(*(symbols(file, "--defined-only") for file in objects))
    wanted = set().union(
        *(symbols(file, "-D", "--undefined-only") for file in (torch / "lib").glob("lib*.so"))
    )
    rest = sorted(name for name in wanted - ours if _OF_CUDA.fullmatch(name))
    stubs = BUILD / "stubs.cpp"
    stubs.write_text('extern "C" {\n' + "".join(f"long {name}() {{ return 0; }}\n" for name in rest) + "}\n")
    library = [*compile_, "-shared", "-std=c++20"]
    _run(*library, *objects, stubs, "-o", BUILD / "libgpu.so", "-lpthread", "-ldl")
    linked = [f"-L{BUILD}", "-lgpu", "-Wl,-rpath,$ORIGIN"]
    _run(*library, "-Wl,-soname,libcuda.so.1", *includes, "driver.cpp", "-o", BUILD / "libcuda.so.1", *linked)
    torch_flags = [f"-I{torch}/include", *includes, f"-L{torch}/lib", "-lc10_cuda", "-lc10"]
    _run(*library, "freed.cpp", "-o", BUILD / "libfreed.so", *torch_flags, *linked)


def _run(*command: object) -> None:
    subprocess.run([str(part) for part in command], check=True, cwd=NATIVE)


if __name__ == "__main__":
    reason = missing()
    if reason:
        sys.exit(f"the stand-in for GPUs cannot be built: {reason}")
    build()
