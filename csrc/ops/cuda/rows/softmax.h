// From dot products to coupling coefficients c and, in the backward, db, in the registers of a warp.
#pragma once

#include <cmath>

#include "votes.h"

namespace capsfast::cuda::rows {

// Softmax over the output capsules: replaces b by c times `times` and, in the backward, dc by db = c (dc - sum_j c dc)
// times `times`. counts: see standing().
template <class Tr, bool kBackward>
CAPSFAST_DEVICE void softmax(unsigned counts, Scores<Tr>& b, Scores<Tr>& dc, float times = 1.0f) {
  bool far = false;
  unrolled<Tr::slots, 2>([&](int slot, int row) { far = far | (std::fabs(b[slot][row]) > kNear); });
  if (gpu::any(far)) {
    unrolled<2>([&](int row) {
      float m = Extreme<float>::lowest;
      unrolled<Tr::slots>([&](int slot) { m = counts >> slot & 1 ? std::fmax(m, b[slot][row]) : m; });
      m = quad_max(m);
      // Only the logit of padding can exceed the maximum. The coefficient of padding may be any number but not NaN.
      unrolled<Tr::slots>([&](int slot) {
        const float x = b[slot][row] - m;
        b[slot][row] = x > 0.0f ? 0.0f : x;
      });
    });
  }
  unrolled<2>([&](int row) {
    float sum = 0.0f, mean = 0.0f;
    unrolled<Tr::slots>([&](int slot) {
      const float e = exponential(b[slot][row]);
      b[slot][row] = e;
      const float term = counts >> slot & 1 ? e : 0.0f;
      sum += term;
      if constexpr (kBackward) mean += term * dc[slot][row];
    });
    const float scale = gpu::reciprocal(quad_sum(sum));
    if constexpr (kBackward) mean = quad_sum(mean) * scale;
    unrolled<Tr::slots>([&](int slot) {
      const float c = b[slot][row] * (scale * times);
      b[slot][row] = c;
      if constexpr (kBackward) dc[slot][row] = c * (dc[slot][row] - mean);
    });
  });
}

}  // namespace capsfast::cuda::rows
