// Squash and its derivative, by the threads that have output capsules (Output). All threads of a warp call these,
// because they shuffle.
#pragma once

#include "between.h"
#include "given_join.h"

namespace capsfast::cuda {

using FourVector = Vector<GivenSize::few>;

// The index of this thread's group of four in a tensor [.., J, D] whose elements are such groups, at index n.
CAPSFAST_DEVICE int64_t four_at(const Output& at, int64_t n) { return n * at.fours + at.four; }

// s + bias.
CAPSFAST_DEVICE FourVector biased(const Squashing& squash, const Output& at, const FourVector& s) {
  FourVector to = s;
#pragma unroll
  for (int n = 0; n < GivenSize::few; ++n) {
    if (at.mine) to.value[n] = squash.biased(s.value[n], at.j, GivenSize::few * at.lane + n);
  }
  return to;
}

// squash(s + bias); 0 unless `valid`.
CAPSFAST_DEVICE FourVector squashed(const Squashing& squash, const Output& at, bool valid, const FourVector& s) {
  const FourVector x = biased(squash, at, s);
  const float n = lane_sum(product(x, x), at.lanes), f = radial<float>(squash.kind, n, static_cast<float>(squash.eps));
  FourVector to = {};
  if (valid) add(f, x, &to);
  return to;
}

// The gradient of s, if g is that of squash(s + bias); 0 unless `valid`.
CAPSFAST_DEVICE FourVector differentiated(const Squashing& squash, const Output& at, bool valid, const FourVector& s,
                                          const FourVector& g) {
  const FourVector x = biased(squash, at, s);
  const float n = lane_sum(product(x, x), at.lanes), x_g = lane_sum(product(x, g), at.lanes),
              eps = static_cast<float>(squash.eps);
  const float f = radial<float>(squash.kind, n, eps), slope = 2 * radial_derivative<float>(squash.kind, n, eps) * x_g;
  FourVector to = {};
  if (valid) {
    add(f, g, &to);
    add(slope, x, &to);
  }
  return to;
}

}  // namespace capsfast::cuda
