// The votes of a turn in the registers of its column warps: products of poses and weights, or loads of given votes. And
// dot products of votes with vectors such as V, and weighted sums.
#pragma once

#include <type_traits>

#include "ring.h"

namespace capsfast::cuda::columns {

template <class E>
constexpr bool kNarrow = sizeof(E) == 2;

// The poses of a strip, read past the L1 cache: a column warp reads each only once.
template <class Tr>
class Poses {
 public:
  static constexpr int count = 2 * Tr::steps;  // neighbouring components of a lane, from `count` quad on

  // What a lane has of one input capsule, for samples group and group + 8: `count` floats each or, in half as many
  // words, 16-bit numbers.
  struct Raw {
    Run<uint32_t, count> row[2];
  };

  // b0: the first sample of the strip.
  CAPSFAST_DEVICE Poses(const Inputs& inputs, const Cut& cut, const Coord& at, int b0)
      : in(inputs), whole(cut.poses_whole) {
    const int size = element_bytes(in.u.storage), k = count * at.quad;
    step = static_cast<uint32_t>(in.u.stride[1] * size);
    unrolled<2>([&](int row) {
      piece[row] = static_cast<uint32_t>(element(b0 + at.group + 8 * row, 0, k < in.K ? k : 0) * size);
    });
  }

  // Samples and components beyond the last are replaced by valid ones: their votes are multiplied by zeros, and nothing
  // that comes of them is written.
  CAPSFAST_DEVICE int64_t element(int b, int i, int k) const {
    const int B = static_cast<int>(in.B), K = static_cast<int>(in.K);
    return (b < B ? b : B - 1) * in.u.stride[0] + i * in.u.stride[1] + (k < K ? k : K - 1) * in.u.stride[2];
  }

  CAPSFAST_DEVICE Raw load(const Coord& at, int b0, int i) const {
    Raw raw;
    with_element<Tr>(in.u.storage, [&](auto e) {
      using E = decltype(e);
      constexpr int kWords = kNarrow<E> ? count / 2 : count, kAtOnce = kWords < 4 ? kWords : 4;
      if (whole) {
        unrolled<2, kWords / kAtOnce>([&](int row, int part) {
          const auto x = in.u.data.template vector_once<Run<uint32_t, kAtOnce>>(
              piece[row] + static_cast<uint32_t>(i) * step + 16 * part);
          unrolled<kAtOnce>([&](int word) { raw.row[row].value[kAtOnce * part + word] = x.value[word]; });
        });
        return;
      }
      using Bits = std::conditional_t<kNarrow<E>, uint16_t, uint32_t>;
      const auto u = in.u.data.template as<const Bits>();
      unrolled<2, kWords>([&](int row, int word) {
        const auto bits = [&](int n) -> uint32_t {
          return u[element(b0 + at.group + 8 * row, i, count * at.quad + n)];
        };
        raw.row[row].value[word] = kNarrow<E> ? bits(2 * word) | bits(2 * word + 1) << 16 : bits(word);
      });
    });
    return raw;
  }

 private:
  const Inputs& in;
  const bool whole;
  uint32_t step, piece[2];  // bytes to the next input capsule, and to what the lane has of input capsule 0
};

// c += a b, or with from_zero c = a b, for 16-bit numbers of type E, two in a word.
template <class E>
CAPSFAST_DEVICE void multiply_narrow(bool from_zero, Accumulator& c, const uint32_t (&a)[2], uint32_t b) {
  if constexpr (std::is_same_v<E, BFloat16>) {
    from_zero ? gpu::mma_bf16_from_zero(c, a, b) : gpu::mma_bf16(c, a, b);
  } else {
    from_zero ? gpu::mma_f16_from_zero(c, a, b) : gpu::mma_f16(c, a, b);
  }
}

// Votes of kTogether tiles from `first_tile` on, in steps [s, s + kSteps) of the product. Products of the tiles take
// turns, because a product of a tile waits for the product before.
template <class Tr, class E, int kTogether, int kSteps, bool kAdd, class Rows>
CAPSFAST_DEVICE void multiply_tiles(const Rows& rows, const typename Poses<Tr>::Raw& poses, const Coord& at,
                                    int first_tile, int s, Accumulator (&votes)[Tr::tiles]) {
  const int k = Poses<Tr>::count * at.quad + 2 * s;  // components of the lane
  if constexpr (kNarrow<E>) {
    Run<uint32_t, kSteps> w[kTogether];
    unrolled<kTogether>([&](int n) { w[n] = rows.template read<Run<uint32_t, kSteps>>(first_tile + n, k); });
    unrolled<kSteps, kTogether>([&](int step, int n) {
      const uint32_t a[2] = {poses.row[0].value[s + step], poses.row[1].value[s + step]};
      multiply_narrow<E>(!kAdd && s + step == 0, votes[first_tile + n], a, w[n].value[step]);
    });
  } else {
    constexpr int kProducts = Tr::exact ? 3 : 1;
    float high[kTogether][kSteps][2], low[kTogether][kSteps][2], u_high[kSteps][4], u_low[kSteps][4];
    unrolled<kSteps, 4>([&](int step, int n) {
      two_parts<Tr>(float_of_bits(poses.row[n % 2].value[2 * (s + step) + n / 2]), u_high[step][n], u_low[step][n]);
    });
    unrolled<kTogether>([&](int n) {
      const auto w = rows.template read<Run<float, 2 * kSteps>>(first_tile + n, k);
      unrolled<kSteps, 2>([&](int step, int m) {
        two_parts<Tr>(w.value[2 * step + m], high[n][step][m], low[n][step][m]);
      });
    });
    unrolled<kSteps * kProducts, kTogether>([&](int turn, int n) {
      const int step = turn / kProducts, product = turn % kProducts + 3 - kProducts;  // the largest product last
      const float (&a)[4] = product == 0 ? u_low[step] : u_high[step];
      const float (&b)[2] = product == 1 ? low[n][step] : high[n][step];
      Accumulator& sum = votes[first_tile + n];
      !kAdd&& s == 0 && turn == 0 ? gpu::mma_tf32_from_zero(sum, a, b) : gpu::mma_tf32(sum, a, b);
    });
  }
}

// Reads what the lane needs of the weight in a product with the columns of a tile: column n = group.
template <class Tr, class E>
class ProductRows {
 public:
  using Weights = Ring<Tr, 16>;
  CAPSFAST_DEVICE ProductRows(const Shared<E>& weight, const Coord& at)
      : weight(weight),
        whole(Weights::place_of(at.group / 2 * kSpan + at.group % 2)),
        fifth(Weights::place_of(4 * kSpan + at.group)) {}
  template <class Vector>
  CAPSFAST_DEVICE Vector read(int tile, int k) const {
    const int row =
        tile < kWholeTiles ? whole + 2 * tile * Tr::components : fifth + 8 * (tile - kWholeTiles) * Tr::components;
    return weight.template vector<Vector>(row + k);
  }

 private:
  const Shared<E> weight;
  const int whole, fifth;
};

// votes [16, columns] = or, with kAdd, += poses times the weight of input capsule `capsule` of the stage.
template <class Tr, bool kAdd>
CAPSFAST_DEVICE void make_votes(const Inputs& in, const Ring<Tr, 16>& weights, int stage, int capsule,
                                const typename Poses<Tr>::Raw& poses, const Coord& at,
                                Accumulator (&votes)[Tr::tiles]) {
  constexpr int kTogether = Tr::steps == 1 ? Tr::tiles / 2 : 2, kSteps = Tr::steps == 1 ? 1 : 2;
  with_element<Tr>(in.matrix.storage, [&](auto e) {
    using E = decltype(e);
    const ProductRows<Tr, E> rows(weights.template at<E>(stage, capsule, at.warp), at);
    unrolled<Tr::steps / kSteps, Tr::tiles / kTogether>([&](int part, int n) {
      multiply_tiles<Tr, E, kTogether, kSteps, kAdd>(rows, poses, at, n * kTogether, part * kSteps, votes);
    });
  });
}

// The first of the two neighbouring components that a lane has of a tile, in tensors [.., J, D].
struct Place {
  int j, d;
};
CAPSFAST_DEVICE Place place_of(const Cut& cut, const Coord& at, int tile) {
  if (tile < kWholeTiles) return {at.output_of(cut, 0), (at.quad & (cut.lanes - 1)) * kSpan + 2 * tile};
  return {at.output_of(cut, 1), 8 * (tile - kWholeTiles) + 2 * at.quad};
}

// Loads given votes of input capsule i. Padding is 0; samples beyond the last take the votes of a valid one.
template <class Tr>
CAPSFAST_DEVICE void load_votes(const Inputs& in, const Cut& cut, const Coord& at, int b0, int i,
                                Accumulator (&votes)[Tr::tiles]) {
  with_element<Tr>(in.matrix.storage, [&](auto e) {
    using E = decltype(e);
    const int B = static_cast<int>(in.B), J = static_cast<int>(in.J), D = static_cast<int>(in.D);
    unrolled<2>([&](int row) {
      const int b = b0 + at.group + 8 * row;
      const int64_t from = (b < B ? b : B - 1) * in.matrix.stride[0] + i * in.matrix.stride[1];
      const auto of = [&](int tile) {
        const Place place = place_of(cut, at, tile);
        return from + place.j * in.matrix.stride[2] + place.d * in.matrix.stride[3];
      };
      const auto put = [&](int tile, int e, float x) { votes[tile][2 * row + e] = x; };
      if (cut.in_pieces) {
        constexpr int kPiece = 16 / static_cast<int>(sizeof(E)), kTiles = kPiece / 2;
        const bool exists = at.output_of(cut, 0) < J;
        unrolled<kWholeTiles / kTiles>([&](int part) {
          Run<E, kPiece> x = {};
          const auto data = in.matrix.data.template as<const E>();
          if (exists) x = data.template vector_once<Run<E, kPiece>>(of(part * kTiles));
          unrolled<kTiles, 2>([&](int n, int e) { put(part * kTiles + n, e, float(x.value[2 * n + e])); });
        });
        unrolled<Tr::tiles - kWholeTiles>([&](int n) {
          Run<E, 2> x = {};
          if (at.output_of(cut, 1) < J)
            x = in.matrix.data.template as<const E>().template vector_once<Run<E, 2>>(of(kWholeTiles + n));
          unrolled<2>([&](int e) { put(kWholeTiles + n, e, float(x.value[e])); });
        });
        return;
      }
      unrolled<Tr::tiles, 2>([&](int tile, int e) {
        const Place place = place_of(cut, at, tile);
        float x = 0.0f;
        if (place.j < J && place.d + e < D)
          x = float(in.matrix.data.template as<const E>()[of(tile) + e * in.matrix.stride[3]]);
        put(tile, e, x);
      });
    });
  });
}

// The lane's numbers of the vectors of a strip and a column warp, from element `from` on: a four for each tile.
CAPSFAST_DEVICE Global<const float> lane_vectors(const Global<const float>& vectors, int64_t from, int count,
                                                 const Coord& at) {
  return vectors.from(from + at.lane * 4, count - at.lane * 4);
}

// Adds up a dot product over the lanes that share the output capsule of a slot. lanes: of slot 0.
template <class Tr>
CAPSFAST_DEVICE float lanes_sum(float x, int slot, int lanes) {
  if (slot == 1 || (Tr::slots == 1 && lanes > 1)) x += gpu::shuffle_xor(x, 1);
  if (slot == 1 || (Tr::slots == 1 && lanes > 2)) x += gpu::shuffle_xor(x, 2);
  return x;
}

// dots = votes . vectors, where vectors come from lane_vectors().
template <class Tr>
CAPSFAST_DEVICE void dot(const Accumulator (&votes)[Tr::tiles], const Global<const float>& vectors, int lanes,
                         Scores<Tr>& dots) {
  unrolled<Tr::slots, 2>([&](int slot, int row) { dots[slot][row] = 0.0f; });
  unrolled<Tr::tiles>([&](int tile) {
    const Four x = vectors.template vector<Four>(tile * 128);
    unrolled<4>([&](int n) { dots[tile / kWholeTiles][n / 2] += x.value[n] * votes[tile][n]; });
  });
  unrolled<Tr::slots, 2>([&](int slot, int row) { dots[slot][row] = lanes_sum<Tr>(dots[slot][row], slot, lanes); });
}

// to += coefficients times x, of a tile.
template <class Tr>
CAPSFAST_DEVICE void add_weighted(const Scores<Tr>& coefficients, int tile, const float (&x)[4], Accumulator& to) {
  unrolled<4>([&](int n) { to[n] += coefficients[tile / kWholeTiles][n / 2] * x[n]; });
}

}  // namespace capsfast::cuda::columns
