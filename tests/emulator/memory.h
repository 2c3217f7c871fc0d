// The shared memory of one block, with a shadow of every element: which threads accessed it when, and whether a copy to
// it is under way.
#pragma once

#include <bitset>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "machine.h"

namespace capsfast::emulator {

// When a thread accessed shared memory. Epochs count barriers of the block, warp epochs those of the thread's warp. Two
// accesses are ordered if there is a barrier of the block between them, or one of the warp to which both threads
// belong.
struct Moment {
  int thread = -1;
  uint32_t epoch = 0, warp_epoch = 0;
};

class Memory {
 public:
  // Starts afresh for a new block. Epochs keep counting, so that all accesses of the block before are ordered before
  // those of the new one.
  void begin(size_t bytes);
  // Faults if [offset, offset + bytes) is not in the block's memory or not aligned.
  unsigned char* at(size_t offset, size_t bytes, size_t alignment);
  size_t offset(const void* where) const {
    return static_cast<size_t>(static_cast<const unsigned char*>(where) - bytes_.data());
  }

  uint32_t epoch() const { return epoch_; }
  void barrier() { ++epoch_; }
  void cluster_barrier() { cluster_epoch_ = ++epoch_; }

  // An access by a thread of the block. Faults if it races with another.
  void read(const void* where, size_t size, const Moment& now);
  void write(const void* where, size_t size, const Moment& now);
  // A read by block `rank` of the cluster.
  void read_remotely(const void* where, size_t size, int rank);
  // Whether another block has read this memory since the last barrier of the cluster.
  bool read_by_others() const { return remote_epoch_ == cluster_epoch_; }

  // Announces an arrival: something other than a thread will write here, and is called `what` in faults. No thread may
  // access this memory before seen() for that thread. Faults if a thread has read here since the last barrier, or
  // written here in epoch `written_before` or later. Returns the arrival's number for seen().
  uint32_t expect(const void* where, size_t size, const Moment& now, uint32_t written_before, const char* what);
  void seen(uint32_t arrival, int thread);
  void seen_by_all(uint32_t arrival);

 private:
  // Which threads have read since a barrier: one, several of a warp, or threads of several warps.
  enum class Readers : uint8_t { one, warp, block };
  struct Shadow {
    Moment writer, reader;
    Readers readers = Readers::one;
    uint32_t remote_epoch = 0;  // of the last read by another block, whose rank is remote_rank
    int remote_rank = 0;
    uint32_t arrival = 0;  // the last arrival here; it counts if it is one of arrivals_
  };
  struct Arrival {
    const char* what;
    std::bitset<kMostThreads> seen = {};  // by thread
    uint32_t epoch = 0;                   // in which the first thread saw it
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
  uint32_t first_arrival_ = 1;  // number of arrivals_[0]
  uint32_t epoch_ = 0, cluster_epoch_ = 0, remote_epoch_ = 0;
};

}  // namespace capsfast::emulator
