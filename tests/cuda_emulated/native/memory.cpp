// Device memory and pinned memory, both of the host, and copies. What is allocated is filled with 0xFF: NaN.
//
// EMULATED_MEMORY_MIB: of each device. A copy from pageable memory is staged at once, one to it waits: the host
// has to wait for both on a GPU, and both are counted.
#include "gpu.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace {

struct Block {
  size_t size;
  int device;
  gpu::Place place;
};
struct Blocks {
  std::mutex mutex;
  std::map<const char*, Block> by_start;
  size_t used = 0;  // by this process, of its device
};
Blocks& blocks() {
  static auto* all = new Blocks;
  return *all;
}

bool find(const void* pointer, Block* out) {
  auto& all = blocks();
  std::lock_guard<std::mutex> lock(all.mutex);
  auto next = all.by_start.upper_bound(static_cast<const char*>(pointer));
  if (next == all.by_start.begin()) return false;
  const auto& [start, block] = *--next;
  if (static_cast<const char*>(pointer) >= start + block.size) return false;
  *out = block;
  return true;
}

cudaError_t allocate(void** out, size_t size, gpu::Place place) {
  auto& all = blocks();
  std::lock_guard<std::mutex> lock(all.mutex);
  const size_t charged = place == gpu::Place::device ? size : 0;
  *out = nullptr;
  if (all.used + charged > gpu::memory() || posix_memalign(out, 1 << 12, size ? size : 1))
    return gpu::remembered(cudaErrorMemoryAllocation);
  memset(*out, 0xFF, size);
  all.used += charged;
  all.by_start[static_cast<char*>(*out)] = {size, gpu::current(), place};
  return cudaSuccess;
}

bool forget(void* pointer) {
  auto& all = blocks();
  std::lock_guard<std::mutex> lock(all.mutex);
  auto found = all.by_start.find(static_cast<char*>(pointer));
  if (found == all.by_start.end()) return false;
  if (found->second.place == gpu::Place::device) all.used -= found->second.size;
  all.by_start.erase(found);
  return true;
}

void copy(void* to, const void* from, size_t size, cudaStream_t stream) {
  if (size == 0) return;
  const bool from_host = gpu::place_of(from) == gpu::Place::host, to_host = gpu::place_of(to) == gpu::Place::host;
  if (from_host || to_host) gpu::host_waits(gpu::Wait::pageable);
  if (from_host) {
    const auto* bytes = static_cast<const char*>(from);
    auto staged = std::make_shared<std::vector<char>>(bytes, bytes + size);
    gpu::enqueue(stream, [=] { memcpy(to, staged->data(), size); }, gpu::lasting(size));
  } else {
    gpu::enqueue(stream, [=] { memmove(to, from, size); }, gpu::lasting(size));
  }
  if (to_host) gpu::drain(stream);
}

}  // namespace

namespace gpu {

Place place_of(const void* pointer) {
  Block block;
  return find(pointer, &block) ? block.place : Place::host;
}

}  // namespace gpu

extern "C" {

// For freed.cpp: what a stream may overwrite from here on.
void emulated_poison(void* stream, void* start, size_t size, int device) {
  const int before = gpu::current();
  gpu::make_current(device);
  gpu::enqueue(static_cast<cudaStream_t>(stream), [=] { memset(start, 0xFF, size); });
  gpu::make_current(before);
}
// For the driver: whether CUDA knows the pointer.
int emulated_knows(const void* pointer) { return gpu::place_of(pointer) != gpu::Place::host; }

cudaError_t cudaMalloc(void** out, size_t size) { return allocate(out, size, gpu::Place::device); }
cudaError_t cudaMallocAsync(void** out, size_t size, cudaStream_t) { return cudaMalloc(out, size); }
cudaError_t cudaFree(void* pointer) {
  if (pointer == nullptr) return cudaSuccess;
  gpu::host_waits(gpu::Wait::release);
  gpu::drain_device();
  if (!forget(pointer)) return gpu::remembered(cudaErrorInvalidValue);
  free(pointer);
  return cudaSuccess;
}
cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) { return cudaFree(pointer); }
cudaError_t cudaHostAlloc(void** out, size_t size, unsigned) { return allocate(out, size, gpu::Place::pinned); }
cudaError_t cudaMallocHost(void** out, size_t size) { return cudaHostAlloc(out, size, 0); }
cudaError_t cudaFreeHost(void* pointer) {
  forget(pointer);
  free(pointer);
  return cudaSuccess;
}
cudaError_t cudaHostRegister(void* pointer, size_t size, unsigned) {
  std::lock_guard<std::mutex> lock(blocks().mutex);
  blocks().by_start[static_cast<char*>(pointer)] = {size, gpu::current(), gpu::Place::pinned};
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* pointer) {
  forget(pointer);
  return cudaSuccess;
}
cudaError_t cudaHostGetDevicePointer(void** out, void* pointer, unsigned) {
  *out = pointer;
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* out, const void* pointer) {
  memset(out, 0, sizeof *out);
  Block block;
  if (!find(pointer, &block)) {
    out->type = cudaMemoryTypeUnregistered;
    out->device = cudaInvalidDeviceId;
    out->hostPointer = const_cast<void*>(pointer);
    return cudaSuccess;
  }
  const bool pinned = block.place == gpu::Place::pinned;
  out->type = pinned ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  out->device = block.device;
  out->devicePointer = const_cast<void*>(pointer);
  out->hostPointer = pinned ? const_cast<void*>(pointer) : nullptr;
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total) {
  std::lock_guard<std::mutex> lock(blocks().mutex);
  *total = gpu::memory();
  *free_bytes = *total - blocks().used;
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind, cudaStream_t stream) {
  copy(to, from, size, stream);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind) {
  gpu::host_waits(gpu::Wait::copy);
  copy(to, from, size, nullptr);
  gpu::drain(nullptr);
  return cudaSuccess;
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size, cudaStream_t stream) {
  copy(to, from, size, stream);
  return cudaSuccess;
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind, cudaStream_t stream) {
  for (size_t row = 0; row < height; row++)
    copy(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width, stream);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* start, int value, size_t size, cudaStream_t stream) {
  gpu::enqueue(stream, [=] { memset(start, value, size); }, gpu::lasting(size));
  return cudaSuccess;
}
cudaError_t cudaMemset(void* start, int value, size_t size) {
  cudaMemsetAsync(start, value, size, nullptr);
  gpu::drain(nullptr);
  return cudaSuccess;
}

}  // extern "C"
