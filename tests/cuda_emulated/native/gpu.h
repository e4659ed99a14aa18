// What the parts of the stand-in share.
//
// A GPU's memory is memory of the host, a stream is a thread that runs jobs in order. A kernel does nothing: what
// it would have written is computed by the operation's job, which Python queues behind it (site/emulation.py).
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>

namespace gpu {

using Job = std::function<void()>;

enum class Place { host, device, pinned };

// Why the host waits; the order of the names in site/waits.py.
enum class Wait { stream, device, event, copy, pageable, release };

long setting(const char* name, long otherwise);  // an environment variable
cudaError_t remembered(cudaError_t error);       // kept for cudaGetLastError

int count();        // of devices
int current();      // this thread's device
void make_current(int device);
size_t memory();    // bytes of each device

// Behind what the stream holds; how many bytes it moves is for the time that it takes.
void enqueue(cudaStream_t stream, Job job, size_t bytes = 0);
void drain(cudaStream_t stream);             // the host waits for it
void drain_device();                         // for all streams of the current device
void host_waits(Wait why);                   // tells who counts

Place place_of(const void* pointer);

}  // namespace gpu
