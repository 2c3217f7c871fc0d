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

// When a thread accessed shared memory. Epochs count barriers of the block. The time of a warp counts its other
// barriers.
struct Moment {
  int thread = -1;
  uint32_t epoch = 0, time = 0;
};

constexpr size_t kGranule = 2;  // bytes that share a shadow: the size of the smallest element

// Vector clocks of the warps of a block. clock(w, v) is the time until which warp w knows warp v: what v did before,
// and only this, is ordered before what w does now.
class Clocks {
 public:
  void begin(size_t warps) {
    warps_ = warps;
    clocks_.assign(warps * warps, 0);
    for (size_t warp = 0; warp < warps; ++warp) clock(warp, warp) = 1;
  }
  size_t warps() const { return warps_; }
  uint32_t time(size_t warp) const { return clocks_[warp * warps_ + warp]; }
  bool knows(size_t warp, size_t other, uint32_t time) const { return time < clocks_[warp * warps_ + other]; }
  void warp_barrier(size_t warp) { ++clock(warp, warp); }
  // A barrier of several warps: each knows what any of them knows.
  void barrier(const std::vector<size_t>& warps) {
    for (const size_t warp : warps) ++clock(warp, warp);
    for (size_t other = 0; other < warps_; ++other) {
      uint32_t latest = 0;
      for (const size_t warp : warps) latest = std::max(latest, clock(warp, other));
      for (const size_t warp : warps) clock(warp, other) = latest;
    }
  }

 private:
  uint32_t& clock(size_t warp, size_t other) { return clocks_[warp * warps_ + other]; }
  size_t warps_ = 0;
  std::vector<uint32_t> clocks_;
};

class Memory {
 public:
  // Resets the memory for a new block. Epochs keep counting, so all accesses of the old block are ordered before
  // accesses of the new block.
  void begin(size_t bytes, size_t threads) {
    bytes_.resize(bytes);
    shadows_.resize(bytes / kGranule + 1);
    // These bits are NaN in every floating-point type and no valid index.
    std::fill(bytes_.begin(), bytes_.end(), static_cast<unsigned char>(0xFF));
    first_copy_ += static_cast<uint32_t>(arrivals_.size());
    arrivals_.clear();
    clocks_.begin(threads / kWarp);
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
  Moment now(int thread) const { return {thread, epoch_, clocks_.time(warp_of(thread))}; }
  void barrier() {
    ++epoch_;
    tables_.clear();
  }
  void cluster_barrier() {
    barrier();
    cluster_epoch_ = epoch_;
  }
  void warp_barrier(size_t warp) { clocks_.warp_barrier(warp); }
  void named_barrier(const std::vector<size_t>& warps) { clocks_.barrier(warps); }
  // Whether a chain of barriers lies between an access and an access now by another thread.
  bool ordered(const Moment& before, const Moment& now) const {
    return before.epoch != now.epoch || before.thread == now.thread ||
           clocks_.knows(warp_of(now.thread), warp_of(before.thread), before.time);
  }

  // An access by a thread of the block. Faults if it races with another.
  void read(const void* where, size_t size, const Moment& now) {
    each(where, size, [&](Shadow& here) {
      check_arrived(here, "read");
      if (!ordered(here.writer, now))
        fault("race: read of shared memory that thread " + std::to_string(here.writer.thread) + " writes");
      if (here.read_epoch != now.epoch) {
        here.read_epoch = now.epoch;
        here.reader = {now.thread, now.time, false};
        here.table = kNoTable;
      } else if (here.table != kNoTable) {
        add(tables_[here.table + warp_of(now.thread)], now);
      } else if (warp_of(here.reader.thread) == warp_of(now.thread)) {
        add(here.reader, now);
      } else if (ordered({here.reader.thread, now.epoch, here.reader.time}, now)) {
        // What is ordered after this read is ordered after the earlier one, too.
        here.reader = {now.thread, now.time, false};
      } else {
        here.table = static_cast<uint32_t>(tables_.size());
        tables_.resize(tables_.size() + clocks_.warps());
        tables_[here.table + warp_of(here.reader.thread)] = here.reader;
        add(tables_[here.table + warp_of(now.thread)], now);
      }
    });
  }
  void write(const void* where, size_t size, const Moment& now) {
    each(where, size, [&](Shadow& here) {
      check_arrived(here, "write");
      if (!ordered(here.writer, now))
        fault("race: write of shared memory that thread " + std::to_string(here.writer.thread) + " writes");
      if (here.read_epoch == now.epoch) {
        if (here.table == kNoTable) {
          check_reader(here.reader, now);
        } else {
          for (size_t warp = 0; warp < clocks_.warps(); ++warp) check_reader(tables_[here.table + warp], now);
        }
      }
      check_others(here, "write of");
      here.writer = now;
      here.read_epoch = 0;
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
      if (here.read_epoch == now.epoch)
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
  // The last reads by a warp: by one thread, or by several since the last barrier of the warp.
  struct Reader {
    int thread = -1;
    uint32_t time = 0;
    bool several = false;
  };
  static constexpr uint32_t kNoTable = ~uint32_t{0};
  struct Shadow {
    Moment writer;
    uint32_t read_epoch = 0;  // of the reads since the last write
    Reader reader;
    // In place of `reader`, if warps have read that no barrier orders: tables_[table + warp].
    uint32_t table = kNoTable;
    uint32_t remote_epoch = 0;  // of the last read by another block, whose rank is remote_rank
    int remote_rank = 0;
    uint32_t copy = 0;  // the last copy to here; counts if it is in arrivals_
  };

  static size_t warp_of(int thread) { return static_cast<size_t>(thread) / kWarp; }
  static void add(Reader& reader, const Moment& now) {
    const bool again = reader.time == now.time;
    reader.several = again && (reader.several || reader.thread != now.thread);
    reader.thread = now.thread;
    reader.time = now.time;
  }
  void check_reader(const Reader& reader, const Moment& now) const {
    if (reader.thread < 0) return;
    const bool alone = reader.thread == now.thread && !reader.several;
    if (!alone && !clocks_.knows(warp_of(now.thread), warp_of(reader.thread), reader.time))
      fault("race: write of shared memory that thread " + std::to_string(reader.thread) + " reads");
  }

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
  std::vector<Reader> tables_;  // of this epoch
  Clocks clocks_;
  std::vector<uint32_t> arrivals_;  // epochs, by copy
  uint32_t first_copy_ = 1;         // number of arrivals_[0]
  uint32_t epoch_ = 0, cluster_epoch_ = 0, remote_epoch_ = 0;
};

}  // namespace capsfast::emulator
