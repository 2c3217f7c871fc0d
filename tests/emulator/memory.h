// The shared memory of one block, with a shadow of every element: who touched it when, and what is on its way there.
#pragma once

#include <bitset>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "machine.h"

namespace capsfast::emulator {

// When a thread of the block touched shared memory: accesses are ordered if a barrier of the block lies between them,
// or one of the warp they both belong to.
struct Moment {
  int thread = -1;
  uint32_t epoch = 0, warp_epoch = 0;
};

class Memory {
 public:
  // Of a new block. Epochs go on from the block before, so that its accesses are ordered before all that follow.
  void begin(size_t bytes);
  unsigned char* at(size_t offset, size_t bytes, size_t alignment);
  size_t offset(const void* where) const {
    return static_cast<size_t>(static_cast<const unsigned char*>(where) - bytes_.data());
  }

  uint32_t epoch() const { return epoch_; }
  void barrier() { ++epoch_; }
  void cluster_barrier() { cluster_epoch_ = ++epoch_; }

  void read(const void* where, size_t size, const Moment& now);
  void write(const void* where, size_t size, const Moment& now);
  // By block `rank` of the cluster.
  void read_remotely(const void* where, size_t size, int rank);
  // Whether another block has read here since the last barrier of the cluster.
  bool read_by_others() const { return remote_epoch_ == cluster_epoch_; }

  // Something arrives here, `what` in a fault: no thread may touch this memory before it has seen it, nobody may have
  // read there since the last barrier or written from the epoch `written_before` on. Returns a name for seen().
  uint32_t expect(const void* where, size_t size, const Moment& now, uint32_t written_before, const char* what);
  void seen(uint32_t arrival, int thread);

 private:
  enum class Readers : uint8_t { one, warp, block };  // how far apart the threads are that have read since a barrier
  struct Shadow {
    Moment writer, reader;
    Readers readers = Readers::one;
    uint32_t remote_epoch = 0;
    int remote_rank = 0;
    uint32_t arrival = 0;
  };
  struct Arrival {
    const char* what;
    std::bitset<kMostThreads> seen = {};
    uint32_t epoch = 0;  // of the first thread that saw it
  };

  template <class Each>
  void each(const void* where, size_t size, const Each& visit);
  Arrival* arrival(const Shadow& here) {
    return here.arrival >= first_arrival_ ? &arrivals_[here.arrival - first_arrival_] : nullptr;
  }
  void check_seen(const Shadow& here, int thread, const char* access);
  void check_others(const Shadow& here, const char* access) const;

  std::vector<unsigned char> bytes_;
  std::vector<Shadow> shadows_;
  std::vector<Arrival> arrivals_;
  uint32_t first_arrival_ = 1;
  uint32_t epoch_ = 0, cluster_epoch_ = 0, remote_epoch_ = 0;
};

}  // namespace capsfast::emulator
