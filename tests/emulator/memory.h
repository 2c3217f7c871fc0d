// The shared memory of one block. A shadow of every element says which threads accessed it when, and whether a copy to
// it is under way.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "machine.h"

namespace capsfast::emulator {

// When a thread accessed shared memory. Epochs count barriers of the block, warp epochs count barriers of the thread's
// warp. Two accesses are ordered if a barrier of the block lies between them, or a barrier of a warp that has both
// threads.
struct Moment {
  int thread = -1;
  uint32_t epoch = 0, warp_epoch = 0;
};

class Memory {
 public:
  // Resets the memory for a new block. Epochs keep counting, so all accesses of the old block are ordered before
  // accesses of the new block.
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

  // Announces a copy: no thread may access this memory before the copy arrives. Faults if a thread has read or written
  // here since the last barrier. Returns the number of the copy.
  uint32_t expect(const void* where, size_t size, const Moment& now);
  void arrives(uint32_t copy);

  // For bulk copies. Faults if a thread has written here and has not released what it wrote.
  void check_writers(const void* where, size_t size, const std::function<bool(const Moment& writer)>& released);
  // No thread counts as the writer of what a bulk copy has brought.
  void forget_writers(const void* where, size_t size);

 private:
  // Which threads have read since a barrier: one, several of a warp, or threads of several warps.
  enum class Readers : uint8_t { one, warp, block };
  struct Shadow {
    Moment writer, reader;
    Readers readers = Readers::one;
    uint32_t remote_epoch = 0;  // of the last read by another block, whose rank is remote_rank
    int remote_rank = 0;
    uint32_t copy = 0;  // the last copy to here; counts if it is in arrivals_
  };

  template <class Each>
  void each(const void* where, size_t size, const Each& visit);
  // The epoch in which the last copy to here arrived; 0 if it is on its way, null if there was none.
  const uint32_t* arrival(const Shadow& here) const {
    return here.copy >= first_copy_ ? &arrivals_[here.copy - first_copy_] : nullptr;
  }
  void check_arrived(const Shadow& here, const char* access) const;
  void check_others(const Shadow& here, const char* access) const;

  std::vector<unsigned char> bytes_;
  std::vector<Shadow> shadows_;
  std::vector<uint32_t> arrivals_;  // epochs, by copy
  uint32_t first_copy_ = 1;         // number of arrivals_[0]
  uint32_t epoch_ = 0, cluster_epoch_ = 0, remote_epoch_ = 0;
};

}  // namespace capsfast::emulator
