// Votes of an input capsule on tensor cores, and their dot products with V and ds.
//
// A block has 16 or 32 samples (rows), a warp 32 columns (j, d) of the votes, which are whole output capsules. The
// votes are products [samples, K] x [K, 32]. They stay in registers, in the accumulator layout of PTX's mma.m16n8k8: a
// row tile has 16 rows, a column tile 8 columns. Row `eight` * 8 + `group` of the tile belongs to the four lanes of a
// group. Poses, V and ds are in shared memory, in the order in which lanes read them.
#pragma once

#include <type_traits>

#include "operands.h"
#include "tile_plan.h"

namespace capsfast::cuda {

using gpu::Shared;

template <class E, int kK, int kD, bool kBackward, bool kTwo>
struct Tiles {
  static constexpr int K = kK, D = kD;
  static constexpr bool backward = kBackward;
  static constexpr int row_tiles = TileSize::row_tiles(kTwo), column_tiles = TileSize::columns / 8;
  static constexpr int samples = 16 * row_tiles, eights = 2 * row_tiles;
  static constexpr int outputs = TileSize::columns / D;        // output capsules of a warp
  static constexpr int values = K == 16 ? 4 : K == 8 ? 2 : 1;  // neighbours along k that a lane has of a weight row
  static constexpr int steps = K == 16 ? 2 : 1;                // products over 8 k each
  static constexpr int slots = K == 4 ? 2 : 4;                 // numbers of a lane's operand that are not always 0
  static constexpr int joint = D == 8 ? 1 : 2;                 // column tiles for which a lane reads V or ds at once
  // float32 numbers are split into two TF32 parts; three products of parts are as accurate as one of float32. If TF32
  // is allowed one product of the first parts is taken. 16-bit numbers are TF32 numbers and need no second part.
  static constexpr bool parted = std::is_same_v<E, float>;
  static constexpr int inputs = TileSize::inputs;  // input capsules whose poses are staged at a time
  // Whether the weights of the next input capsule are loaded while the votes of this one are made: it takes registers.
  static constexpr bool ahead = K < 16 || kTwo;
  static constexpr int pose_pitch = tile_pose_pitch(samples, K);
  static constexpr int poses = inputs * pose_pitch;  // floats of one part
  static_assert(K == 4 || K == 8 || K == 16);
  static_assert(D % 8 == 0 && TileSize::columns % D == 0);

  static constexpr int score_pitch = tile_score_pitch(samples);
  static CAPSFAST_HOST_DEVICE constexpr int scores(int J) { return J * score_pitch; }
  static CAPSFAST_HOST_DEVICE constexpr int vectors(int threads) { return threads / 32 * TileSize::columns * samples; }
  static CAPSFAST_HOST_DEVICE constexpr int bytes(int J, int threads, bool softmax_in) {
    return tile_bytes(threads / 32, samples, J, K, parted, kBackward, softmax_in);
  }
};

// A lane's numbers of a 16 x 8 tile of the votes: columns 2 quad and 2 quad + 1 of row `group`, then of row `group` +
// 8.
using Accumulator = float[4];

// This thread: its warp and its place there, lane = 4 group + quad, as PTX numbers lanes of a fragment.
struct Lane {
  int thread, warp, group, quad;
};

CAPSFAST_DEVICE Lane this_lane() {
  const int thread = gpu::reread_thread_idx(), lane = thread % 32;
  return {thread, thread / 32, lane / 4, lane % 4};
}

// Splits x into the nearest TF32 number, high, and the rest, low. The tensor core drops the bits of low that TF32 does
// not have, which leaves about 22 bits of x. Rounding in integers may turn a NaN into a number, but then low is NaN, so
// no NaN is lost. to_tf32() takes twice as long, as it looks for NaN first.
CAPSFAST_DEVICE void two_parts(float x, float& high, float& low) {
  high = float_of_bits((bits_of_float(x) + 0x1000u) & 0xFFFFE000u);
  low = x - high;
}

// The first element of the weight of input capsule i that this lane reads: in its row of the first column tile.
template <class Tr>
CAPSFAST_DEVICE int64_t weight_at(const Inputs& in, int i, const Lane& lane) {
  return i * in.matrix.stride[0] + (lane.warp * TileSize::columns + lane.group) * Tr::K + Tr::values * lane.quad;
}

// Loads, for each column tile, the `values` neighbouring weights along k that this lane needs. A product may take its k
// in any order, if weights and poses agree. The order is such that a lane's operands are neighbours in memory.
template <class Tr, class E>
CAPSFAST_DEVICE void fetch_weight(const Inputs& in, int64_t at, const Lane& lane,
                                  float (&to)[Tr::column_tiles][Tr::values]) {
  using Weights = Run<E, Tr::values>;
  const Global<const E> weight = in.matrix.data.as<const E>();
  const int columns = static_cast<int>(in.J) * Tr::D;
#pragma unroll
  for (int tile = 0; tile < Tr::column_tiles; ++tile) {
    Weights run{};
    if (lane.warp * TileSize::columns + tile * 8 < columns)
      run = weight.template vector<Weights>(at + tile * 8 * Tr::K);
#pragma unroll
    for (int n = 0; n < Tr::values; ++n) to[tile][n] = wide(run.value[n]);
  }
}

// The index of component k of a pose in shared memory. A lane's operand is contiguous there: (row, k), (row + 8, k),
// (row, k + 1), (row + 8, k + 1).
template <class Tr>
CAPSFAST_DEVICE int pose_at(int input, int sample, int k) {
  const int row = sample / 16, upper = sample / 8 % 2, group = sample % 8, quad = k / Tr::values, n = k % Tr::values;
  return input * Tr::pose_pitch + row * 16 * Tr::K + ((n / 2 * 32 + group * 4 + quad) * Tr::slots) + n % 2 * 2 + upper;
}

// Loads components [k, k + kCount) of a pose. in_runs: they may be loaded as one vector, see poses_in_runs().
template <class Tr, class E, int kCount>
CAPSFAST_DEVICE void read_pose(const Inputs& in, bool in_runs, int b, int i, int k, float (&x)[kCount]) {
  const Global<const E> u = in.u.data.as<const E>();
  const int64_t from = b * in.u.stride[0] + i * in.u.stride[1];
  Run<E, kCount> run;
  if (in_runs) {
    run = u.template vector<Run<E, kCount>>(from + k);
  } else {
#pragma unroll
    for (int n = 0; n < kCount; ++n) run.value[n] = u[from + (k + n) * in.u.stride[2]];
  }
#pragma unroll
  for (int n = 0; n < kCount; ++n) x[n] = wide(run.value[n]);
}

// Copies the poses of `inputs` input capsules to shared memory, float32 in two parts that add up to them. Masked ones
// become 0. A thread has two samples, 8 rows apart, of an input capsule, and so writes whole operands.
template <class Tr, class E>
CAPSFAST_DEVICE void stage_poses(const Inputs& in, bool in_runs, bool tf32, int b0, int i0, int inputs,
                                 const Lane& lane, Shared<float> high, Shared<float> low) {
  constexpr int kCount = Tr::K * sizeof(E) < 16 ? Tr::K : 16 / sizeof(E);
  using Operands = Run<float, Tr::slots>;
  for (int n = lane.thread; n < Tr::inputs * Tr::samples / 2; n += gpu::threads()) {
    const int input = n % Tr::inputs, group = n / Tr::inputs % 8, row = n / (8 * Tr::inputs);
    if (input >= inputs) continue;
    const int b = b0 + row * 16 + group, i = i0 + input;
    const bool upper = b < in.B && in.mask.at(b, i), lower = b + 8 < in.B && in.mask.at(b + 8, i);
#pragma unroll
    for (int from = 0; from < Tr::K; from += kCount) {
      float x[2][kCount] = {};
      if (upper) read_pose<Tr, E>(in, in_runs, b, i, from, x[0]);
      if (lower) read_pose<Tr, E>(in, in_runs, b + 8, i, from, x[1]);
#pragma unroll
      for (int k = 0; k < kCount; k += Tr::slots / 2) {
        Operands parts[2];
#pragma unroll
        for (int slot = 0; slot < Tr::slots; ++slot) {
          const float pose = x[slot % 2][k + slot / 2];
          parts[0].value[slot] = pose;
          if constexpr (Tr::parted) {
            two_parts(pose, parts[0].value[slot], parts[1].value[slot]);
            // If the pose is NaN or infinite, so is low, and this makes high NaN too: with plain TF32 only high is
            // used.
            parts[0].value[slot] += 0.0f * parts[1].value[slot];
          }
        }
        const int to = pose_at<Tr>(input, row * 16 + group, from + k);
        high.write(to, parts[0]);
        if (Tr::parted && !tf32) low.write(to, parts[1]);
      }
    }
  }
}

// Reads this lane's operand for a row tile and product `step` from one part of the poses.
template <class Tr>
CAPSFAST_DEVICE void read_operand(Shared<float> part, int input, int row, int step, const Lane& lane, float (&a)[4]) {
  const int at = input * Tr::pose_pitch + row * 16 * Tr::K + (step * 32 + lane.group * 4 + lane.quad) * Tr::slots;
  const auto run = part.vector<Run<float, Tr::slots>>(at);
#pragma unroll
  for (int slot = 0; slot < 4; ++slot) a[slot] = slot < Tr::slots ? run.value[slot % Tr::slots] : 0.0f;
}

// votes = poses x weights. kThree: as three products of the TF32 parts of float32, else as one.
template <class Tr, bool kThree>
CAPSFAST_DEVICE void multiply_poses(const float (&weight)[Tr::column_tiles][Tr::values], Shared<float> high,
                                    Shared<float> low, int input, const Lane& lane,
                                    Accumulator (&votes)[Tr::row_tiles][Tr::column_tiles]) {
#pragma unroll
  for (int n = 0; n < Tr::row_tiles * Tr::column_tiles * 4; ++n)
    votes[n / (Tr::column_tiles * 4)][n / 4 % Tr::column_tiles][n % 4] = 0.0f;
#pragma unroll
  for (int step = 0; step < Tr::steps; ++step) {
    float b_high[Tr::column_tiles][2] = {}, b_low[Tr::column_tiles][2] = {};
#pragma unroll
    for (int tile = 0; tile < Tr::column_tiles; ++tile) {
#pragma unroll
      for (int n = 0; n < 2 && n < Tr::values; ++n) {
        const float x = weight[tile][2 * step + n];
        if constexpr (kThree) {
          two_parts(x, b_high[tile][n], b_low[tile][n]);
        } else {
          b_high[tile][n] = Tr::parted ? gpu::to_tf32(x) : x;
        }
      }
    }
#pragma unroll
    for (int row = 0; row < Tr::row_tiles; ++row) {
      float a_high[4], a_low[4];
      read_operand<Tr>(high, input, row, step, lane, a_high);
      const auto multiply = [&](const float (&a)[4], const float (&b)[Tr::column_tiles][2]) {
#pragma unroll
        for (int tile = 0; tile < Tr::column_tiles; ++tile) gpu::mma_tf32(votes[row][tile], a, b[tile]);
      };
      if constexpr (kThree) {
        read_operand<Tr>(low, input, row, step, lane, a_low);
        // The small products are added up first, so that less of them is rounded off.
        multiply(a_low, b_high);
        multiply(a_high, b_low);
      }
      multiply(a_high, b_high);
    }
  }
}

template <class Tr>
CAPSFAST_DEVICE void make_votes(const float (&weight)[Tr::column_tiles][Tr::values], bool tf32, Shared<float> high,
                                Shared<float> low, int input, const Lane& lane,
                                Accumulator (&votes)[Tr::row_tiles][Tr::column_tiles]) {
  if constexpr (Tr::parted) {
    if (!tf32) return multiply_poses<Tr, true>(weight, high, low, input, lane, votes);
  }
  multiply_poses<Tr, false>(weight, high, low, input, lane, votes);
}

// Clears the votes of masked input capsules: 0 times a NaN in the weight is not 0.
template <class Tr>
CAPSFAST_DEVICE void drop_masked(const Inputs& in, int b0, int i, const Lane& lane,
                                 Accumulator (&votes)[Tr::row_tiles][Tr::column_tiles]) {
  if (!in.mask.data) return;
#pragma unroll
  for (int eight = 0; eight < Tr::eights; ++eight) {
    const int b = b0 + eight * 8 + lane.group;
    if (b >= in.B || in.mask.at(b, i)) continue;
#pragma unroll
    for (int tile = 0; tile < Tr::column_tiles; ++tile)
      votes[eight / 2][tile][eight % 2 * 2] = votes[eight / 2][tile][eight % 2 * 2 + 1] = 0.0f;
  }
}

// The index, in V or ds, of a lane's two columns of column tile `tile` in row 8 eight + group. After those of an even
// tile come those of the next one, so that a lane reads four numbers at once and a warp 128 in a row.
template <class Tr>
CAPSFAST_DEVICE int vector_at(const Lane& lane, int tile, int eight) {
  return ((lane.warp * (Tr::column_tiles / 2) + tile / 2) * Tr::samples + eight * 8 + lane.group) * 16 + lane.quad * 4 +
         tile % 2 * 2;
}

// Calls f(tile, n, number) for this lane's numbers of V or ds, which begin at `from`: those of output capsule `out` of
// the warp, in row 8 eight + group. n is 0 or 1, the column of the two that the lane has in `tile`.
template <class Tr, class F>
CAPSFAST_DEVICE void each_component(Shared<float> vectors, int from, const Lane& lane, int out, int eight, const F& f) {
#pragma unroll
  for (int tile = out * Tr::D / 8; tile < (out + 1) * Tr::D / 8; tile += Tr::joint) {
    const auto run = vectors.vector<Run<float, 2 * Tr::joint>>(from + vector_at<Tr>(lane, tile, eight));
#pragma unroll
    for (int n = 0; n < 2 * Tr::joint; ++n) f(tile + n / 2, n % 2, run.value[n]);
  }
}

// Copies V or ds of the block's samples to shared memory, from element `first` on. Each warp copies its own columns.
template <class Tr>
CAPSFAST_DEVICE void stage_vectors(const Inputs& in, const Global<const float>& from, int b0, const Lane& lane,
                                   Shared<float> to, int first) {
  const int columns = static_cast<int>(in.J) * Tr::D;
  for (int n = lane.thread % 32; n < Tr::samples * 8; n += 32) {
    const int column = lane.warp * TileSize::columns + n % 8 * 4, sample = n / 8;
    Run<float, 4> x{};
    if (b0 + sample < in.B && column < columns)
      x = from.vector<Run<float, 4>>(static_cast<int64_t>(b0 + sample) * columns + column);
    const int at = first + (column / 16 * Tr::samples + sample) * 16 + column % 8 * 2 + column / 8 % 2 * 2;
    to.write(at, gpu::Pair{x.value[0], x.value[1]});
    to.write(at + 4, gpu::Pair{x.value[2], x.value[3]});
  }
}

// whole[out] = votes . vectors for the warp's output capsules, in one row. The four lanes of a group have parts of the
// dot products of several rows. They exchange parts, so that each ends with the whole dot products of one row,
// own_row().
template <class Tr>
CAPSFAST_DEVICE void dot(const Accumulator (&votes)[Tr::row_tiles][Tr::column_tiles], Shared<float> vectors, int from,
                         const Lane& lane, float (&whole)[Tr::outputs]) {
  const bool upper = lane.quad >= 2, odd = lane.quad % 2 == 1;
#pragma unroll
  for (int out = 0; out < Tr::outputs; ++out) {
    float part[Tr::eights];
#pragma unroll
    for (int eight = 0; eight < Tr::eights; ++eight) {
      part[eight] = 0.0f;
      each_component<Tr>(vectors, from, lane, out, eight, [&](int tile, int n, float x) {
        part[eight] += votes[eight / 2][tile][eight % 2 * 2 + n] * x;
      });
    }
    constexpr int kHalf = Tr::eights / 2;
    float half[kHalf];
#pragma unroll
    for (int n = 0; n < kHalf; ++n)
      half[n] = (upper ? part[n + kHalf] : part[n]) + gpu::shuffle_xor(upper ? part[n] : part[n + kHalf], 2);
    if constexpr (Tr::row_tiles == 2) {
      whole[out] = (odd ? half[1] : half[0]) + gpu::shuffle_xor(odd ? half[0] : half[1], 1);
    } else {
      whole[out] = half[0] + gpu::shuffle_xor(half[0], 1);
    }
  }
}

// The row whose dot products this lane has after dot(). With one row tile two lanes have the same row; owns_row() is
// true for one of them.
template <class Tr>
CAPSFAST_DEVICE int own_row(const Lane& lane) {
  return (Tr::row_tiles == 2 ? lane.quad : lane.quad / 2) * 8 + lane.group;
}
template <class Tr>
CAPSFAST_DEVICE bool owns_row(const Lane& lane) {
  return Tr::row_tiles == 2 || lane.quad % 2 == 0;
}

// Writes the dot products that dot() has computed to scores [j][row], from element `base` on.
template <class Tr>
CAPSFAST_DEVICE void write_scores(const float (&whole)[Tr::outputs], const Lane& lane, int J, int base,
                                  Shared<float> scores) {
  if (!owns_row<Tr>(lane)) return;
#pragma unroll
  for (int out = 0; out < Tr::outputs; ++out) {
    const int j = lane.warp * Tr::outputs + out;
    if (j < J) scores[base + j * Tr::score_pitch + own_row<Tr>(lane)] = whole[out];
  }
}

}  // namespace capsfast::cuda
