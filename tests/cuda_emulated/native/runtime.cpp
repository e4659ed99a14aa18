// The rest of CUDA's runtime: devices, kernels that do nothing, errors.
//
// EMULATED_DEVICES: how many GPUs there are, H100s in what they say of themselves.
#include "gpu.h"

#include <dlfcn.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#undef cudaGetDeviceProperties

namespace {

constexpr int VERSION = 13000, CAPABILITY = 9, PROCESSORS = 132, THREADS = 1024, SHARED_BYTES = 232448;
thread_local int device = 0;
thread_local cudaError_t last = cudaSuccess;

struct Launch {
  dim3 grid, block;
  size_t shared = 0;
  cudaStream_t stream = nullptr;
};
thread_local Launch launch;

cudaError_t check(dim3 grid, dim3 block) {
  const auto threads = uint64_t{block.x} * block.y * block.z;
  const bool fits = grid.x && grid.y && grid.z && grid.y <= 65535 && grid.z <= 65535 && threads;
  return fits && threads <= THREADS ? cudaSuccess : gpu::remembered(cudaErrorInvalidConfiguration);
}

}  // namespace

namespace gpu {

long setting(const char* name, long otherwise) {
  const char* value = getenv(name);
  return value && *value ? atol(value) : otherwise;
}
cudaError_t remembered(cudaError_t error) { return last = error; }
int count() {
  static const int number = setting("EMULATED_DEVICES", 8);
  return number;
}
int current() { return device; }
void make_current(int to) { device = to; }
size_t memory() {
  static const size_t bytes = setting("EMULATED_MEMORY_MIB", 4096) << 20;
  return bytes;
}

}  // namespace gpu

extern "C" {

int emulated_devices() { return gpu::count(); }

cudaError_t cudaGetDeviceCount(int* out) {
  *out = gpu::count();
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* out) {
  *out = device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int to) {
  if (to < 0 || to >= gpu::count()) return gpu::remembered(cudaErrorInvalidDevice);
  device = to;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* out, int of) {
  memset(out, 0, sizeof *out);
  strcpy(out->name, "NVIDIA H100 (emulated)");
  snprintf(out->uuid.bytes, sizeof out->uuid.bytes, "emulated-gpu-%d", of);
  out->major = CAPABILITY;
  out->totalGlobalMem = gpu::memory();
  out->multiProcessorCount = PROCESSORS;
  out->warpSize = 32;
  out->maxThreadsPerBlock = THREADS;
  out->maxThreadsPerMultiProcessor = 2 * THREADS;
  out->maxBlocksPerMultiProcessor = 32;
  out->sharedMemPerBlock = 48 << 10;
  out->sharedMemPerBlockOptin = SHARED_BYTES;
  out->sharedMemPerMultiprocessor = SHARED_BYTES + 1024;
  out->regsPerBlock = out->regsPerMultiprocessor = 65536;
  out->l2CacheSize = 50 << 20;
  out->maxGridSize[0] = 0x7FFFFFFF;
  out->maxGridSize[1] = out->maxGridSize[2] = 65535;
  out->maxThreadsDim[0] = out->maxThreadsDim[1] = THREADS;
  out->maxThreadsDim[2] = 64;
  out->textureAlignment = 512;
  out->asyncEngineCount = 3;
  out->concurrentKernels = out->unifiedAddressing = out->canMapHostMemory = 1;
  out->cooperativeLaunch = out->streamPrioritiesSupported = 1;
  out->pciBusID = of + 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* out, cudaDeviceAttr which, int) {
  switch (which) {
    case cudaDevAttrComputeCapabilityMajor: *out = CAPABILITY; break;
    case cudaDevAttrComputeCapabilityMinor: *out = 0; break;
    case cudaDevAttrMultiProcessorCount: *out = PROCESSORS; break;
    case cudaDevAttrMaxThreadsPerBlock: case cudaDevAttrMaxGridDimX: *out = THREADS; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *out = 2 * THREADS; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *out = SHARED_BYTES; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *out = SHARED_BYTES + 1024; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *out = 48 << 10; break;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *out = 65535; break;
    case cudaDevAttrMaxRegistersPerBlock: *out = 65536; break;
    case cudaDevAttrWarpSize: *out = 32; break;
    case cudaDevAttrL2CacheSize: *out = 50 << 20; break;
    case cudaDevAttrClockRate: *out = 1980000; break;
    case cudaDevAttrMemoryClockRate: *out = 2619000; break;
    case cudaDevAttrGlobalMemoryBusWidth: *out = 5120; break;
    case cudaDevAttrMemoryPoolsSupported: *out = 0; break;
    default: *out = 1;
  }
  if (which == cudaDevAttrMaxGridDimX) *out = 0x7FFFFFFF;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* out, int, int) {
  *out = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
cudaError_t cudaDeviceGetPCIBusId(char* out, int size, int of) {
  snprintf(out, size, "0000:%02x:00.0", of + 1);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t*, int) { return gpu::remembered(cudaErrorNotSupported); }
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t*, void*) { return gpu::remembered(cudaErrorNotSupported); }
cudaError_t cudaRuntimeGetVersion(int* out) {
  *out = VERSION;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* out) {
  *out = VERSION;
  return cudaSuccess;
}

cudaError_t cudaGetLastError() {
  const auto error = last;
  last = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError() { return last; }
const char* cudaGetErrorName(cudaError_t error) {
  static thread_local char text[48];
  snprintf(text, sizeof text, "CUDA error %d (emulated)", static_cast<int>(error));
  return text;
}
const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "out of memory" : cudaGetErrorName(error);
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, CUstream_st* stream) {
  launch = {grid, block, shared, stream};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = launch.grid;
  *block = launch.block;
  *shared = launch.shared;
  *static_cast<cudaStream_t*>(stream) = launch.stream;
  return cudaSuccess;
}
cudaError_t cudaLaunchKernel(const void*, dim3 grid, dim3 block, void**, size_t, cudaStream_t) {
  return check(grid, block);
}
cudaError_t cudaLaunchCooperativeKernel(const void*, dim3 grid, dim3 block, void**, size_t, cudaStream_t) {
  return check(grid, block);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void*, void**) {
  return check(config->gridDim, config->blockDim);
}
cudaError_t __cudaGetKernel(void** out, const void* function) {
  *out = const_cast<void*>(function);
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(void*, dim3 grid, dim3 block, void**, size_t, cudaStream_t) {
  return check(grid, block);
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* out, const void*) {
  memset(out, 0, sizeof *out);
  out->maxThreadsPerBlock = THREADS;
  out->numRegs = 32;
  out->binaryVersion = out->ptxVersion = 10 * CAPABILITY;
  out->maxDynamicSharedSizeBytes = SHARED_BYTES;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* out, const void*, int, size_t) {
  *out = 2;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* out, const void*, int, size_t, unsigned) {
  *out = 2;
  return cudaSuccess;
}
void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
cudaError_t cudaGetSymbolAddress(void** out, const void* symbol) {
  *out = const_cast<void*>(symbol);
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** out, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  *out = dlsym(RTLD_DEFAULT, name);
  if (found) *found = *out ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

}  // extern "C"
