// The shared memory of one block. A shadow of every element says which threads accessed it when, and whether a copy to
// it is under way.
#pragma once

#include <algorithm>
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

constexpr size_t kGranule = 2;  // bytes that share a shadow: the size of the smallest element

inline bool same_warp(const Moment& a, const Moment& b) { return a.thread / kWarp == b.thread / kWarp; }

inline bool ordered(const Moment& before, const Moment& now) {
  if (before.epoch != now.epoch || before.thread == now.thread) return true;
  return same_warp(before, now) && before.warp_epoch != now.warp_epoch;
}

class Memory {
 public:
  // Resets the memory for a new block. Epochs keep counting, so all accesses of the old block are ordered before
  // accesses of the new block.
  void begin(size_t bytes) {
    bytes_.resize(bytes);
    shadows_.resize(bytes / kGranule + 1);
    // These bits are NaN in every floating-point type and no valid index.
    std::fill(bytes_.begin(), bytes_.end(), static_cast<unsigned char>(0xFF));
    first_copy_ += static_cast<uint32_t>(arrivals_.size());
    arrivals_.clear();
    cluster_barrier();
  }
  // Faults if [offset, offset + bytes) is not in the block's memory or not aligned.
  unsigned char* at(size_t offset, size_t bytes, size_t alignment) {
    if (offset % alignment != 0) fault("shared memory at " + std::to_string(offset) + " is not aligned");
    if (offset > bytes_.size() || bytes > bytes_.size() - offset) {  // a negative argument became a large number
      fault(std::to_string(bytes) + " bytes of shared memory from " + std::to_string(static_cast<int64_t>(offset)) +
            " on, of " + std::to_string(bytes_.size()));
    }
    return bytes_.data() + offset;
  }
  size_t offset(const void* where) const {
    return static_cast<size_t>(static_cast<const unsigned char*>(where) - bytes_.data());
  }

  uint32_t epoch() const { return epoch_; }
  void barrier() { ++epoch_; }
  void cluster_barrier() { cluster_epoch_ = ++epoch_; }

  // An access by a thread of the block. Faults if it races with another.
  void read(const void* where, size_t size, const Moment& now) {
    each(where, size, [&](Shadow& here) {
      check_arrived(here, "read");
      if (!ordered(here.writer, now))
        fault("race: read of shared memory that thread " + std::to_string(here.writer.thread) + " writes");
      if (here.reader.epoch != now.epoch) {
        here.readers = Readers::one;
      } else if (!same_warp(here.reader, now)) {
        here.readers = Readers::block;
      } else if (here.readers != Readers::block && here.reader.warp_epoch != now.warp_epoch) {
        here.readers = Readers::one;
      } else if (here.readers != Readers::block && here.reader.thread != now.thread) {
        here.readers = Readers::warp;
      }
      here.reader = now;
    });
  }
  void write(const void* where, size_t size, const Moment& now) {
    each(where, size, [&](Shadow& here) {
      check_arrived(here, "write");
      if (!ordered(here.writer, now))
        fault("race: write of shared memory that thread " + std::to_string(here.writer.thread) + " writes");
      const bool others =
          here.readers == Readers::block || (here.readers == Readers::warp && here.reader.warp_epoch == now.warp_epoch);
      if (!ordered(here.reader, now) || (here.reader.epoch == now.epoch && others)) {
        fault("race: write of shared memory that thread " + std::to_string(here.reader.thread) + " reads");
      }
      check_others(here, "write of");
      here.writer = now;
      here.reader = Moment{};
    });
  }
  // A read by block `rank` of the cluster.
  void read_remotely(const void* where, size_t size, int rank) {
    remote_epoch_ = cluster_epoch_;
    each(where, size, [&](Shadow& here) {
      const uint32_t* arrived = arrival(here);
      if (arrived != nullptr && (*arrived == 0 || *arrived >= cluster_epoch_)) {
        fault(
            "read of another block's shared memory that belonged to a copy that was not waited for at the last barrier of "
            "the cluster");
      }
      if (here.writer.epoch >= cluster_epoch_) {
        fault("race: read of another block's shared memory that its thread " + std::to_string(here.writer.thread) +
              " writes");
      }
      here.remote_epoch = cluster_epoch_;
      here.remote_rank = rank;
    });
  }
  // Whether another block has read this memory since the last barrier of the cluster.
  bool read_by_others() const { return remote_epoch_ == cluster_epoch_; }

  // Announces a copy: no thread may access this memory before the copy arrives. Faults if a thread has read or written
  // here since the last barrier. Returns the number of the copy.
  uint32_t expect(const void* where, size_t size, const Moment& now) {
    const uint32_t name = first_copy_ + static_cast<uint32_t>(arrivals_.size());
    // Before a possible fault, because shadows may already have this name, and it must not be used again.
    arrivals_.push_back(0);
    each(where, size, [&](Shadow& here) {
      check_arrived(here, "overwriting");
      if (here.writer.epoch >= epoch_)
        fault("race: copy to shared memory that thread " + std::to_string(here.writer.thread) + " writes");
      if (here.reader.epoch == now.epoch)
        fault("race: copy to shared memory that thread " + std::to_string(here.reader.thread) + " reads");
      check_others(here, "copy to");
      here.copy = name;
    });
    return name;
  }
  void arrives(uint32_t copy) { arrivals_[copy - first_copy_] = epoch_; }

  // For bulk copies. Faults if a thread has written here and has not released what it wrote.
  void check_writers(const void* where, size_t size, const std::function<bool(const Moment& writer)>& released) {
    each(where, size, [&](const Shadow& here) {
      if (!released(here.writer))
        fault("copy to shared memory that thread " + std::to_string(here.writer.thread) +
              " has written and not released");
    });
  }
  // No thread counts as the writer of what a bulk copy has brought.
  void forget_writers(const void* where, size_t size) {
    each(where, size, [](Shadow& here) { here.writer = Moment{}; });
  }

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
  void each(const void* where, size_t size, const Each& visit) {
    Shadow* first = shadows_.data() + offset(where) / kGranule;
    for (Shadow* here = first; here < first + (size + kGranule - 1) / kGranule; ++here) visit(*here);
  }
  // The epoch in which the last copy to here arrived; 0 if it is on its way, null if there was none.
  const uint32_t* arrival(const Shadow& here) const {
    return here.copy >= first_copy_ ? &arrivals_[here.copy - first_copy_] : nullptr;
  }
  void check_arrived(const Shadow& here, const char* access) const {
    const uint32_t* arrived = arrival(here);
    if (arrived != nullptr && *arrived == 0)
      fault(std::string(access) + " of shared memory that belongs to a copy that was not waited for");
  }
  void check_others(const Shadow& here, const char* access) const {
    if (here.remote_epoch != cluster_epoch_) return;
    fault(std::string("race: ") + access + " shared memory that block " + std::to_string(here.remote_rank) +
          " of the cluster reads");
  }

  std::vector<unsigned char> bytes_;
  std::vector<Shadow> shadows_;
  std::vector<uint32_t> arrivals_;  // epochs, by copy
  uint32_t first_copy_ = 1;         // number of arrivals_[0]
  uint32_t epoch_ = 0, cluster_epoch_ = 0, remote_epoch_ = 0;
};

}  // namespace capsfast::emulator
