// Votes of an input capsule for the samples of a tile, computed where the general kernels use them.
#pragma once

#include <cstdint>

#include "../params.h"

namespace capsfast::cuda {

// What a block works on at a time: samples [b0, b0 + samples), input capsules [i0, i0 + inputs), output capsules
// [j0, j0 + outputs).
struct Tile {
  int64_t b0, i0, j0;
  int samples, inputs, outputs;
};

// Bit n is set if sample b0 + n is in the tile and its input capsule i is not masked.
CAPSFAST_DEVICE unsigned valid_samples(const Inputs& in, const Tile& tile, int64_t i) {
  unsigned valid = (1u << tile.samples) - 1;
  if (!in.mask.data) return valid;
  for (int n = 0; n < tile.samples; ++n) {
    if (!in.mask.at(tile.b0 + n, i)) valid &= ~(1u << n);
  }
  return valid;
}

// E is the element type of u, weight and votes. kVotes: the votes are an input (route_votes).
template <class T, class E, bool kVotes>
struct Votes {
  // votes[n] = component d of the vote of input capsule i for output capsule j, in sample b0 + n. 0 if bit n of `valid`
  // is not set, even if inputs hold NaN.
  template <int kSamples>
  static CAPSFAST_DEVICE void make(const Inputs& in, const Tile& tile, unsigned valid, int64_t i, int64_t j, int64_t d,
                                   T (&votes)[kSamples]) {
    const Global<const E> matrix = in.matrix.data.as<const E>();
    const int64_t* stride = in.matrix.stride;
    if constexpr (kVotes) {
#pragma unroll
      for (int n = 0; n < kSamples; ++n) {
        votes[n] = T(0);
        if (valid >> n & 1)
          votes[n] = widened(matrix[(tile.b0 + n) * stride[0] + i * stride[1] + j * stride[2] + d * stride[3]]);
      }
    } else {
      const Global<const E> u = in.u.data.as<const E>();
      const int64_t row = i * stride[0] + j * stride[1] + d * stride[2],
                    capsule = tile.b0 * in.u.stride[0] + i * in.u.stride[1];
#pragma unroll
      for (int n = 0; n < kSamples; ++n) votes[n] = T(0);
      if (valid == 0) return;
      for (int64_t k = 0; k < in.K; ++k) {
        const T w = widened(matrix[row + k * stride[3]]);
#pragma unroll
        for (int n = 0; n < kSamples; ++n) {
          if (valid >> n & 1) votes[n] += w * widened(u[capsule + n * in.u.stride[0] + k * in.u.stride[2]]);
        }
      }
    }
  }
};

}  // namespace capsfast::cuda
