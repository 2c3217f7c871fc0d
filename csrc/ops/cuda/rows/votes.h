// Votes of a warp in registers: the poses and the product that make them, dot products with V and ds, the weighted sum.
#pragma once

#include <algorithm>
#include <type_traits>

#include "weights.h"

namespace capsfast::cuda::rows {

// The poses of a strip, read past the L1 cache: a warp reads each only once.
template <class Tr>
class Poses {
 public:
  static constexpr int count = 2 * Tr::steps;  // neighbouring components k of a lane, from `count` quad on

  // What a lane has of one input capsule, for samples group and group + 8: `count` floats each or, in half as many
  // words, 16-bit numbers.
  struct Raw {
    Run<uint32_t, count> row[2];

    template <class E>
    CAPSFAST_DEVICE float get(int sample, int n) const {
      if constexpr (std::is_same_v<E, float>) {
        return float_of_bits(row[sample].value[n]);
      } else {
        return E{static_cast<uint16_t>(row[sample].value[n / 2] >> n % 2 * 16)};
      }
    }
  };

  // b0: the first sample of the strip.
  CAPSFAST_DEVICE Poses(const Inputs& inputs, const Shape& shape, const ThreadCoord& at, int first)
      : in(inputs), in_pieces(shape.poses_in_pieces), b0(first) {
    const int size = element_bytes(in.u.storage), k = count * at.quad;
    step = static_cast<uint32_t>(in.u.stride[1] * size);
    unrolled<2>([&](int row) {
      piece[row] = static_cast<uint32_t>(element(at.group + 8 * row, 0, k < in.K ? k : 0) * size);
    });
  }

  // Samples and components beyond the last are replaced by valid ones: their votes are multiplied by zeros, and nothing
  // that comes of them is written.
  CAPSFAST_DEVICE int64_t element(int sample, int i, int k) const {
    const int b = b0 + sample, B = static_cast<int>(in.B), K = static_cast<int>(in.K);
    return (b < B ? b : B - 1) * in.u.stride[0] + i * in.u.stride[1] + (k < K ? k : K - 1) * in.u.stride[2];
  }

  CAPSFAST_DEVICE Raw load(const ThreadCoord& at, int i) const {
    Raw raw;
    with_element<Tr>(in.u.storage, [&](auto e) {
      constexpr bool kNarrow = sizeof(e) == 2;
      constexpr int kWords = kNarrow ? count / 2 : count;
      if (in_pieces) {
        unrolled<2>([&](int row) {
          const auto x = in.u.data.template vector_once<Run<uint32_t, kWords>>(piece[row] + i * step);
          unrolled<kWords>([&](int word) { raw.row[row].value[word] = x.value[word]; });
        });
        return;
      }
      using Bits = std::conditional_t<kNarrow, uint16_t, uint32_t>;
      const auto u = in.u.data.template as<const Bits>();
      unrolled<2, kWords>([&](int row, int word) {
        const auto bits = [&](int n) -> uint32_t { return u[element(at.group + 8 * row, i, count * at.quad + n)]; };
        raw.row[row].value[word] = kNarrow ? bits(2 * word) | bits(2 * word + 1) << 16 : bits(word);
      });
    });
    return raw;
  }

 private:
  const Inputs& in;
  const bool in_pieces;
  const int b0;
  uint32_t step, piece[2];  // bytes to the next input capsule, and to what the lane has of input capsule 0
};

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

// votes [16, columns] = or, with kAdd, += poses times the weight of input capsule `capsule` of the chunk in `stage`.
template <class Tr, bool kAdd>
CAPSFAST_DEVICE void make_votes(const Inputs& in, const Weights<Tr>& weights, int stage, int capsule,
                                const typename Poses<Tr>::Raw& poses, const ThreadCoord& at,
                                Accumulator (&votes)[Tr::tiles]) {
  constexpr int kCount = Poses<Tr>::count, kTogether = 4;  // tiles whose products take turns: each waits for the last
  with_element<Tr>(in.matrix.storage, [&](auto e) {
    using E = decltype(e);
    constexpr int kProducts = Tr::exact && std::is_same_v<E, float> ? 3 : 1;
    const Shared<E> weight = weights.template at<E>(stage, capsule);
    const ColumnPlace<Tr> column(at.group);
    float u_high[Tr::steps][4], u_low[Tr::steps][4];
    unrolled<Tr::steps, 4>([&](int step, int n) {
      two_parts<Tr, E>(poses.template get<E>(n % 2, 2 * step + n / 2), u_high[step][n], u_low[step][n]);
    });
    unrolled<Tr::tiles / kTogether>([&](int four) {
      const int first = four * kTogether;
      float high[kTogether][Tr::steps][2], low[kTogether][Tr::steps][2];
      unrolled<kTogether>([&](int n) {
        const auto w = weight.template vector<Run<E, kCount>>(column.at(first + n) + kCount * at.quad);
        unrolled<Tr::steps, 2>([&](int step, int m) {
          two_parts<Tr, E>(w.value[2 * step + m], high[n][step][m], low[n][step][m]);
        });
      });
      unrolled<Tr::steps * kProducts, kTogether>([&](int turn, int n) {
        const int step = turn / kProducts, product = turn % kProducts + 3 - kProducts;  // the largest product last
        const float (&a)[4] = product == 0 ? u_low[step] : u_high[step];
        const float (&b)[2] = product == 1 ? low[n][step] : high[n][step];
        Accumulator& sum = votes[first + n];
        !kAdd&& turn == 0 ? gpu::mma_tf32_from_zero(sum, a, b) : gpu::mma_tf32(sum, a, b);
      });
    });
  });
}

// A number for each output capsule of a lane and each of its two samples.
template <class Tr>
using Scores = float[Tr::slots][2];

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
