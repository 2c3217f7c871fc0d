// A thread's components of a vote or an output capsule, in registers.
#pragma once

#include <cmath>
#include <cstdint>

#include "coupling.h"
#include "given_plan.h"

namespace capsfast::cuda {

using Four = Run<float, GivenSize::few>;

CAPSFAST_DEVICE void narrow(float x, float* to) { *to = x; }
CAPSFAST_DEVICE void narrow(float x, BFloat16* to) { to->bits = float_to_bf16(x); }
CAPSFAST_DEVICE void narrow(float x, Float16* to) { to->bits = float_to_half(x); }

// kCount components, in groups of four. The groups may be in another order than in memory (Spot::four), which is the
// same for all vectors of a thread.
template <int kCount>
struct Vector {
  static constexpr int numbers = kCount, fours = kCount / GivenSize::few;
  float value[kCount];

  CAPSFAST_DEVICE Four four(int n) const {
    return {value[4 * n], value[4 * n + 1], value[4 * n + 2], value[4 * n + 3]};
  }
  CAPSFAST_DEVICE void set_four(int n, const Four& x) {
#pragma unroll
    for (int k = 0; k < GivenSize::few; ++k) value[GivenSize::few * n + k] = x.value[k];
  }
};

template <int kCount>
CAPSFAST_DEVICE float product(const Vector<kCount>& a, const Vector<kCount>& b) {
  float sum[2] = {0.0f, 0.0f};  // two chains of additions, to hide their latency
#pragma unroll
  for (int n = 0; n < kCount; ++n) sum[n / 4 % 2] += a.value[n] * b.value[n];
  return sum[0] + sum[1];
}

template <int kCount>
CAPSFAST_DEVICE Vector<kCount> scaled(float factor, const Vector<kCount>& x) {
  Vector<kCount> to;
#pragma unroll
  for (int n = 0; n < kCount; ++n) to.value[n] = factor * x.value[n];
  return to;
}

// to += factor x.
template <int kCount>
CAPSFAST_DEVICE void add(float factor, const Vector<kCount>& x, Vector<kCount>* to) {
#pragma unroll
  for (int n = 0; n < kCount; ++n) to->value[n] += factor * x.value[n];
}

// What the kernels are compiled for: the element type of the votes, how many components of a vote a thread has, and the
// exchange.
template <class E, int kNumbers, Exchange kExchange>
struct GivenTraits {
  using Type = E;
  using Numbers = Vector<kNumbers>;
  static constexpr int numbers = kNumbers;
  static constexpr int unit =
      kNumbers * static_cast<int>(sizeof(E)) < 16 ? kNumbers : 16 / static_cast<int>(sizeof(E));  // loaded at once
  static constexpr int units = kNumbers / unit;
  static constexpr Exchange exchange = kExchange;
  static constexpr bool in = kExchange == Exchange::none;  // softmax over the input capsules
  // Votes of a thread at a time, and the most threads of a block.
  static constexpr int forward = given_votes(kExchange, kNumbers, false),
                       backward = given_votes(kExchange, kNumbers, true);
  static constexpr int forward_threads = 2 * given_threads(kNumbers, false),
                       backward_threads = 2 * given_threads(kNumbers, true);
  using Unit = Run<E, unit>;
};

}  // namespace capsfast::cuda
