// NCCL over unix sockets: a connection between every two ranks of a communicator, with a thread that reads it.
//
// A call is a job of the stream that it was given. The calls of one communicator run in the order of issue,
// whatever their streams. Every rank sends every other its part and computes the result from all parts, in rank
// order; of a large all-reduce each computes a part. A call begins, in emulated time, when its last rank is there.
// A collective carries what it is; where two ranks are in different ones, NCCL would hang or mix them up: here
// both are named, and the process ends with code 97.
#include <errno.h>
#include <nccl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "gpu.h"

namespace {

using Bytes = std::vector<char>;
using Lock = std::unique_lock<std::mutex>;
constexpr int OUT_OF_ORDER = 97;
constexpr size_t LARGE = 1 << 20;  // bytes

enum Kind : uint32_t { ALL_REDUCE, ALL_GATHER, BROADCAST, REDUCE, REDUCE_SCATTER, MESSAGE, RECEIPT };
const char* const NAMES[] = {"all-reduce", "all-gather", "broadcast", "reduce", "reduce-scatter", "message", "receipt"};

struct Header {
  uint32_t kind;
  uint32_t op;
  uint64_t count;
  uint32_t type;
  int32_t root;
  gpu::Moment at = 0;  // the sender's emulated time
  uint64_t bytes = 0;  // that follow

  bool same(const Header& b) const {
    return std::tie(kind, op, count, type, root) == std::tie(b.kind, b.op, b.count, b.type, b.root);
  }
  std::string text() const {
    char out[120];
    snprintf(out, sizeof out, "%s of %lu elements of type %u, op %u, root %d", NAMES[kind], count, type, op, root);
    return out;
  }
};

size_t width(ncclDataType_t type) {
  switch (type) {
    case ncclInt8: case ncclUint8: case ncclFloat8e4m3: case ncclFloat8e5m2: return 1;
    case ncclFloat16: case ncclBfloat16: return 2;
    case ncclInt32: case ncclUint32: case ncclFloat32: return 4;
    default: return 8;
  }
}

// ---- numbers of 16 bits

struct Half {
  _Float16 bits;
  operator float() const { return bits; }
  Half(float value = 0) : bits(static_cast<_Float16>(value)) {}
};
struct Brain {
  uint16_t bits;
  operator float() const {
    const uint32_t wide = uint32_t{bits} << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
  }
  Brain(float value = 0) {
    uint32_t wide;
    memcpy(&wide, &value, sizeof wide);
    if (value != value) wide = 0x7FC00000;
    else wide += 0x7FFF + ((wide >> 16) & 1);  // to the nearest, ties to even
    bits = wide >> 16;
  }
};

template <class T, class Wide>
void fold(char* into, const char* from, size_t count, int op) {
  auto* a = reinterpret_cast<T*>(into);
  const auto* b = reinterpret_cast<const T*>(from);
  for (size_t i = 0; i < count; i++) {
    const Wide x = static_cast<Wide>(a[i]), y = static_cast<Wide>(b[i]);
    const bool nan = x != x;  // wins, as in NCCL
    switch (op) {
      case ncclMax: a[i] = T(nan || x > y ? x : y); break;
      case ncclMin: a[i] = T(nan || x < y ? x : y); break;
      case ncclProd: a[i] = T(x * y); break;
      default: a[i] = T(x + y);
    }
  }
}
template <class T, class Wide>
void divide(char* values, size_t count, int by) {
  auto* a = reinterpret_cast<T*>(values);
  for (size_t i = 0; i < count; i++) a[i] = T(static_cast<Wide>(a[i]) / by);
}
#define FOR_TYPE(type, call)                      \
  switch (type) {                                 \
    case ncclInt8: call(int8_t, int8_t); break;   \
    case ncclUint8: call(uint8_t, uint8_t); break;\
    case ncclInt32: call(int32_t, int32_t); break;\
    case ncclUint32: call(uint32_t, uint32_t); break; \
    case ncclInt64: call(int64_t, int64_t); break;\
    case ncclUint64: call(uint64_t, uint64_t); break; \
    case ncclFloat16: call(Half, float); break;   \
    case ncclBfloat16: call(Brain, float); break; \
    case ncclFloat32: call(float, float); break;  \
    case ncclFloat64: call(double, double); break;\
    default: fprintf(stderr, "[emulated nccl] no arithmetic in type %d\n", type); abort(); \
  }

Bytes reduced(const std::vector<Bytes>& parts, size_t count, ncclDataType_t type, int op) {
  Bytes total = parts[0];
  for (size_t r = 1; r < parts.size(); r++) {
#define FOLD(T, W) fold<T, W>(total.data(), parts[r].data(), count, op)
    FOR_TYPE(type, FOLD)
  }
  if (op == ncclAvg) {
#define DIVIDE(T, W) divide<T, W>(total.data(), count, parts.size())
    FOR_TYPE(type, DIVIDE)
  }
  return total;
}

// ---- connections

bool whole(int fd, void* data, size_t size, bool writes) {
  auto* at = static_cast<char*>(data);
  while (size > 0) {
    const ssize_t moved = writes ? send(fd, at, size, MSG_NOSIGNAL) : recv(fd, at, size, 0);
    if (moved < 0 && errno == EINTR) continue;
    if (moved <= 0) return false;
    at += moved;
    size -= moved;
  }
  return true;
}

struct Parcel {
  Header header;
  Bytes bytes;
};

struct Peer {
  int fd = -1;
  std::mutex sending;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Parcel> collectives, messages;
  uint64_t receipts = 0;
  gpu::Moment received_at = 0;
  bool gone = false;
};

std::pair<sockaddr_un, socklen_t> address(const std::string& name) {
  sockaddr_un out{};
  out.sun_family = AF_UNIX;  // in the abstract namespace: nothing is left behind
  memcpy(out.sun_path + 1, name.data(), name.size());
  return {out, static_cast<socklen_t>(sizeof(sa_family_t) + 1 + name.size())};
}

}  // namespace

struct ncclComm {
  std::string name;
  int rank = 0, size = 0, device = 0, splits = 0;
  std::vector<std::unique_ptr<Peer>> peers;
  std::atomic<bool> aborted{false};
  std::atomic<int> error{ncclSuccess};
  std::mutex mutex;
  std::condition_variable moved;
  uint64_t issued = 0, turn = 0;
  gpu::Moment clock = 0;  // behind its last call

  void connect_all() {
    const auto at = [&](int r) { return "emulated-nccl-" + name + "-" + std::to_string(r); };
    for (int r = 0; r < size; r++) peers.emplace_back(new Peer);
    const int listener = socket(AF_UNIX, SOCK_STREAM, 0);
    auto [mine, length] = address(at(rank));
    if (bind(listener, reinterpret_cast<sockaddr*>(&mine), length) || listen(listener, size))
      perror("[emulated nccl] listen");
    for (int r = 0; r < rank; r++) peers[r]->fd = connect_to(at(r));
    for (int waiting = size - rank - 1; waiting > 0; waiting--) {
      const int fd = accept(listener, nullptr, nullptr);
      int who = 0;
      whole(fd, &who, sizeof who, false);
      peers[who]->fd = fd;
    }
    close(listener);
    for (int r = 0; r < size; r++)
      if (r != rank) std::thread([this, r] { read_from(*peers[r]); }).detach();
  }
  int connect_to(const std::string& to) {
    auto [theirs, length] = address(to);
    while (true) {
      const int fd = socket(AF_UNIX, SOCK_STREAM, 0);
      if (connect(fd, reinterpret_cast<sockaddr*>(&theirs), length) == 0) {
        whole(fd, &rank, sizeof rank, true);
        return fd;
      }
      close(fd);
      usleep(2000);
    }
  }
  void read_from(Peer& peer) {
    Parcel parcel;
    while (whole(peer.fd, &parcel.header, sizeof parcel.header, false)) {
      const auto& header = parcel.header;
      parcel.bytes.resize(header.bytes);
      if (!whole(peer.fd, parcel.bytes.data(), parcel.bytes.size(), false)) break;
      Lock lock(peer.mutex);
      if (header.kind == RECEIPT) {
        peer.receipts++;
        gpu::at_least(peer.received_at, header.at);
      } else {
        (header.kind == MESSAGE ? peer.messages : peer.collectives).push_back(std::move(parcel));
      }
      parcel = {};
      peer.changed.notify_all();
    }
    Lock lock(peer.mutex);
    peer.gone = true;
    peer.changed.notify_all();
  }
  void post(int to, Header header, const void* data, size_t bytes) {
    header.at = gpu::clock();
    header.bytes = bytes;
    Peer& peer = *peers[to];
    Lock lock(peer.sending);
    whole(peer.fd, &header, sizeof header, true);
    whole(peer.fd, const_cast<void*>(data), bytes, true);
  }
  // The next parcel of a peer, not before which this stream goes on; false when there will be none, after the
  // communicator was aborted.
  bool take(int from, bool message, Parcel* out) {
    Peer& peer = *peers[from];
    auto& queue = message ? peer.messages : peer.collectives;
    Lock lock(peer.mutex);
    peer.changed.wait(lock, [&] { return !queue.empty() || peer.gone || aborted; });
    if (queue.empty() && !aborted) {
      fail("rank " + std::to_string(from) + " went away", ncclRemoteError);
      peer.changed.wait(lock, [&] { return aborted.load(); });  // NCCL hangs, too, until it is aborted
    }
    if (queue.empty()) return false;
    *out = std::move(queue.front());
    queue.pop_front();
    gpu::at_least(gpu::clock(), out->header.at);
    return true;
  }
  void await_receipts(int from, uint64_t number) {
    Peer& peer = *peers[from];
    Lock lock(peer.mutex);
    peer.changed.wait(lock, [&] { return peer.receipts >= number || peer.gone || aborted; });
    gpu::at_least(gpu::clock(), peer.received_at);
  }
  void fail(const std::string& what, ncclResult_t with) {
    fprintf(stderr, "[emulated nccl] communicator %s, rank %d of %d: %s\n", name.c_str(), rank, size, what.c_str());
    error = with;
  }
  void expect(const Header& mine, const Header& theirs, int from) {
    if (mine.same(theirs)) return;
    fail("out of order: here " + mine.text() + "; rank " + std::to_string(from) + ": " + theirs.text(),
         ncclInvalidUsage);
    _exit(OUT_OF_ORDER);
  }
  void abort_all() {
    aborted = true;
    {
      Lock lock(mutex);
    }
    moved.notify_all();
    for (auto& peer : peers) {
      if (peer->fd >= 0) shutdown(peer->fd, SHUT_RDWR);
      Lock lock(peer->mutex);
      peer->changed.notify_all();
    }
  }
};

namespace {

struct Call {
  Header header;
  const void* from;
  void* to;
  ncclComm* comm;
  cudaStream_t stream;
  bool sends;

  size_t bytes() const { return header.count * width(type()); }
  ncclDataType_t type() const { return ncclDataType_t(header.type); }
};

// Send every rank its piece, and take every rank's, one's own too; none after an abort.
std::vector<Bytes> exchange(ncclComm& comm, const Header& header, const std::vector<Bytes>& pieces) {
  std::vector<Bytes> received(comm.size);
  for (int r = 0; r < comm.size; r++)
    if (r != comm.rank) comm.post(r, header, pieces[r].data(), pieces[r].size());
  for (int r = 0; r < comm.size; r++) {
    Parcel parcel{{}, pieces[comm.rank]};
    if (r != comm.rank) {
      if (!comm.take(r, false, &parcel)) return {};
      comm.expect(header, parcel.header, r);
    }
    received[r] = std::move(parcel.bytes);
  }
  return received;
}

// Each rank computes a part of the sum, and sends it to the others: the same bits in an eighth of the work of 8.
void run_large_all_reduce(const Call& call) {
  auto& comm = *call.comm;
  const size_t wide = width(call.type());
  const auto begin = [&](int r) { return call.header.count * r / comm.size * wide; };
  const auto* from = static_cast<const char*>(call.from);
  std::vector<Bytes> pieces;
  for (int r = 0; r < comm.size; r++) pieces.emplace_back(from + begin(r), from + begin(r + 1));
  pieces = exchange(comm, call.header, pieces);
  if (pieces.empty()) return;
  const Bytes sum = reduced(pieces, pieces[0].size() / wide, call.type(), call.header.op);
  pieces = exchange(comm, call.header, std::vector<Bytes>(comm.size, sum));
  for (size_t r = 0; r < pieces.size(); r++)
    memcpy(static_cast<char*>(call.to) + begin(r), pieces[r].data(), pieces[r].size());
}

void run_collective(const Call& call) {
  auto& comm = *call.comm;
  if (call.header.kind == ALL_REDUCE && call.bytes() >= LARGE) return run_large_all_reduce(call);
  Header header = call.header;
  if (header.kind == REDUCE_SCATTER) header.count *= comm.size;
  const size_t in = header.count * width(call.type());
  Bytes mine(in);
  if (call.from) memcpy(mine.data(), call.from, in);
  const auto parts = exchange(comm, header, std::vector<Bytes>(comm.size, mine));
  if (parts.empty()) return;
  auto* out = static_cast<char*>(call.to);
  if (header.kind == ALL_GATHER) {
    for (int r = 0; r < comm.size; r++) memcpy(out + r * in, parts[r].data(), in);
  } else if (header.kind == BROADCAST) {
    memcpy(out, parts[header.root].data(), in);
  } else if (header.kind != REDUCE || comm.rank == header.root) {
    const Bytes total = reduced(parts, header.count, call.type(), header.op);
    const size_t skip = header.kind == REDUCE_SCATTER ? comm.rank * call.bytes() : 0;
    memcpy(out, total.data() + skip, header.kind == REDUCE_SCATTER ? call.bytes() : in);
  }
}

// The messages of a group leave before any is received; a send ends when its peer has received it.
void run_messages(ncclComm& comm, const std::vector<Call>& calls) {
  std::map<int, uint64_t> expected;
  std::deque<const Call*> to_itself;
  for (const auto& call : calls) {
    if (!call.sends) continue;
    const int peer = call.header.root;
    if (peer == comm.rank) {
      to_itself.push_back(&call);
      continue;
    }
    {
      Lock lock(comm.peers[peer]->mutex);
      if (!expected.count(peer)) expected[peer] = comm.peers[peer]->receipts;
    }
    expected[peer]++;
    comm.post(peer, call.header, call.from, call.bytes());
  }
  for (const auto& call : calls) {
    if (call.sends) continue;
    const int peer = call.header.root;
    if (peer == comm.rank) {
      memcpy(call.to, to_itself.front()->from, call.bytes());
      to_itself.pop_front();
      continue;
    }
    Parcel parcel;
    if (!comm.take(peer, true, &parcel)) return;
    Header mine = call.header, theirs = parcel.header;
    mine.root = theirs.root = peer;
    comm.expect(mine, theirs, peer);
    memcpy(call.to, parcel.bytes.data(), call.bytes());
    comm.post(peer, {RECEIPT}, nullptr, 0);
  }
  for (const auto& [peer, number] : expected) comm.await_receipts(peer, number);
}

thread_local int depth = 0;
thread_local std::vector<Call> grouped;

// One job for each communicator of a group.
void flush() {
  std::vector<std::pair<ncclComm*, std::vector<Call>>> by_comm;
  for (auto& call : grouped) {
    auto same = [&](auto& entry) { return entry.first == call.comm; };
    auto found = std::find_if(by_comm.begin(), by_comm.end(), same);
    if (found == by_comm.end()) found = by_comm.insert(by_comm.end(), {call.comm, {}});
    found->second.push_back(call);
  }
  grouped.clear();
  for (auto& entry : by_comm) {
    auto* comm = entry.first;
    auto calls = std::move(entry.second);
    uint64_t place;
    {
      Lock lock(comm->mutex);
      place = comm->issued++;
    }
    size_t bytes = 0;
    for (const auto& call : calls) bytes += call.bytes();
    auto run = [comm, calls, place, bytes] {
      {
        Lock lock(comm->mutex);
        comm->moved.wait(lock, [&] { return comm->turn == place || comm->aborted; });
        gpu::at_least(gpu::clock(), comm->clock);
      }
      if (!comm->aborted) {
        std::vector<Call> messages;
        for (const auto& call : calls) {
          if (call.header.kind == MESSAGE) messages.push_back(call);
          else run_collective(call);
        }
        run_messages(*comm, messages);
      }
      gpu::clock() += gpu::lasting(bytes);
      Lock lock(comm->mutex);
      comm->clock = gpu::clock();
      comm->turn++;
      comm->moved.notify_all();
    };
    gpu::enqueue(calls[0].stream, run);
  }
}

ncclResult_t add(ncclComm* comm, cudaStream_t stream, Kind kind, const void* from, void* to, size_t count,
                 ncclDataType_t type, int op, int root, bool sends = false) {
  if (comm->aborted) return ncclInvalidUsage;
  for (const void* pointer : {from, static_cast<const void*>(to)}) {
    if (pointer && count && gpu::place_of(pointer) == gpu::Place::host) {
      fprintf(stderr, "[emulated nccl] %s of memory of the host\n", NAMES[kind]);
      return ncclInvalidArgument;
    }
  }
  if (gpu::current() != comm->device) {
    fprintf(stderr, "[emulated nccl] %s on device %d, of a communicator of device %d\n", NAMES[kind],
            gpu::current(), comm->device);
    return ncclInvalidUsage;
  }
  grouped.push_back({{kind, uint32_t(op), count, uint32_t(type), root}, from, to, comm, stream, sends});
  if (depth == 0) flush();
  return ncclSuccess;
}

ncclResult_t make(ncclComm_t* out, int size, const std::string& name, int rank) {
  auto* comm = new ncclComm;
  comm->name = name;
  comm->rank = rank;
  comm->size = size;
  comm->device = gpu::current();
  comm->connect_all();
  *out = comm;
  return ncclSuccess;
}

}  // namespace

extern "C" {

ncclResult_t ncclGetUniqueId(ncclUniqueId* out) {
  static std::atomic<int> made{0};
  memset(out, 0, sizeof *out);
  snprintf(out->internal, 40, "%d.%ld.%d", getpid(), time(nullptr) % 100000, made++);
  return ncclSuccess;
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* out, int size, ncclUniqueId id, int rank, ncclConfig_t*) {
  return make(out, size, id.internal, rank);
}
ncclResult_t ncclCommInitRank(ncclComm_t* out, int size, ncclUniqueId id, int rank) {
  return make(out, size, id.internal, rank);
}
ncclResult_t ncclCommInitRankScalable(ncclComm_t* out, int size, int rank, int, ncclUniqueId* ids, ncclConfig_t*) {
  return make(out, size, ids[0].internal, rank);
}
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* out, ncclConfig_t*) {
  const int mine[2] = {color, key}, number = comm->splits++;
  std::vector<std::tuple<int, int>> members;  // key, rank: of the same color
  if (color >= 0) members.emplace_back(key, comm->rank);
  for (int r = 0; r < comm->size; r++)
    if (r != comm->rank) comm->post(r, {ALL_GATHER, 0, 2, ncclInt32, 0}, mine, sizeof mine);
  for (int r = 0; r < comm->size; r++) {
    if (r == comm->rank) continue;
    Parcel parcel;
    if (!comm->take(r, false, &parcel)) return ncclSystemError;
    const auto* theirs = reinterpret_cast<const int*>(parcel.bytes.data());
    if (theirs[0] == color && color >= 0) members.emplace_back(theirs[1], r);
  }
  *out = nullptr;
  if (color < 0) return ncclSuccess;
  std::sort(members.begin(), members.end());
  const auto me = std::find(members.begin(), members.end(), std::make_tuple(key, comm->rank));
  const auto name = comm->name + "/" + std::to_string(number) + "." + std::to_string(color);
  return make(out, members.size(), name, me - members.begin());
}
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  comm->abort_all();
  return ncclSuccess;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* out) {
  *out = ncclResult_t(comm->error.load());
  return ncclSuccess;
}
ncclResult_t ncclCommCount(const ncclComm_t comm, int* out) {
  *out = comm->size;
  return ncclSuccess;
}
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* out) {
  *out = comm->rank;
  return ncclSuccess;
}
ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* out) {
  *out = comm->device;
  return ncclSuccess;
}
ncclResult_t ncclGetVersion(int* out) {
  *out = NCCL_VERSION_CODE;
  return ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t error) {
  static thread_local char text[40];
  snprintf(text, sizeof text, "NCCL error %d (emulated)", static_cast<int>(error));
  return text;
}
const char* ncclGetLastError(ncclComm_t) { return "see the lines of [emulated nccl]"; }
ncclResult_t ncclGroupStart() {
  depth++;
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  if (--depth == 0) flush();
  return ncclSuccess;
}
ncclResult_t ncclMemAlloc(void** out, size_t size) {
  return cudaMalloc(out, size) == cudaSuccess ? ncclSuccess : ncclSystemError;
}
ncclResult_t ncclMemFree(void* pointer) {
  cudaFree(pointer);
  return ncclSuccess;
}

ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
  return add(comm, stream, ALL_REDUCE, from, to, count, type, op, 0);
}
ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
  return add(comm, stream, ALL_GATHER, from, to, count, type, 0, 0);
}
ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream) {
  return add(comm, stream, BROADCAST, from, to, count, type, 0, root);
}
ncclResult_t ncclBcast(void* data, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
  return add(comm, stream, BROADCAST, data, data, count, type, 0, root);
}
ncclResult_t ncclReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                        ncclComm_t comm, cudaStream_t stream) {
  return add(comm, stream, REDUCE, from, to, count, type, op, root);
}
ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream) {
  return add(comm, stream, REDUCE_SCATTER, from, to, count, type, op, 0);
}
ncclResult_t ncclSend(const void* from, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return add(comm, stream, MESSAGE, from, nullptr, count, type, 0, peer, true);
}
ncclResult_t ncclRecv(void* to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  return add(comm, stream, MESSAGE, nullptr, to, count, type, 0, peer);
}

}  // extern "C"
