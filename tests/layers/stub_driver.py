"""Triton's real way to a launch, over a CUDA driver that does nothing but note the arguments of kernels.

``python -m tests.layers.stub_driver bfloat16`` in an environment of ``environment`` runs microbatches of one
shard, and makes every launch of a ``Launcher`` once more by Triton's own way: grid and arguments must be the
same.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

SOURCE = r"""
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>
#include <cstring>
static unsigned pointers, others;
static unsigned long long noted[64];
#define DOES_NOTHING(name, ...) CUresult name(__VA_ARGS__) { return CUDA_SUCCESS; }
extern "C" {
void expect(unsigned of_pointers, unsigned of_others) { pointers = of_pointers; others = of_others; }
unsigned long long argument(unsigned i) { return noted[i]; }
CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction, void** arguments, void**) {
  memset(noted, 0, sizeof noted);
  noted[0] = config->gridDimX; noted[1] = config->gridDimY;
  for (unsigned i = 0; i < pointers + others; ++i) memcpy(noted + 2 + i, arguments[i], i < pointers ? 8 : 4);
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute which, CUdevice) {
  *value = which == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN ? 232448 : 1; return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int* value, CUfunction_attribute which, CUfunction) {
  *value = which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0; return CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void* value, CUpointer_attribute, CUdeviceptr pointer) {
  memcpy(value, &pointer, sizeof pointer); return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext* value) { *value = (CUcontext)1; return CUDA_SUCCESS; }
CUresult cuModuleLoadData(CUmodule* value, const void*) { *value = (CUmodule)1; return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction* value, CUmodule, const char*) {
  *value = (CUfunction)1; return CUDA_SUCCESS;
}
CUresult cuCtxGetDevice(CUdevice* value) { *value = 0; return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice* value, int i) { *value = i; return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext* value, CUdevice) { *value = (CUcontext)1; return CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult, const char** value) { *value = "stub"; return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int* value) { *value = 13000; return CUDA_SUCCESS; }
DOES_NOTHING(cuCtxSetCurrent, CUcontext)
DOES_NOTHING(cuFuncSetAttribute, CUfunction, CUfunction_attribute, int)
DOES_NOTHING(cuFuncSetCacheConfig, CUfunction, CUfunc_cache)
DOES_NOTHING(cuCtxSetLimit, CUlimit, size_t)
DOES_NOTHING(cuCtxGetLimit, size_t*, CUlimit)
DOES_NOTHING(cuOccupancyMaxActiveClusters, int*, CUfunction, const CUlaunchConfig*)
DOES_NOTHING(cuTensorMapEncodeTiled, CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
  const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
  CUtensorMapL2promotion, CUtensorMapFloatOOBfill)
DOES_NOTHING(cuTensorMapEncodeIm2col, CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
  const cuuint64_t*, const int*, const int*, cuuint32_t, cuuint32_t, const cuuint32_t*, CUtensorMapInterleave,
  CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill)
}
"""


def environment(folder: Path) -> dict[str, str]:
    """Builds the driver in ``folder``, with g++ and Triton's own header; returns variables that choose it."""
    import triton

    header = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    (folder / "stub.cpp").write_text(SOURCE)
    library = folder / "libcuda.so.1"
    command = ["g++", "-shared", "-fPIC", f"-I{header}", "-o", str(library), str(folder / "stub.cpp")]
    subprocess.run(command, check=True, timeout=120)
    (folder / "libcuda.so").symlink_to(library)
    return {
        "LD_LIBRARY_PATH": f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}",
        "TRITON_LIBCUDA_PATH": str(folder),
        "TRITON_CACHE_DIR": str(folder / "cache"),
    }


def main() -> None:
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    from megatron_vocabpar.layers.kernels import dispatch
    from megatron_vocabpar.layers.kernels.launcher import Launcher

    from .test_variants import microbatches

    library = ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
    library.argument.restype = ctypes.c_ulonglong

    class Stub:
        def __init__(self) -> None:
            self.utils, self.launcher_cls = nvidia.CudaUtils(), nvidia.CudaLauncher

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_device_capability(self, device: int = 0) -> tuple[int, int]:
            return 9, 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

    driver.set_active(Stub())
    by_triton: Counter[str] = Counter()
    compared: Counter[str] = Counter()
    launch, run = Launcher.__call__, JITFunction.run

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        by_triton[self.__name__] += 1
        return run(self, *args, **options)

    def both(self: Launcher, grid: Any, tensors: Any, counts: Any, sizes: Any, *rest: Any) -> None:
        others = len(counts) + sum(type(size) is float or size != 1 for size in sizes)  # a 1 is a constant
        pointers = sum(tensor is not None for tensor in tensors)
        library.expect(pointers, others)
        noted = []
        for ready in (self._ready, {}):
            self._ready, kept = ready, self._ready
            launch(self, grid, tensors, counts, sizes, *rest)
            self._ready = kept
            noted.append([library.argument(i) for i in range(2 + pointers + others)])
        assert noted[0][2] == tensors[0].data_ptr()
        assert noted[0] == noted[1], (self._jit.__name__, noted)
        compared[self._jit.__name__] += 1

    JITFunction.run, Launcher.__call__ = counted, both
    with dispatch.use_kernels(dispatch.triton_kernels()):
        for i in microbatches(64, 256, 256, 0.3, False, getattr(torch, sys.argv[1])):
            if i == 2:
                break
    again = sum(2 * compared[name] - by_triton[name] for name in compared)
    print(f"{len(compared)} kernels, {sum(compared.values())} launches, {again} past Triton's way")
    assert again > 0


if __name__ == "__main__":
    sys.exit(main())
