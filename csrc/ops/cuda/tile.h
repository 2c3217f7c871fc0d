// The reducing pass on tensor cores, softmax over the output capsules: sum_i c votes, or sum_i db votes.
//
// A block has 16 or 32 samples and a split of the input capsules; a warp has 32 columns (j, d) of the votes. The votes
// of a capsule are products [samples, K] x [K, 32] whose results stay in registers until they are weighted, as does
// their sum. V and ds wait in shared memory; scores go through it, for the softmax over all warps' columns.
#pragma once

#include <cmath>
#include <type_traits>

#include "operands.h"
#include "tile_plan.h"

namespace capsfast::cuda {

using gpu::Shared;

struct TileArgs {
  Inputs in;
  Global<const float> V, ds;  // [B, J, D]; V absent in the first iteration, ds in the forward
  Operand dcoupling;
  Operand coupling;           // written
  bool unweighted;
  Global<float> sum;          // [splits, B, J, D]
};

template <class E, int kK, int kD, bool kBackward, bool kTwo>
struct Tiles {
  static constexpr int K = kK, D = kD;
  static constexpr int row_tiles = TileSize::row_tiles(kTwo), column_tiles = TileSize::columns / 8;
  static constexpr int samples = 16 * row_tiles, eights = 2 * row_tiles;
  static constexpr int outputs = TileSize::columns / D;  // of a warp
  static constexpr int values = K == 16 ? 4 : K == 8 ? 2 : 1;  // neighbours along k that a lane holds of a row
  static constexpr int steps = K == 16 ? 2 : 1;
  // float32 takes three products of parts in TF32. 16-bit numbers are TF32 numbers.
  static constexpr bool parted = std::is_same_v<E, float>;
  static constexpr int inputs = TileSize::inputs;  // poses staged at a time
  // The next capsule's weights are on their way while this one's votes are made, where there are registers for them.
  static constexpr bool ahead = K < 16 || kTwo;
  static constexpr int poses = inputs * samples * K;  // of one part
  static_assert(K == 4 || K == 8 || K == 16);
  static_assert(D % 8 == 0 && TileSize::columns % D == 0);

  static CAPSFAST_HOST_DEVICE constexpr int pitch(int J) { return J | 1; }  // rows of scores start in different banks
  static CAPSFAST_HOST_DEVICE constexpr int scores(int J) { return samples * pitch(J); }
  static CAPSFAST_HOST_DEVICE constexpr int vectors(int threads) { return threads / 32 * TileSize::columns * samples; }
  static CAPSFAST_HOST_DEVICE constexpr int bytes(int J, int threads) { return tile_bytes(threads / 32, samples, J, K, parted, kBackward); }
};

// A fragment of the accumulator: rows group and group + 8, two columns.
using Accumulator = float[4];

// Where a lane's numbers are: row `group` (and + 8) of a tile, columns 2 quad and 2 quad + 1.
struct Lane {
  int warp, group, quad;
};

CAPSFAST_DEVICE Lane this_lane() {
  const int lane = gpu::thread() % 32;
  return {gpu::thread() / 32, lane / 4, lane % 4};
}

// `values` weights along k of one row for each column tile. The k of the product are dealt out so that a lane's
// neighbours in memory are its operands, alike for weights and poses.
template <class Tr, class E>
CAPSFAST_DEVICE void fetch_weight(const Inputs& in, int64_t i, const Lane& lane, float (&to)[Tr::column_tiles][Tr::values]) {
  struct alignas(Tr::values * sizeof(E)) Run {
    E value[Tr::values];
  };
  const Global<const E> weight = in.matrix.data.as<const E>();
  const int64_t from = i * in.matrix.stride[0] + Tr::values * lane.quad;
#pragma unroll
  for (int tile = 0; tile < Tr::column_tiles; ++tile) {
    const int first = lane.warp * TileSize::columns + tile * 8;
    const bool there = first < in.J * Tr::D && i < in.I;
    const Run run = there ? weight.template vector<Run>(from + static_cast<int64_t>(first + lane.group) * Tr::K) : Run{};
#pragma unroll
    for (int n = 0; n < Tr::values; ++n) to[tile][n] = there ? wide(run.value[n]) : 0.0f;
  }
}

// Poses of the chunk to shared memory, in two parts that add up to them; 0 for what a mask takes out.
template <class Tr, class E>
CAPSFAST_DEVICE void stage_poses(const Inputs& in, int64_t b0, int64_t i0, int inputs, Shared<float> high, Shared<float> low) {
  const Global<const E> u = in.u.data.as<const E>();
  for (int n = gpu::thread(); n < inputs * Tr::samples * Tr::K; n += gpu::threads()) {
    const int k = n % Tr::K, input = n / Tr::K % inputs, sample = n / Tr::K / inputs;
    const int64_t b = b0 + sample, i = i0 + input;
    float x = 0.0f;
    if (b < in.B && in.mask.at(b, i)) x = wide(u[b * in.u.stride[0] + i * in.u.stride[1] + k * in.u.stride[2]]);
    const int to = (input * Tr::samples + sample) * Tr::K + k;
    if constexpr (Tr::parted) {
      const float part = gpu::to_tf32(x);
      high[to] = part;
      low[to] = gpu::to_tf32(x - part);
    } else {
      high[to] = x;
    }
  }
}

// The operand of one row tile from one part of the poses, for product step `step`.
template <class Tr>
CAPSFAST_DEVICE void read_poses(Shared<float> part, int from, const Lane& lane, int step, float (&a)[4]) {
  const int at = from + lane.group * Tr::K + Tr::values * lane.quad + 2 * step, below = at + 8 * Tr::K;
  if constexpr (Tr::values > 1) {
    const gpu::Pair upper = part.pair(at), lower = part.pair(below);
    a[0] = upper.first;
    a[1] = lower.first;
    a[2] = upper.second;
    a[3] = lower.second;
  } else {
    a[0] = part[at];
    a[1] = part[below];
    a[2] = a[3] = 0.0f;
  }
}

template <class Tr>
CAPSFAST_DEVICE void make_votes(const float (&weight)[Tr::column_tiles][Tr::values], Shared<float> high, Shared<float> low, int input, const Lane& lane,
                                Accumulator (&votes)[Tr::row_tiles][Tr::column_tiles]) {
#pragma unroll
  for (int row = 0; row < Tr::row_tiles; ++row) {
#pragma unroll
    for (int tile = 0; tile < Tr::column_tiles; ++tile) votes[row][tile][0] = votes[row][tile][1] = votes[row][tile][2] = votes[row][tile][3] = 0.0f;
#pragma unroll
    for (int step = 0; step < Tr::steps; ++step) {
      const int from = (input * Tr::samples + row * 16) * Tr::K;
      float a_high[4], a_low[4];
      read_poses<Tr>(high, from, lane, step, a_high);
      if constexpr (Tr::parted) read_poses<Tr>(low, from, lane, step, a_low);
#pragma unroll
      for (int tile = 0; tile < Tr::column_tiles; ++tile) {
        const float second = Tr::values > 1 ? weight[tile][(2 * step + 1) % Tr::values] : 0.0f;
        const float whole[2] = {weight[tile][2 * step % Tr::values], second};
        if constexpr (Tr::parted) {
          const float b_high[2] = {gpu::to_tf32(whole[0]), gpu::to_tf32(whole[1])};
          const float b_low[2] = {gpu::to_tf32(whole[0] - b_high[0]), gpu::to_tf32(whole[1] - b_high[1])};
          // Small products first: what they add up to is not lost in the large one.
          gpu::mma_tf32(votes[row][tile], a_low, b_high);
          gpu::mma_tf32(votes[row][tile], a_high, b_low);
          gpu::mma_tf32(votes[row][tile], a_high, b_high);
        } else {
          gpu::mma_tf32(votes[row][tile], a_high, whole);
        }
      }
    }
  }
}

// Where V and ds keep a lane's two columns of row 8 eight + group: a warp reads 64 numbers in a run.
template <class Tr>
CAPSFAST_DEVICE int vector_at(const Lane& lane, int tile, int eight) {
  return ((lane.warp * Tr::column_tiles + tile) * Tr::samples + eight * 8 + lane.group) * 8 + 2 * lane.quad;
}

template <class Tr>
CAPSFAST_DEVICE void stage_vectors(const Inputs& in, const Global<const float>& from, int64_t b0, Shared<float> to) {
  const int columns = gpu::threads() / 32 * TileSize::columns;
  for (int n = gpu::thread(); n < columns * Tr::samples; n += gpu::threads()) {
    const int column = n % columns, sample = n / columns;
    const bool there = from && b0 + sample < in.B && column < in.J * Tr::D;
    to[(column / 8 * Tr::samples + sample) * 8 + column % 8] = there ? from[(b0 + sample) * in.J * Tr::D + column] : 0.0f;
  }
}

// votes . with for the warp's output capsules, to scores[row][j]. Four lanes hold parts of the dots of a row; each
// hands rows to the others and ends with whole dots of its own.
template <class Tr>
CAPSFAST_DEVICE void dot(const Accumulator (&votes)[Tr::row_tiles][Tr::column_tiles], Shared<float> with, const Lane& lane, int J, int pitch, int base,
                         Shared<float> scores) {
  const bool upper = lane.quad >= 2, odd = lane.quad % 2 == 1;
#pragma unroll
  for (int out = 0; out < Tr::outputs; ++out) {
    float part[Tr::eights];
#pragma unroll
    for (int eight = 0; eight < Tr::eights; ++eight) {
      const int row = eight / 2, n = eight % 2 * 2;
      part[eight] = 0.0f;
#pragma unroll
      for (int tile = out * Tr::D / 8; tile < (out + 1) * Tr::D / 8; ++tile) {
        const gpu::Pair other = with.pair(vector_at<Tr>(lane, tile, eight));
        part[eight] += votes[row][tile][n] * other.first;
        part[eight] += votes[row][tile][n + 1] * other.second;
      }
    }
    constexpr int kHalf = Tr::eights / 2;
    float half[kHalf];
#pragma unroll
    for (int n = 0; n < kHalf; ++n) half[n] = (upper ? part[n + kHalf] : part[n]) + gpu::shuffle_xor(upper ? part[n] : part[n + kHalf], 2);
    const int j = lane.warp * Tr::outputs + out;
    if constexpr (Tr::row_tiles == 2) {
      const float total = (odd ? half[1] : half[0]) + gpu::shuffle_xor(odd ? half[0] : half[1], 1);
      if (j < J) scores[base + (lane.quad * 8 + lane.group) * pitch + j] = total;
    } else {
      const float total = half[0] + gpu::shuffle_xor(half[0], 1);
      if (j < J && !odd) scores[base + (lane.quad / 2 * 8 + lane.group) * pitch + j] = total;
    }
  }
}

// The softmaxes to take: one for each of `count` iterations, whose scores are `stride` apart.
struct SoftmaxSet {
  int count, stride;
  int plain;            // the one that has no scores but its logits, or -1
  int last;             // the one whose dc gets the gradient of the coupling, or -1
  Operand coupling;     // written
  Operand dcoupling;
};

// scores [row][j] to c, and dc to db = c (dc - sum_j c dc), by four lanes a row.
template <class Tr, bool kBackward>
CAPSFAST_DEVICE void softmax_rows(const Inputs& in, const SoftmaxSet& set, int64_t b0, int64_t i, int pitch, int base, Shared<float> scores, Shared<float> dc) {
  const int lane = gpu::thread() % 4, J = static_cast<int>(in.J), rows = set.count * Tr::samples;
  for (int first = 0; first < rows; first += gpu::threads() / 4) {
    const int unit = first + gpu::thread() / 4, which = unit / Tr::samples, row = unit % Tr::samples;
    const int at = base + which * set.stride + row * pitch;
    const int64_t b = b0 + row;
    const bool mine = unit < rows && b < in.B;
    const bool valid = mine && in.mask.at(b, i);
    const int outputs = mine ? J : 0;
    float m = in.leaky ? 0.0f : Extreme<float>::lowest;
    for (int j = lane; j < outputs; j += 4) {
      float x = which == set.plain ? 0.0f : static_cast<float>(scores[at + j]);
      if (in.logits.data) x += in.logits.template read<float>(b * in.logits.stride[0] + i * in.logits.stride[1] + j * in.logits.stride[2]);
      if (!(valid && in.out_mask.at(b, j))) x = -Extreme<float>::infinity;
      scores[at + j] = x;
      m = x > m ? x : m;
    }
    for (int mask = 2; mask > 0; mask /= 2) {
      const float other = gpu::shuffle_xor(m, mask);
      m = other > m ? other : m;
    }
    float sum = in.leaky && lane == 0 ? std::exp(-m) : 0.0f, mean = 0.0f;
    for (int j = lane; j < outputs; j += 4) {
      const float e = std::exp(scores[at + j] - m);
      scores[at + j] = e;
      sum += e;
      if constexpr (kBackward) {
        const bool counts = valid && in.out_mask.at(b, j);
        float x = counts ? static_cast<float>(dc[at + j]) : 0.0f;
        if (which == set.last && set.dcoupling.data && counts) {
          x += set.dcoupling.template read<float>(b * set.dcoupling.stride[0] + i * set.dcoupling.stride[1] + j * set.dcoupling.stride[2]);
        }
        dc[at + j] = x;
        mean += e * x;
      }
    }
    for (int mask = 2; mask > 0; mask /= 2) {
      sum += gpu::shuffle_xor(sum, mask);
      if constexpr (kBackward) mean += gpu::shuffle_xor(mean, mask);
    }
    const float scale = sum == 0.0f ? 0.0f : 1.0f / sum;
    mean *= scale;
    for (int j = lane; j < outputs; j += 4) {
      const float c = scores[at + j] * scale;
      scores[at + j] = c;
      if constexpr (kBackward) dc[at + j] = c * (dc[at + j] - mean);
      if (set.coupling.data) set.coupling.template write<float>(b * set.coupling.stride[0] + i * set.coupling.stride[1] + j * set.coupling.stride[2], c);
    }
    // Rows beyond the batch weigh nothing.
    for (int j = lane; j < J && unit < rows && !mine; j += 4) {
      scores[at + j] = 0.0f;
      if constexpr (kBackward) dc[at + j] = 0.0f;
    }
  }
}

// sum += coefficient votes. A masked capsule's weight may hold anything, so its votes are not multiplied by 0.
template <class Tr>
CAPSFAST_DEVICE void add_weighted(const TileArgs& a, int64_t b0, int64_t i, const Accumulator (&votes)[Tr::row_tiles][Tr::column_tiles], const Lane& lane, int pitch,
                                  int base, Shared<float> coefficients, Accumulator (&sum)[Tr::row_tiles][Tr::column_tiles]) {
  const Inputs& in = a.in;
#pragma unroll
  for (int eight = 0; eight < Tr::eights; ++eight) {
    const int sample = eight * 8 + lane.group, row = eight / 2, n = eight % 2 * 2;
    if (in.mask.data && !(b0 + sample < in.B && in.mask.at(b0 + sample, i))) continue;
#pragma unroll
    for (int out = 0; out < Tr::outputs; ++out) {
      const int j = lane.warp * Tr::outputs + out;
      float c = 1.0f;
      if (!a.unweighted) c = j < in.J ? static_cast<float>(coefficients[base + sample * pitch + j]) : 0.0f;
#pragma unroll
      for (int tile = out * Tr::D / 8; tile < (out + 1) * Tr::D / 8; ++tile) {
        sum[row][tile][n] += c * votes[row][tile][n];
        sum[row][tile][n + 1] += c * votes[row][tile][n + 1];
      }
    }
  }
}

template <class E, int kK, int kD, bool kBackward, bool kTwo>
CAPSFAST_KERNEL(32 * TileSize::warps(kTwo), 1)
tile_kernel(TileArgs a) {
  using Tr = Tiles<E, kK, kD, kBackward, kTwo>;
  const Inputs& in = a.in;
  const Lane lane = this_lane();
  const int J = static_cast<int>(in.J), pitch = Tr::pitch(J), size = Tr::scores(J), vectors = Tr::vectors(gpu::threads());
  const int high_at = vectors * (kBackward ? 2 : 1), low_at = high_at + (Tr::parted ? Tr::poses : 0), scores_at = low_at + Tr::poses;
  const Shared<float> V = gpu::shared<float>(0, vectors), ds = gpu::shared<float>(kBackward ? 4 * vectors : 0, vectors);
  const Shared<float> high = gpu::shared<float>(4 * high_at, Tr::poses), low = gpu::shared<float>(4 * low_at, Tr::poses);
  const Shared<float> scores = gpu::shared<float>(4 * scores_at, 2 * size), dc = gpu::shared<float>(4 * (scores_at + (kBackward ? 2 * size : 0)), 2 * size);
  const SoftmaxSet softmax{1, 0, a.V ? -1 : 0, 0, a.coupling, a.dcoupling};
  const int64_t split = gpu::block_x(), i_begin = in.I * split / gpu::blocks_x(), i_end = in.I * (split + 1) / gpu::blocks_x();
  for (int64_t b0 = gpu::block_y() * Tr::samples; b0 < in.B; b0 += gpu::blocks_y() * Tr::samples) {
    Accumulator sum[Tr::row_tiles][Tr::column_tiles];
#pragma unroll
    for (int row = 0; row < Tr::row_tiles; ++row) {
#pragma unroll
      for (int tile = 0; tile < Tr::column_tiles; ++tile) sum[row][tile][0] = sum[row][tile][1] = sum[row][tile][2] = sum[row][tile][3] = 0.0f;
    }
    gpu::barrier();
    if (a.V) stage_vectors<Tr>(in, a.V, b0, V);
    if constexpr (kBackward) stage_vectors<Tr>(in, a.ds, b0, ds);
    float next[Tr::ahead ? Tr::column_tiles : 1][Tr::values];
    if constexpr (Tr::ahead) fetch_weight<Tr, E>(in, i_begin, lane, next);
    int buffer = 0;  // scores in turn, so that no warp overwrites what another still reads
    for (int64_t i0 = i_begin; i0 < i_end; i0 += Tr::inputs) {
      const int inputs = static_cast<int>(i_end - i0 < Tr::inputs ? i_end - i0 : Tr::inputs);
      gpu::barrier();
      stage_poses<Tr, E>(in, b0, i0, inputs, high, low);
      gpu::barrier();
      for (int input = 0; input < inputs; ++input) {
        const int64_t i = i0 + input;
        float weight[Tr::column_tiles][Tr::values];
        if constexpr (Tr::ahead) {
#pragma unroll
          for (int tile = 0; tile < Tr::column_tiles; ++tile) {
#pragma unroll
            for (int n = 0; n < Tr::values; ++n) weight[tile][n] = next[tile][n];
          }
          fetch_weight<Tr, E>(in, i + 1 < i_end ? i + 1 : i, lane, next);
        } else {
          fetch_weight<Tr, E>(in, i, lane, weight);
        }
        Accumulator votes[Tr::row_tiles][Tr::column_tiles];
        make_votes<Tr>(weight, high, low, input, lane, votes);
        const int base = buffer * size;
        if (!a.unweighted) {
          if (a.V) dot<Tr>(votes, V, lane, J, pitch, base, scores);
          if constexpr (kBackward) dot<Tr>(votes, ds, lane, J, pitch, base, dc);
          gpu::barrier();
          softmax_rows<Tr, kBackward>(in, softmax, b0, i, pitch, base, scores, dc);
          gpu::barrier();
          buffer ^= 1;
        }
        add_weighted<Tr>(a, b0, i, votes, lane, pitch, base, kBackward ? dc : scores, sum);
      }
    }
#pragma unroll
    for (int row = 0; row < Tr::row_tiles; ++row) {
#pragma unroll
      for (int tile = 0; tile < Tr::column_tiles; ++tile) {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const int64_t b = b0 + row * 16 + n / 2 * 8 + lane.group;
          const int column = lane.warp * TileSize::columns + tile * 8 + 2 * lane.quad + n % 2;
          if (b < in.B && column < in.J * Tr::D) a.sum[(split * in.B + b) * in.J * Tr::D + column] = sum[row][tile][n];
        }
      }
    }
  }
}

}  // namespace capsfast::cuda
