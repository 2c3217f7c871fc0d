// Memory of a call: aligned buffers, and sums that keep their rounding errors.
#pragma once

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <memory>
#include <mutex>

#include "../../out_of_memory.h"

namespace capsfast {

// Sums that a pass adds to. `low` keeps the rounding errors of additions to `high`, so a sum over many chunks is as
// exact as one chunk. Null if the sum is not wanted.
template <class T>
struct Sum {
  T* high = nullptr;
  T* low = nullptr;
};

struct Free {
  void operator()(void* p) const { std::free(p); }
};

// With CAPSFAST_POISON=1 fresh memory is filled with NaN, so tests find reads before the first write.
inline bool poisoned() {
  static const bool asked = [] {
    const char* value = std::getenv("CAPSFAST_POISON");
    return value != nullptr && value[0] == '1';
  }();
  return asked;
}

// Asks for huge pages in large memory that was not touched yet. Without huge pages every 4 KiB of fresh memory cost a
// page fault, which takes longer than filling them.
inline void advise_huge_pages(void* memory, size_t bytes) {
#if defined(__linux__)
  constexpr uintptr_t kPage = 2 * 1024 * 1024;
  const uintptr_t from = (reinterpret_cast<uintptr_t>(memory) + kPage - 1) / kPage * kPage;
  const uintptr_t to = (reinterpret_cast<uintptr_t>(memory) + bytes) / kPage * kPage;
  if (to >= from + 2 * kPage) madvise(reinterpret_cast<void*>(from), to - from, MADV_HUGEPAGE);
#else
  (void)memory;
  (void)bytes;
#endif
}

// Uninitialised memory that starts at a cache line.
template <class T>
class Buffer {
 public:
  explicit Buffer(int64_t count) {
    const size_t bytes = (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
    memory_.reset(static_cast<T*>(std::aligned_alloc(64, std::max<size_t>(bytes, 64))));
    if (memory_ == nullptr) throw OutOfMemory(double(bytes));
    advise_huge_pages(memory_.get(), bytes);
    if (poisoned() && std::numeric_limits<T>::has_quiet_NaN)
      std::fill_n(memory_.get(), count, std::numeric_limits<T>::quiet_NaN());
  }
  T* get() const { return memory_.get(); }

 private:
  std::unique_ptr<T, Free> memory_;
};

// The most bytes that stay allocated from one call to the next.
constexpr int64_t kLasting = 64 * 1024 * 1024;

// A Buffer that keeps up to kLasting bytes for the next LastingBuffer, because the system clears fresh memory in every
// call. A second LastingBuffer at the same time allocates its own memory.
template <class T>
class LastingBuffer {
 public:
  explicit LastingBuffer(int64_t count) : lasting_(mutex(), std::defer_lock) {
    const size_t bytes = static_cast<size_t>(count) * sizeof(T);
    if (bytes > kLasting || !lasting_.try_lock()) {
      own_ = std::make_unique<Buffer<T>>(count);
      return;
    }
    if (last().bytes < bytes) {
      last().memory.reset();
      last().bytes = 0;
      last().memory = std::make_unique<Buffer<char>>(static_cast<int64_t>(bytes));
      last().bytes = bytes;
    }
    if (poisoned()) std::fill_n(get(), count, std::numeric_limits<T>::quiet_NaN());
  }
  T* get() const { return own_ != nullptr ? own_->get() : reinterpret_cast<T*>(last().memory->get()); }

 private:
  struct Last {
    size_t bytes = 0;
    std::unique_ptr<Buffer<char>> memory;
  };
  // Never destroyed: a thread may be in a call while the process ends.
  static std::mutex& mutex() {
    static auto* const one = new std::mutex;
    return *one;
  }
  static Last& last() {
    static auto* const one = new Last;
    return *one;
  }

  std::unique_lock<std::mutex> lasting_;
  std::unique_ptr<Buffer<T>> own_;
};

// `count` sums, each as high + low, where low has the rounding errors of additions to high.
template <class T>
class Sums {
 public:
  explicit Sums(int64_t count) : count_(count), memory_(2 * count) {}
  T* high() const { return memory_.get(); }
  T* low() const { return memory_.get() + count_; }
  Sum<T> sum() const { return {high(), low()}; }
  T total(int64_t n) const { return high()[n] + low()[n]; }
  void clear() const { std::fill_n(memory_.get(), 2 * count_, T(0)); }
  void join() const {
    for (int64_t n = 0; n < count_; ++n) high()[n] = total(n);
  }

 private:
  int64_t count_;
  Buffer<T> memory_;
};

}  // namespace capsfast
