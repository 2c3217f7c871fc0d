// Votes of a warp in registers: the product that makes them, dot products with V and ds, the weighted sum.
#pragma once

#include "stage.h"

namespace capsfast::cuda::rows {

// c += a b, or with from_zero c = a b, for numbers in two parts or in one.
template <class Tr>
CAPSFAST_DEVICE void multiply(bool from_zero, Accumulator& c, const float (&a_high)[4], const float (&a_low)[4],
                              const float (&b_high)[2], const float (&b_low)[2]) {
  if constexpr (Tr::exact) {
    from_zero ? gpu::mma_tf32_from_zero(c, a_low, b_high) : gpu::mma_tf32(c, a_low, b_high);
    gpu::mma_tf32(c, a_high, b_low);
    gpu::mma_tf32(c, a_high, b_high);
  } else {
    from_zero ? gpu::mma_tf32_from_zero(c, a_high, b_high) : gpu::mma_tf32(c, a_high, b_high);
  }
}

// votes [16, columns] = or, with kAdd, += poses times the weight of input capsule `capsule` of a chunk.
template <class Tr, bool kAdd>
CAPSFAST_DEVICE void make_votes(const Chunk<Tr>& chunk, int capsule, int tile, const ThreadCoord& at,
                                Accumulator (&votes)[Tr::tiles]) {
  const Shared<float> weight = chunk.weight(), poses = chunk.poses();
  const int from = capsule * Tr::weight + in_plane(at.group, at.quad), poses_at = chunk.poses_at(capsule, tile);
  unrolled<Tr::steps>([&](int step) {
    const Four u = poses.template vector<Four>(poses_at + step * 128 + at.lane * 4);
    float high[4], low[4];
    unrolled<4>([&](int n) {
      high[n] = u.value[n];
      if constexpr (Tr::exact) two_parts(u.value[n], high[n], low[n]);
    });
    unrolled<Tr::pairs>([&](int pair) {
      const int plane = from + (pair * Tr::steps + step) * Tr::parts * kPlane;
      const Four w = weight.template vector<Four>(plane);
      Four rest = {};
      if constexpr (Tr::exact) rest = weight.template vector<Four>(plane + kPlane);
      unrolled<2>([&](int n) {
        multiply<Tr>(!kAdd && step == 0, votes[2 * pair + n], high, low, {w.value[2 * n], w.value[2 * n + 1]},
                     {rest.value[2 * n], rest.value[2 * n + 1]});
      });
    });
  });
}

// A number for each output capsule of a lane and each of its two samples.
template <class Tr>
using Scores = float[Tr::slots][2];

// Makes votes of masked input capsules 0, even if the weight holds NaN. Not in plain kernels.
template <class Tr>
CAPSFAST_DEVICE void drop_masked(const Inputs& in, int b0, int i, const ThreadCoord& at,
                                 Accumulator (&votes)[Tr::tiles]) {
  if (!in.mask.data) return;
  bool kept[2];
  unrolled<2>([&](int row) {
    const int sample = b0 + at.group + 8 * row;
    kept[row] = sample < in.B && in.mask.at(sample, i);
  });
  unrolled<Tr::tiles, 4>([&](int tile, int n) { votes[tile][n] = kept[n / 2] ? votes[tile][n] : 0.0f; });
  gpu::warp_barrier();  // products follow, which take the whole warp
}

// This lane's elements of the vectors of 16 samples; its first is element `from`. Four for each tile, one tile after
// the other.
template <class Tr>
CAPSFAST_DEVICE Global<const float> lane_vectors(const Global<const float>& vectors, int64_t from,
                                                 const ThreadCoord& at) {
  return {&vectors[from], Tr::vectors - at.lane * 4};
}

// dots = votes . vectors, where vectors come from lane_vectors(). Leaves the first kKept vectors in `kept`.
template <class Tr, int kKept = 0>
CAPSFAST_DEVICE void dot(const Accumulator (&votes)[Tr::tiles], const Global<const float>& vectors, Scores<Tr>& dots,
                         Four* kept = nullptr) {
  unrolled<Tr::slots, 2>([&](int slot, int row) { dots[slot][row] = 0.0f; });
  unrolled<Tr::tiles>([&](int tile) {
    const Four x = vectors.template vector<Four>(tile * 128);
    if (tile < kKept) kept[tile] = x;
    float (&dot)[2] = dots[tile / 8];
    const int odd = tile % 2, t0 = tile - odd, t1 = t0 + 1;
    dot[0] += x.value[0] * votes[t0][odd];
    dot[0] += x.value[1] * votes[t1][odd];
    dot[1] += x.value[2] * votes[t0][2 + odd];
    dot[1] += x.value[3] * votes[t1][2 + odd];
  });
  if constexpr (Tr::paired)
    unrolled<2>([&](int row) { dots[Tr::groups][row] += gpu::shuffle_xor(dots[Tr::groups][row], 1); });
}

// to += coefficients times vectors, with vectors and their order as in dot().
template <class Tr, int kKept = 0>
CAPSFAST_DEVICE void add_vectors(const Scores<Tr>& coefficients, const Global<const float>& vectors,
                                 Accumulator (&to)[Tr::tiles], const Four* kept = nullptr) {
  unrolled<Tr::tiles>([&](int tile) {
    const Four x = tile < kKept ? kept[tile] : vectors.template vector<Four>(tile * 128);
    unrolled<4>([&](int n) { to[tile][n] += coefficients[tile / 8][n / 2] * x.value[n]; });
  });
}

}  // namespace capsfast::cuda::rows
