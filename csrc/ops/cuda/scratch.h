// The scratch memory of a call.
#pragma once

#include <torch/headeronly/util/Exception.h>

#include <utility>

#include "../../cuda/context.h"
#include "params.h"

namespace capsfast::cuda {

class Scratch {
 public:
  explicit Scratch(const gpu::Context& context) : on_(context) {}

  // Calls describe(), which take()s all scratch memory of a call, twice: first without memory, to add up the bytes,
  // then with memory. So torch's allocator is asked only once. If scratch_apart(), describe() is called once, and every
  // take() asks the allocator.
  template <class F>
  void with(const F& describe) {
    describe();
    if (gpu::scratch_apart()) return;
    held_ = std::exchange(taken_, 0);
    memory_ = on_.scratch(held_);
    describe();
    STD_TORCH_CHECK(taken_ == held_, "capsfast: ", taken_, " bytes of scratch memory taken, ", held_, " described");
  }
  // Uninitialised or zeroed memory that is released with the context.
  template <class N>
  Global<N> take(int64_t count, bool zeroed = false) {
    constexpr int64_t kAlignment = 256;
    const int64_t bytes = count * static_cast<int64_t>(sizeof(N));
    unsigned char* at = gpu::scratch_apart() ? on_.scratch(bytes) : memory_ == nullptr ? nullptr : memory_ + taken_;
    taken_ += divide_up(bytes, kAlignment) * kAlignment;
    STD_TORCH_CHECK(memory_ == nullptr || taken_ <= held_, "capsfast: scratch memory taken that was not described");
    if (at != nullptr && zeroed) gpu::set_zero(at, bytes, on_.stream);
    return {reinterpret_cast<N*>(at), count};
  }

 private:
  const gpu::Context& on_;
  unsigned char* memory_ = nullptr;  // of the scratch tensor
  int64_t held_ = 0, taken_ = 0;     // bytes
};

}  // namespace capsfast::cuda
