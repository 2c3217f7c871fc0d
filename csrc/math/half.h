// Converts bfloat16 and float16 bits to float and back, rounding to nearest even. The host code has no branches, so
// that the compiler can turn a loop over it into vector code. A GPU has instructions for three of the conversions.
#pragma once

#include <cstdint>
#include <cstring>

#include "host_device.h"

namespace capsfast {

CAPSFAST_HOST_DEVICE inline __attribute__((always_inline)) float float_of_bits(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, sizeof(x));
  return x;
}

CAPSFAST_HOST_DEVICE inline __attribute__((always_inline)) uint32_t bits_of_float(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof(bits));
  return bits;
}

CAPSFAST_HOST_DEVICE inline __attribute__((always_inline)) float bf16_to_float(uint16_t h) {
  return float_of_bits(static_cast<uint32_t>(h) << 16);
}

CAPSFAST_HOST_DEVICE inline __attribute__((always_inline)) uint16_t float_to_bf16(float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  uint16_t h;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(x));
  return h;
#else
  const uint32_t bits = bits_of_float(x);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>(x != x ? 0x7FC0u : rounded);
#endif
}

CAPSFAST_HOST_DEVICE inline __attribute__((always_inline)) float half_to_float(uint16_t h) {
#if defined(__CUDA_ARCH__)
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
  return x;
#else
  const uint32_t sign = (static_cast<uint32_t>(h) & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(h) & 0x7FFFu;
  // The exponent bias of float is 112 more than the bias of float16. The product also normalises subnormal numbers.
  const float scaled = float_of_bits(magnitude << 13) * 0x1p112f;
  const uint32_t finite = bits_of_float(scaled);
  const uint32_t special = (magnitude << 13) | 0x7F800000u;  // inf and NaN
  return float_of_bits(sign | (magnitude >= 0x7C00u ? special : finite));
#endif
}

CAPSFAST_HOST_DEVICE inline __attribute__((always_inline)) uint16_t float_to_half(float x) {
#if defined(__CUDA_ARCH__)
  uint16_t h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
  return h;
#else
  const uint32_t bits = bits_of_float(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  // Normal results: change the exponent bias, then round to nearest even as the low 13 bits are dropped.
  const uint32_t normal = (magnitude - 0x38000000u + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
  // Subnormal results: adding 0.5 shifts the bits of the result to the low end, and the addition rounds.
  const uint32_t subnormal = bits_of_float(float_of_bits(magnitude) + 0.5f) - 0x3F000000u;
  uint32_t result = magnitude < 0x38800000u ? subnormal : normal;
  result = magnitude >= 0x477FF000u ? 0x7C00u : result;  // rounds to infinity
  result = magnitude > 0x7F800000u ? 0x7E00u : result;   // NaN
  return static_cast<uint16_t>(sign | result);
#endif
}

}  // namespace capsfast
