// libcuda.so.1: what torch and Triton ask of the driver; the runtime (runtime.cpp) has the answers.
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstring>

extern "C" {

int emulated_knows(const void* pointer);

CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int* out) { return CUresult(cudaDriverGetVersion(out)); }
CUresult cuDeviceGet(CUdevice* out, int which) {
  *out = which;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetCount(int* out) { return CUresult(cudaGetDeviceCount(out)); }
CUresult cuDeviceGetAttribute(int* out, CUdevice_attribute which, CUdevice device) {
  return CUresult(cudaDeviceGetAttribute(out, cudaDeviceAttr(which), device));
}
CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  if (flags) *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* out, CUdevice device) {
  *out = reinterpret_cast<CUcontext>(intptr_t{device} + 1);
  return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext* out) {
  int device = 0;
  cudaGetDevice(&device);
  return cuDevicePrimaryCtxRetain(out, device);
}
CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice* out) { return CUresult(cudaGetDevice(out)); }
CUresult cuGetErrorString(CUresult, const char** out) {
  *out = "an error of the emulated driver";
  return CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult error, const char** out) { return cuGetErrorString(error, out); }
CUresult cuPointerGetAttribute(void* out, CUpointer_attribute which, CUdeviceptr pointer) {
  if (!emulated_knows(reinterpret_cast<const void*>(pointer))) return CUDA_ERROR_INVALID_VALUE;
  if (which == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) memcpy(out, &pointer, sizeof pointer);
  return CUDA_SUCCESS;
}

// What Triton's launcher asks for. A kernel that it has compiled is launched, and does nothing.
CUresult cuModuleLoadData(CUmodule* out, const void*) {
  *out = reinterpret_cast<CUmodule>(1);
  return CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction* out, CUmodule, const char*) {
  *out = reinterpret_cast<CUfunction>(1);
  return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int* out, CUfunction_attribute which, CUfunction) {
  *out = which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t* out, CUlimit) {
  *out = 0;
  return CUDA_SUCCESS;
}
CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }
CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction, void**, void**) {
  dim3 grid{config->gridDimX, config->gridDimY, config->gridDimZ};
  dim3 block{config->blockDimX, config->blockDimY, config->blockDimZ};
  return CUresult(cudaLaunchKernel(nullptr, grid, block, nullptr, 0, config->hStream));
}

}  // extern "C"
