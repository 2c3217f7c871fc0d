// How much of a device a kernel gets: its shared memory, and how many of its blocks run at the same time.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>

namespace capsfast::gpu {

template <class Args>
using Kernel = void (*)(Args);

// The address of a kernel, whatever its arguments.
class AnyKernel {
 public:
  template <class Args>
  AnyKernel(Kernel<Args> kernel) : address_(reinterpret_cast<const void*>(kernel)) {}
  operator const void*() const { return address_; }

 private:
  const void* address_;
};

// The questions to the device. device.h defines these functions; so does the emulator.
struct Driver {
  static int device();  // the current one
  // The most shared memory that blocks of the kernel can ask for, in bytes, and the architecture that its code was
  // compiled for, such as 75 or 90. For code translated from PTX it is the architecture of the PTX.
  struct Known {
    int shared_bytes, architecture;
  };
  static Known known(const void* kernel);
  // Sets how much shared memory blocks of the kernel may ask for on the current device.
  static void allow_shared(const void* kernel, int bytes);
  // Asks for a multiprocessor that has `bytes` of shared memory for a block of the kernel, and not more: the rest of
  // its memory is L1 cache.
  static void prefer_shared(const void* kernel, int bytes);
  static int64_t max_active_blocks(const void* kernel, int threads, int shared_bytes);
  // 0 if the kernel was compiled for an architecture without clusters.
  static int64_t max_active_clusters(const void* kernel, int size, int threads, int shared_bytes);
};

// Remembers what the device said: asking at every call would take longer than a small launch.
class Limits {
 public:
  // The limit of shared memory holds for the launches of all threads of the host, so the first question about a kernel
  // sets the limit to the most that is possible.
  Driver::Known of(AnyKernel kernel) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return about(kernel);
  }

  // See Driver::prefer_shared(). A wish only: threads of the host that launch different shapes may overwrite it.
  void prefer_shared(AnyKernel kernel, int bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    int& preferred = about(kernel).preferred;
    if (preferred != bytes) Driver::prefer_shared(kernel, bytes);
    preferred = bytes;
  }

  // How many clusters of `size` blocks the device runs at the same time. With size 0: how many blocks a multiprocessor
  // runs.
  int64_t max_active(AnyKernel kernel, int size, int threads, int shared_bytes) {
    const Question question{kernel, Driver::device(), size, threads, shared_bytes};
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto known = active_.find(question);
    if (known != active_.end()) return known->second;
    about(kernel);
    const int64_t answer = size == 0 ? Driver::max_active_blocks(kernel, threads, shared_bytes)
                                     : Driver::max_active_clusters(kernel, size, threads, shared_bytes);
    return active_[question] = answer;
  }

 private:
  struct Known : Driver::Known {
    int preferred;
  };
  Known& about(const void* kernel) {
    const int device = Driver::device();
    const auto known = known_.find({kernel, device});
    if (known != known_.end()) return known->second;
    const Driver::Known found = Driver::known(kernel);
    Driver::allow_shared(kernel, found.shared_bytes);
    return known_[{kernel, device}] = {found, 0};
  }

  using Question = std::tuple<const void*, int, int, int, int>;
  std::mutex mutex_;
  std::map<std::pair<const void*, int>, Known> known_;
  std::map<Question, int64_t> active_;  // few: memory depends on how a block is cut, not on the sizes of a call
};

inline Limits& limits() {
  static Limits& limits = *new Limits;  // never deleted: threads may launch kernels while the process ends
  return limits;
}

}  // namespace capsfast::gpu
