// Votes of a warp in registers: the product that makes them, dot products with V and ds, the weighted sum.
#pragma once

#include "stage.h"

namespace capsfast::cuda::rows {

// votes [16, columns] = or, with kAdd, += poses times the weight of input capsule `capsule` of a chunk.
template <class Tr, bool kAdd>
CAPSFAST_DEVICE void make_votes(const Shared<float>& weight, int capsule, const Shared<float>& poses, int poses_at,
                                const ThreadCoord& at, Accumulator (&votes)[Tr::tiles]) {
  // A lane reads rows k = 2 quad and 2 quad + 1 of column n = group of each tile. Its column in the tiles of a group of
  // four output capsules, and in those of two, is a number of its own plus one that every lane has.
  const int base = capsule * Tr::weight + 2 * at.quad;
  const int full = base + at.group / 2 * Tr::weight_pitch + at.group % 2 * Tr::K;
  const int pair = base + (4 * Tr::groups + at.group / 4) * Tr::weight_pitch + at.group % 4 * Tr::K;
#pragma unroll
  for (int step = 0; step < Tr::steps; ++step) {
    const Four u = poses.template vector<Four>(poses_at + step * 128 + at.lane * 4);
    float high[4], low[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      high[n] = u.value[n];
      if constexpr (Tr::exact) two_parts(u.value[n], high[n], low[n]);
    }
#pragma unroll
    for (int tile = 0; tile < Tr::tiles; ++tile) {
      const int G = tile / 8, t = tile % 8;
      const int from = G < Tr::groups ? full + 4 * G * Tr::weight_pitch + (2 * t * Tr::K + kStep * step)
                                      : pair + (4 * t * Tr::K + kStep * step);
      if constexpr (Tr::exact) {
        const gpu::Pair w = weight.pair(from), rest = weight.pair(from + Tr::weight_part);
        const float w_high[2] = {w.first, w.second}, w_low[2] = {rest.first, rest.second};
        if constexpr (kAdd) {
          gpu::mma_tf32(votes[tile], low, w_high);
        } else {
          step == 0 ? gpu::mma_tf32_from_zero(votes[tile], low, w_high) : gpu::mma_tf32(votes[tile], low, w_high);
        }
        gpu::mma_tf32(votes[tile], high, w_low);
        gpu::mma_tf32(votes[tile], high, w_high);
        continue;
      }
      const gpu::Pair w = weight.pair(from);
      const float w_high[2] = {w.first, w.second};
      if constexpr (kAdd) {
        gpu::mma_tf32(votes[tile], high, w_high);
      } else {
        step == 0 ? gpu::mma_tf32_from_zero(votes[tile], high, w_high) : gpu::mma_tf32(votes[tile], high, w_high);
      }
    }
  }
}

// Makes votes of masked input capsules 0, whatever the weight holds. Not of plain kernels.
template <class Tr>
CAPSFAST_DEVICE void drop_masked(const Inputs& in, int b0, int i, const ThreadCoord& at,
                                 Accumulator (&votes)[Tr::tiles]) {
  if (!in.mask.data) return;
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const int sample = b0 + at.group + 8 * row;
    if (sample < in.B && in.mask.at(sample, i)) continue;
#pragma unroll
    for (int tile = 0; tile < Tr::tiles; ++tile) votes[tile][2 * row] = votes[tile][2 * row + 1] = 0.0f;
  }
  gpu::warp_barrier();  // products follow, which take the whole warp
}

// A number for each output capsule of a lane and each of its two samples.
template <class Tr>
using Scores = float[Tr::slots][2];

// This lane's elements of the vectors of 16 samples, which begin at `from`: four for each tile, one behind the other.
template <class Tr>
CAPSFAST_DEVICE Global<const float> lane_vectors(const Global<const float>& vectors, int64_t from,
                                                 const ThreadCoord& at) {
  return {&vectors[from + at.lane * 4], Tr::vectors - at.lane * 4};
}

// dots = votes . vectors, which are of lane_vectors().
template <class Tr>
CAPSFAST_DEVICE void dot(const Accumulator (&votes)[Tr::tiles], const Global<const float>& vectors, Scores<Tr>& dots) {
#pragma unroll
  for (int slot = 0; slot < Tr::slots; ++slot) dots[slot][0] = dots[slot][1] = 0.0f;
#pragma unroll
  for (int tile = 0; tile < Tr::tiles; ++tile) {
    const Four x = vectors.template vector<Four>(tile * 128);
    float (&dot)[2] = dots[tile / 8];
    dot[0] += x.value[0] * votes[tile][0];
    dot[0] += x.value[1] * votes[tile][1];
    dot[1] += x.value[2] * votes[tile][2];
    dot[1] += x.value[3] * votes[tile][3];
  }
  if constexpr (Tr::paired) {
#pragma unroll
    for (int row = 0; row < 2; ++row) dots[Tr::groups][row] += gpu::shuffle_xor(dots[Tr::groups][row], 1);
  }
}

// sum += coefficients times votes.
template <class Tr>
CAPSFAST_DEVICE void add_weighted(const Scores<Tr>& coefficients, const Accumulator (&votes)[Tr::tiles],
                                  Accumulator (&sum)[Tr::tiles]) {
#pragma unroll
  for (int tile = 0; tile < Tr::tiles; ++tile) {
#pragma unroll
    for (int n = 0; n < 4; ++n) sum[tile][n] += coefficients[tile / 8][n / 2] * votes[tile][n];
  }
}

// to += coefficients times vectors, which are as in dot().
template <class Tr>
CAPSFAST_DEVICE void add_vectors(const Scores<Tr>& coefficients, const Global<const float>& vectors,
                                 Accumulator (&to)[Tr::tiles]) {
#pragma unroll
  for (int tile = 0; tile < Tr::tiles; ++tile) {
    const Four x = vectors.template vector<Four>(tile * 128);
#pragma unroll
    for (int n = 0; n < 4; ++n) to[tile][n] += coefficients[tile / 8][n / 2] * x.value[n];
  }
}

template <class Tr>
CAPSFAST_DEVICE void add(const Accumulator (&votes)[Tr::tiles], Accumulator (&sum)[Tr::tiles]) {
#pragma unroll
  for (int n = 0; n < 4 * Tr::tiles; ++n) sum[n / 4][n % 4] += votes[n / 4][n % 4];
}

template <class Tr>
CAPSFAST_DEVICE void clear(Accumulator (&x)[Tr::tiles]) {
#pragma unroll
  for (int tile = 0; tile < Tr::tiles; ++tile) x[tile][0] = x[tile][1] = x[tile][2] = x[tile][3] = 0.0f;
}

}  // namespace capsfast::cuda::rows
