// Memory of a call: aligned buffers, and sums that keep what their additions round off.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>

namespace capsfast {

// Sums that a pass adds to. `low` keeps what additions to `high` round off, so that the error of a sum over many chunks
// stays that of one chunk. Null if the sum is not wanted.
template <class T>
struct Sum {
  T* high = nullptr;
  T* low = nullptr;
};

struct Free {
  void operator()(void* p) const { std::free(p); }
};

// With CAPSFAST_POISON=1 fresh memory is filled with NaN. In the tests this shows memory that is read before it is
// written.
inline bool poisoned() {
  static const bool asked = [] {
    const char* value = std::getenv("CAPSFAST_POISON");
    return value != nullptr && value[0] == '1';
  }();
  return asked;
}

// Uninitialised memory that starts at a cache line.
template <class T>
class Buffer {
 public:
  explicit Buffer(int64_t count) {
    const size_t bytes = (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
    memory_.reset(static_cast<T*>(std::aligned_alloc(64, std::max<size_t>(bytes, 64))));
    if (memory_ == nullptr) throw std::bad_alloc();
    if (poisoned()) std::fill_n(memory_.get(), count, std::numeric_limits<T>::quiet_NaN());
  }
  T* get() const { return memory_.get(); }

 private:
  std::unique_ptr<T, Free> memory_;
};

// `count` sums, each as high + low, where low is what additions to high rounded off.
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
