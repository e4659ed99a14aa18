// Poisons memory that torch's caching allocator has taken back, when its stream allocates the next time: from
// then on that stream may write there. What another stream still reads, without record_stream or an event that
// holds it, turns into NaN.
#include <c10/cuda/CUDACachingAllocator.h>

#include <map>
#include <mutex>
#include <utility>
#include <vector>

extern "C" {

void emulated_poison(void* stream, void* start, size_t size, int device);

void emulated_watch_allocator() {
  using Entry = c10::CachingDeviceAllocator::TraceEntry;
  using Range = std::pair<size_t, size_t>;  // start, size
  static auto* mutex = new std::mutex;
  static auto* freed = new std::map<void*, std::vector<Range>>;  // by stream
  c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker([](const Entry& entry) {
    std::lock_guard<std::mutex> lock(*mutex);
    void* stream = entry.stream_;
    if (entry.action_ == Entry::FREE_COMPLETED) (*freed)[stream].emplace_back(entry.addr_, entry.size_);
    if (entry.action_ == Entry::ALLOC) {
      for (const auto& [start, size] : (*freed)[stream])
        emulated_poison(stream, reinterpret_cast<void*>(start), size, entry.device_);
      (*freed)[stream].clear();
    }
    if (entry.action_ == Entry::SEGMENT_FREE) {  // back to CUDA: no memory of ours any more
      for (auto& [_, ranges] : *freed) {
        std::erase_if(ranges, [&](const Range& range) {
          return range.first >= entry.addr_ && range.first < entry.addr_ + entry.size_;
        });
      }
    }
  });
}

}  // extern "C"
