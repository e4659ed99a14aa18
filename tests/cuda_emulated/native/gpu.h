// What the parts of the stand-in share.
//
// A GPU's memory is memory of the host, a stream is a thread that runs jobs in order. A kernel does nothing: what
// it would have written is computed by the operation's job, which Python queues behind it (site/emulation.py).
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>

namespace gpu {

using Job = std::function<void()>;

// The emulated time, in nanoseconds since the process started: what CUDA's events tell. It is a model of what
// can run beside what, and no processor of the host has a part in it: a stream's clock goes on by what each job
// lasts on a GPU of these rates, and waiting for another stream, a peer or the host takes it to the later clock.
using Moment = int64_t;
constexpr Moment LAUNCH = 2000;
constexpr double BYTES_PER_NS = 1000, OPERATIONS_PER_NS = 60000;
inline Moment lasting(size_t bytes, double operations = 0) {
  const double moved = bytes / BYTES_PER_NS, computed = operations / OPERATIONS_PER_NS;
  return LAUNCH + static_cast<Moment>(moved > computed ? moved : computed);
}
inline void at_least(Moment& clock, Moment other) { clock = clock > other ? clock : other; }
Moment& clock();  // that of the stream whose thread this is

enum class Place { host, device, pinned };

// Why the host waits; the order of the names in site/waits.py.
enum class Wait { stream, device, event, copy, pageable, release };

long setting(const char* name, long otherwise);  // an environment variable
cudaError_t remembered(cudaError_t error);       // kept for cudaGetLastError

int count();        // of devices
int current();      // this thread's device
void make_current(int device);
size_t memory();    // bytes of each device

void enqueue(cudaStream_t stream, Job job, Moment lasts = 0);  // behind what the stream holds
void drain(cudaStream_t stream);                               // the host waits for it
void drain_device();                                           // for all streams of the current device
void host_waits(Wait why);                                     // tells who counts

Place place_of(const void* pointer);

}  // namespace gpu
