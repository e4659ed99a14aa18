// Streams and events: a thread and a queue for each stream, which starts with its first job.
//
// EMULATED_DELAY_US: before one job in four, a stream waits for a random time up to this; EMULATED_SEED draws
// others. EMULATED_SLOW=default or other: before every job of the default stream, or of all the others, instead.
// Each stream has a clock of the emulated time (gpu.h), and so has the host, which takes no time but where it waits.
// CUDA_LAUNCH_BLOCKING=1: the host waits for every job. CUDA_DEVICE_MAX_CONNECTIONS=1: a job starts when those
// that were queued before it, in whichever stream, have started; one that waits for an event holds the others up.
#include "gpu.h"

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

namespace {

using gpu::Job;
using gpu::Moment;
using Lock = std::unique_lock<std::mutex>;

// Nothing here is destroyed: threads outlive main().
struct Order {
  std::mutex mutex;
  std::condition_variable moved;
  unsigned long issued = 0, started = 0;
  gpu::Moment clock = 0;  // when the last one of them started
};
Order& hardware_queue() {
  static auto* order = new Order;
  return *order;
}
bool one_connection() {
  static const bool one = gpu::setting("CUDA_DEVICE_MAX_CONNECTIONS", 8) == 1;
  return one;
}

// The latest moment that the host has waited for.
std::atomic<Moment>& host_clock() {
  static auto* clock = new std::atomic<Moment>(0);
  return *clock;
}
thread_local int muted = 0;
void host_sees(Moment moment) {
  auto& clock = host_clock();
  Moment before = clock;
  while (!muted && before < moment && !clock.compare_exchange_weak(before, moment)) {
  }
}

struct Item {
  Job job;
  Moment issued, lasts;
  bool blocks;              // the hardware queue goes on when it has ended, not when it has started
  unsigned long place = 0;  // in that queue
};

class Stream {
 public:
  Stream(int device, unsigned number, unsigned flags, int priority, bool is_default)
      : device(device), number(number), flags(flags), priority(priority), is_default(is_default) {}

  const int device;
  const unsigned number, flags;
  const int priority;
  const bool is_default;

  void push(Job job, bool blocks, Moment lasts = 0) {
    Item item{std::move(job), host_clock(), lasts, blocks};
    Lock order(hardware_queue().mutex, std::defer_lock);
    if (one_connection()) {
      order.lock();
      item.place = hardware_queue().issued++;
    }
    Lock lock(mutex_);
    if (!pushed_++) std::thread([this] { serve(); }).detach();
    items_.push_back(std::move(item));
    changed_.notify_all();
  }
  void wait() {
    Lock lock(mutex_);
    const auto target = pushed_;
    changed_.wait(lock, [&] { return done_ >= target; });
    host_sees(clock_);
  }
  bool idle() {
    Lock lock(mutex_);
    return done_ == pushed_;
  }

 private:
  void serve() {
    gpu::make_current(device);
    Moment& clock = gpu::clock();
    std::mt19937 random(gpu::setting("EMULATED_SEED", 0) * 1009 + number * 31 + getpid());
    while (true) {
      Item item = next();
      pause(random);
      gpu::at_least(clock, item.issued);
      auto& order = hardware_queue();
      if (one_connection()) {
        Lock lock(order.mutex);
        order.moved.wait(lock, [&] { return order.started == item.place; });
        gpu::at_least(clock, order.clock);
      }
      if (!item.blocks) started(item);
      item.job();
      if (item.blocks) started(item);
      item.job = nullptr;
      clock += item.lasts;
      Lock lock(mutex_);
      clock_ = clock;
      done_++;
      changed_.notify_all();
    }
  }
  Item next() {
    Lock lock(mutex_);
    changed_.wait(lock, [&] { return !items_.empty(); });
    Item item = std::move(items_.front());
    items_.pop_front();
    return item;
  }
  void started(const Item& item) {
    if (!one_connection()) return;
    auto& order = hardware_queue();
    Lock lock(order.mutex);
    order.started = item.place + 1;
    order.clock = gpu::clock();
    order.moved.notify_all();
  }
  void pause(std::mt19937& random) const {
    static const long most_us = gpu::setting("EMULATED_DELAY_US", 0);
    static const char* slow = getenv("EMULATED_SLOW");
    if (most_us == 0) return;
    const bool now = slow ? is_default == !strcmp(slow, "default") : random() % 4 == 0;
    if (now) usleep(random() % most_us);
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Item> items_;
  unsigned long pushed_ = 0, done_ = 0;
  Moment clock_ = 0;  // behind what is done
};

std::mutex& registry_mutex() {
  static auto* mutex = new std::mutex;
  return *mutex;
}
std::vector<Stream*>& streams() {
  static auto* all = new std::vector<Stream*>;
  return *all;
}

Stream* create(unsigned flags, int priority, bool is_default) {
  auto* stream = new Stream(gpu::current(), streams().size(), flags, priority, is_default);
  streams().push_back(stream);
  return stream;
}

Stream* resolve(cudaStream_t handle) {
  if (handle != nullptr && handle != cudaStreamLegacy && handle != cudaStreamPerThread)
    return reinterpret_cast<Stream*>(handle);
  Lock lock(registry_mutex());
  for (auto* stream : streams())
    if (stream->is_default && stream->device == gpu::current()) return stream;
  return create(0, 0, true);
}

// One record of an event: it outlives the event, and a later record, while a stream waits for it.
struct Record {
  std::mutex mutex;
  std::condition_variable happened;
  bool done = false;
  Moment at = 0;

  void happens() {
    Lock lock(mutex);
    done = true;
    at = gpu::clock();
    happened.notify_all();
  }
  Moment wait() {
    Lock lock(mutex);
    happened.wait(lock, [&] { return done; });
    return at;
  }
  bool has_happened() {
    Lock lock(mutex);
    return done;
  }
};
struct Event {
  unsigned flags = 0;
  std::mutex mutex;
  std::shared_ptr<Record> latest_;

  std::shared_ptr<Record> latest() {  // null before the first
    Lock lock(mutex);
    return latest_;
  }
  std::shared_ptr<Record> renewed() {
    auto record = std::make_shared<Record>();
    Lock lock(mutex);
    return latest_ = record;
  }
};
Event& resolve(cudaEvent_t handle) { return *reinterpret_cast<Event*>(handle); }

void (*counter)(int) = nullptr;

}  // namespace

namespace gpu {

Moment& clock() {
  thread_local Moment of_stream = 0;
  return of_stream;
}
void enqueue(cudaStream_t handle, Job job, Moment lasts) {
  static const bool blocking = setting("CUDA_LAUNCH_BLOCKING", 0) != 0;
  auto* stream = resolve(handle);
  stream->push(std::move(job), false, lasts);
  if (blocking) stream->wait();
}
void drain(cudaStream_t stream) { resolve(stream)->wait(); }
void drain_device() {
  std::vector<Stream*> all;
  {
    Lock lock(registry_mutex());
    all = streams();
  }
  for (auto* stream : all)
    if (stream->device == current()) stream->wait();
}
void host_waits(Wait why) {
  if (counter == nullptr || muted) return;
  muted++;
  counter(static_cast<int>(why));
  muted--;
}

}  // namespace gpu

extern "C" {

// For site/emulation.py.
void emulated_enqueue(void* stream, void (*job)(unsigned long), unsigned long number, size_t bytes,
                      double operations) {
  gpu::enqueue(static_cast<cudaStream_t>(stream), [=] { job(number); }, gpu::lasting(bytes, operations));
}
void emulated_count_waits(void (*told)(int)) { counter = told; }
void emulated_mute(int change) { muted += change; }  // this thread's waits are the stand-in's own, not the host's

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* out, unsigned flags, int priority) {
  Lock lock(registry_mutex());
  *out = reinterpret_cast<cudaStream_t>(create(flags, priority, false));
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* out, unsigned flags) {
  return cudaStreamCreateWithPriority(out, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t* out) { return cudaStreamCreateWithPriority(out, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return resolve(stream)->idle() ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  gpu::host_waits(gpu::Wait::stream);
  gpu::drain(stream);
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  gpu::host_waits(gpu::Wait::device);
  gpu::drain_device();
  return cudaSuccess;
}
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* out) {
  *out = resolve(stream)->priority;
  return cudaSuccess;
}
cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned* out) {
  *out = resolve(stream)->flags;
  return cudaSuccess;
}
cudaError_t cudaStreamGetDevice(cudaStream_t stream, int* out) {
  *out = resolve(stream)->device;
  return cudaSuccess;
}
cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* out) {
  *out = resolve(stream)->number;
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* out) {
  *out = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* number,
                                     cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  if (status) *status = cudaStreamCaptureStatusNone;
  if (number) *number = 0;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) {
  return gpu::remembered(cudaErrorNotSupported);
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  gpu::enqueue(stream, [=] { function(data); });
  return cudaSuccess;
}
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* data, unsigned) {
  gpu::enqueue(stream, [=] { function(stream, cudaSuccess, data); });
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned flags) {
  auto* event = new Event;
  event->flags = flags;
  *out = reinterpret_cast<cudaEvent_t>(event);
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* out) { return cudaEventCreateWithFlags(out, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete &resolve(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  resolve(stream)->push([record = resolve(event).renewed()] { record->happens(); }, false);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  const auto record = resolve(event).latest();
  if (record) resolve(stream)->push([record] { gpu::at_least(gpu::clock(), record->wait()); }, true);
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  const auto record = resolve(event).latest();
  return !record || record->has_happened() ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  gpu::host_waits(gpu::Wait::event);
  const auto record = resolve(event).latest();
  if (record) host_sees(record->wait());
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* out_ms, cudaEvent_t from, cudaEvent_t to) {
  const auto start = resolve(from).latest(), end = resolve(to).latest();
  if ((resolve(from).flags | resolve(to).flags) & cudaEventDisableTiming || !start || !end)
    return gpu::remembered(cudaErrorInvalidResourceHandle);
  if (!start->has_happened() || !end->has_happened()) return cudaErrorNotReady;
  *out_ms = (end->wait() - start->wait()) / 1e6;
  return cudaSuccess;
}

}  // extern "C"
