#include "memory.h"

#include <algorithm>

namespace capsfast::emulator {

namespace {

constexpr size_t kGranule = 2;  // bytes that share a shadow: the size of the smallest element

bool same_warp(const Moment& a, const Moment& b) { return a.thread / kWarp == b.thread / kWarp; }

bool ordered(const Moment& before, const Moment& now) {
  if (before.epoch != now.epoch || before.thread == now.thread) return true;
  return same_warp(before, now) && before.warp_epoch != now.warp_epoch;
}

}  // namespace

void Memory::begin(size_t bytes) {
  bytes_.resize(bytes);
  shadows_.resize(bytes / kGranule + 1);
  // These bits are NaN in every floating-point type and no valid index.
  std::fill(bytes_.begin(), bytes_.end(), static_cast<unsigned char>(0xFF));
  first_copy_ += static_cast<uint32_t>(arrivals_.size());
  arrivals_.clear();
  cluster_barrier();
}

unsigned char* Memory::at(size_t offset, size_t bytes, size_t alignment) {
  if (offset % alignment != 0) fault("shared memory at " + std::to_string(offset) + " is not aligned");
  if (offset > bytes_.size() || bytes > bytes_.size() - offset) {  // a negative argument became a large number
    fault(std::to_string(bytes) + " bytes of shared memory from " + std::to_string(static_cast<int64_t>(offset)) +
          " on, of " + std::to_string(bytes_.size()));
  }
  return bytes_.data() + offset;
}

template <class Each>
void Memory::each(const void* where, size_t size, const Each& visit) {
  Shadow* first = shadows_.data() + offset(where) / kGranule;
  for (Shadow* here = first; here < first + (size + kGranule - 1) / kGranule; ++here) visit(*here);
}

void Memory::check_arrived(const Shadow& here, const char* access) const {
  const uint32_t* arrived = arrival(here);
  if (arrived != nullptr && *arrived == 0)
    fault(std::string(access) + " of shared memory that belongs to a copy that was not waited for");
}

void Memory::check_others(const Shadow& here, const char* access) const {
  if (here.remote_epoch != cluster_epoch_) return;
  fault(std::string("race: ") + access + " shared memory that block " + std::to_string(here.remote_rank) +
        " of the cluster reads");
}

void Memory::read(const void* where, size_t size, const Moment& now) {
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

void Memory::write(const void* where, size_t size, const Moment& now) {
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

void Memory::read_remotely(const void* where, size_t size, int rank) {
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

uint32_t Memory::expect(const void* where, size_t size, const Moment& now) {
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

void Memory::arrives(uint32_t copy) { arrivals_[copy - first_copy_] = epoch_; }

void Memory::check_writers(const void* where, size_t size, const std::function<bool(const Moment& writer)>& released) {
  each(where, size, [&](const Shadow& here) {
    if (!released(here.writer))
      fault("copy to shared memory that thread " + std::to_string(here.writer.thread) +
            " has written and not released");
  });
}

void Memory::forget_writers(const void* where, size_t size) {
  each(where, size, [](Shadow& here) { here.writer = Moment{}; });
}

}  // namespace capsfast::emulator
