// What the families on tensor cores share: fragments, the TF32 parts of numbers, logits that need no maximum.
//
// Tr is what a kernel is compiled for. Tr::exact: a product of float32 numbers takes three products of their TF32
// parts.
#pragma once

#include <type_traits>

#include "warp.h"

namespace capsfast::cuda {

// The lane's elements of 16 x 8 votes, or of a sum of votes; and four elements that are loaded or stored at once.
using Accumulator = float[4];
using Four = Run<float, 4>;

CAPSFAST_DEVICE Four four(const Accumulator& x) { return {x[0], x[1], x[2], x[3]}; }
CAPSFAST_DEVICE void add(float (&sum)[4], const Four& x) {
  unrolled<4>([&](int n) { sum[n] += x.value[n]; });
}

// Calls f with a value of the type that poses and weights have in memory. Exact products are only for float.
template <class Tr, class F>
CAPSFAST_DEVICE void with_element(Storage storage, const F& f) {
  if (Tr::exact || storage == Storage::f32) {
    f(0.0f);
  } else if (storage == Storage::bf16) {
    f(BFloat16{});
  } else {
    f(Float16{});
  }
}

// Splits x, which has been an E in memory, into the nearest TF32 number, high, and the rest, low. The tensor core drops
// the bits of low that TF32 does not have, which leaves about 22 bits of x. A NaN may become a number in high, but then
// low is NaN. A 16-bit number is a TF32 number.
template <class Tr, class E = float>
CAPSFAST_DEVICE void two_parts(float x, float& high, float& low) {
  if constexpr (!std::is_same_v<E, float>) {
    high = x, low = 0.0f;
  } else if constexpr (Tr::exact) {
    high = gpu::to_tf32_or_number(x), low = x - high;
  } else {
    high = gpu::to_tf32(x), low = 0.0f;
  }
}

// The two TF32 parts of dvotes, in fewer instructions than two_parts(): bits that TF32 does not have are dropped, here
// or by the tensor core. The dropped rest has the sign of x. For two parts the rest is 4e-8 on average; for single
// parts a factor in `unscale` makes up for the rest. (Numbers without such bits have no rest, and for them the factor
// is an error: 3.5e-4 in one iteration of "identity" with a 16-bit gradient of v, which has errors of this size
// anyway.)
constexpr float kOfSingle = 1.0f + 0x1.7p-12f;  // half a unit of the last of 11 bits, for mantissas as they occur

constexpr uint32_t kTf32Bits = 0xFFFFE000u;

template <class Tr>
CAPSFAST_DEVICE void take_parts(const float (&x)[4], float (&high)[4], float (&low)[4], uint32_t mask = kTf32Bits) {
  unrolled<4>([&](int n) {
    high[n] = Tr::exact ? float_of_bits(bits_of_float(x[n]) & mask) : x[n];
    low[n] = x[n] - high[n];
  });
}

// Logits within +-kNear need no subtraction of the maximum before exp(): the exponential, a sum of 640 exponentials,
// and the product of an exponential and a gradient as small as 1e-25 neither overflow nor become 0.
constexpr float kNear = 30.0f;

}  // namespace capsfast::cuda
