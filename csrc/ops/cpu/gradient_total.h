// A gradient that is a sum over iterations, where each iteration has a backward pass of its own, the last one first.
#pragma once

#include <algorithm>
#include <cstdint>

#include "context.h"

namespace capsfast::driver {

// The pass of the last iteration writes the sum. Every other pass writes numbers of its own, and add() adds these
// numbers to the sum. If the gradient replaces the votes, only the last pass over the votes, the pass of iteration 0,
// may write there: the sum has memory of its own, and add() adds it to what iteration 0 wrote.
template <class T>
class GradientTotal {
 public:
  // gradient: contiguous, with `size` elements along its first axis; or, if lanes are positions, `rows` rows of `size`
  // positions, which are `pitch` apart. last: the last iteration. For an empty problem a pass may write nothing, which
  // counts as 0.
  GradientTotal(const Problem& p, const View& gradient, int64_t size, int64_t last, bool replaces, int64_t rows = 1,
                int64_t pitch = 0)
      : wanted_(gradient.data != nullptr),
        replaces_(replaces),
        last_(last),
        rows_(rows),
        pitch_(pitch),
        count_(pitch > 0 ? size : size * gradient.stride[0]),
        sum_memory_(wanted_ && replaces && last > 0 ? bytes_of(gradient) : 0),
        fresh_memory_(wanted_ && last > (replaces ? 1 : 0) ? bytes_of(gradient) : 0),
        gradient_(gradient),
        sum_(gradient),
        fresh_(gradient) {
    if (!wanted_) return;
    if (replaces && last > 0) sum_.data = sum_memory_.get();
    fresh_.data = fresh_memory_.get();
    if (p.empty() && last > 0) std::fill_n(fresh_memory_.get(), bytes_of(gradient), char(0));
    for (int axis = 1; axis < 4 && pitch > 0; ++axis) fresh_.stride[axis] = gradient.stride[axis] / pitch * size;
  }

  View of(int64_t t) const { return t >= last_ || !wanted_ ? sum_ : t == 0 && replaces_ ? gradient_ : fresh_; }

  void add(int64_t t) const {
    if (t >= last_ || !wanted_) return;
    t == 0 && replaces_ ? add(gradient_, sum_) : add(sum_, fresh_);
  }

 private:
  int64_t bytes_of(const View& view) const { return rows_ * count_ * int64_t(size_of(view.storage)); }

  void add(const View& to, const View& from) const {
    constexpr int64_t kTogether = 512;
    const int64_t runs = (count_ + kTogether - 1) / kTogether;
    parallel(rows_ * runs, 32, [&](int64_t begin, int64_t end) {
      T sums[kTogether], more[kTogether];
      for (int64_t n = begin; n < end; ++n) {
        const int64_t row = n / runs, at = n % runs * kTogether, size = std::min(kTogether, count_ - at);
        gather<T>(to, row * pitch_ + at, {1, 1, size}, {0, 0, 1}, sums);
        gather<T>(from, row * count_ + at, {1, 1, size}, {0, 0, 1}, more);
        for (int64_t k = 0; k < size; ++k) sums[k] += more[k];
        scatter<T>(to, row * pitch_ + at, {1, 1, size}, {0, 0, 1}, sums);
      }
    });
  }

  bool wanted_, replaces_;
  int64_t last_, rows_, pitch_, count_;
  Buffer<char> sum_memory_, fresh_memory_;
  View gradient_, sum_, fresh_;
};

}  // namespace capsfast::driver
