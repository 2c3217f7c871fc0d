// Small things that the kernels of all families use: unrolled loops, sums over lanes, exponentials.
#pragma once

#include <cmath>
#include <cstdint>

#include "params.h"

namespace capsfast::cuda {

using gpu::Shared;

// f(n) for n = 0 to kCount - 1, or f(n, m) for m = 0 to kMore - 1 of each n, unrolled: indices are constants in it.
template <int kCount, class F>
CAPSFAST_DEVICE void unrolled(const F& f) {
#pragma unroll
  for (int n = 0; n < kCount; ++n) f(n);
}
template <int kCount, int kMore, class F>
CAPSFAST_DEVICE void unrolled(const F& f) {
  unrolled<kCount * kMore>([&](int n) { f(n / kMore, n % kMore); });
}

// How many lanes share a dot product over D components: the smallest power of two >= D, at most 32.
CAPSFAST_DEVICE int lanes_for(int64_t D) {
  int lanes = 1;
  while (lanes < D && lanes < 32) lanes *= 2;
  return lanes;
}

// The sum over groups of `lanes` neighbouring lanes, in all of them.
template <class T>
CAPSFAST_DEVICE T lane_sum(T value, int lanes) {
  for (int mask = lanes / 2; mask > 0; mask /= 2) value += gpu::shuffle_xor(value, mask);
  return value;
}

// The sum over the four lanes of a quad, in all of them.
CAPSFAST_DEVICE float quad_sum(float x) {
  x += gpu::shuffle_xor(x, 1);
  return x + gpu::shuffle_xor(x, 2);
}
CAPSFAST_DEVICE float quad_max(float x) {
  x = std::fmax(x, gpu::shuffle_xor(x, 1));
  return std::fmax(x, gpu::shuffle_xor(x, 2));
}

template <class T>
CAPSFAST_DEVICE T larger(T a, T b) {
  return a > b ? a : b;
}

constexpr float kLog2E = 1.44269504f;

// exp(x) with half the instructions of std::exp. Rounding the product changes the result no more than rounding x does.
CAPSFAST_DEVICE float exponential(float x) { return gpu::exp2(x * kLog2E); }

// 1 / sum, or 0 if the sum is 0: then no logit is finite, and the coupling must be 0.
template <class T>
CAPSFAST_DEVICE T inverse(T sum) {
  return sum == T(0) ? T(0) : T(1) / sum;
}

// The log-sum-exp of logits with this maximum and scale.
template <class T>
CAPSFAST_DEVICE T log_sum(T max, T scale) {
  return scale == T(0) ? -Extreme<T>::infinity : max - std::log(scale);
}

}  // namespace capsfast::cuda
