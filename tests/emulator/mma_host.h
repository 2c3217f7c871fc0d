// Products of tensor cores, in the fragment layout of PTX's mma.m16n8k8.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "block.h"

namespace capsfast::emulator {

// The sum as the adders of tensor cores form it, with the largest error that was found on any: bits of a term below the
// 24 bits of the largest term are dropped, and so are bits of the sum that a float does not hold.
inline float truncated_sum(const double (&terms)[5]) {
  double largest = 0, plain = 0;
  for (const double term : terms) {
    largest = std::fmax(largest, std::fabs(term));
    plain += term;
  }
  if (!std::isfinite(plain) || largest == 0) return static_cast<float>(plain);
  const double unit = std::ldexp(1.0, std::ilogb(largest) - 23);
  double sum = 0;
  for (const double term : terms) sum += std::trunc(term / unit) * unit;
  const float nearest = static_cast<float>(sum);
  return std::fabs(nearest) > std::fabs(sum) ? std::nextafterf(nearest, 0.0f) : nearest;
}

}  // namespace capsfast::emulator

namespace capsfast::gpu {

// The nearest TF32 number (10 bits of mantissa), ties away from zero, as cvt.rna.tf32.f32 rounds.
inline float to_tf32(float x) {
  if (!std::isfinite(x)) return x;
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  bits = (bits + 0x1000u) & 0xFFFFE000u;
  std::memcpy(&x, &bits, 4);
  return x;
}

inline float to_tf32_or_number(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  bits = (bits + 0x1000u) & 0xFFFFE000u;
  std::memcpy(&x, &bits, 4);
  return x;
}

// c [16, 8] += a [16, 8] b [8, 8]. Each lane has 4, 4 and 2 of their elements. Drops bits of a and b that TF32 does not
// have, as tensor cores do.
inline void mma_tf32(float (&c)[4], const float (&a)[4], const float (&b)[2], int line = __builtin_LINE()) {
  Machine::current().check_tensor_cores();
  emulator::Block& block = emulator::Block::current();
  float mine[6] = {a[0], a[1], a[2], a[3], b[0], b[1]};
  static_assert(sizeof(mine) <= emulator::kSlot);
  const unsigned char* slots = block.exchange(mine, sizeof(mine), line);
  const auto of = [&](int lane, int n) {
    uint32_t bits;
    std::memcpy(&bits, slots + static_cast<size_t>(lane) * emulator::kSlot + static_cast<size_t>(n) * 4, 4);
    bits &= 0xFFFFE000u;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
  };
  const int lane = block.thread() % emulator::kWarp, group = lane / 4, quad = lane % 4;
  for (int n = 0; n < 4; ++n) {
    const int row = group + (n / 2) * 8, column = quad * 2 + n % 2;
    for (int k0 = 0; k0 < 8; k0 += 4) {
      double terms[5] = {c[n]};
      for (int k = 0; k < 4; ++k)
        terms[k + 1] = static_cast<double>(of(row % 8 * 4 + k, row / 8 + k0 / 2)) * of(column * 4 + k, 4 + k0 / 4);
      c[n] = emulator::truncated_sum(terms);
    }
  }
}

inline void mma_tf32_from_zero(float (&c)[4], const float (&a)[4], const float (&b)[2], int line = __builtin_LINE()) {
  c[0] = c[1] = c[2] = c[3] = 0.0f;
  mma_tf32(c, a, b, line);
}

}  // namespace capsfast::gpu
