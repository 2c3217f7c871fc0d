// The reducing pass on tensor cores: sum_i c votes (forward) or sum_i db votes (backward). A block has a tile of
// samples and a split of the input capsules.
//
// The votes of an input capsule stay in registers until they are weighted, and so does their sum. With the softmax over
// the input capsules no warp waits for another. In the forward its normaliser is not known yet: each column (sample, j)
// keeps a running maximum, and the step after the pass combines the splits (between.h).
#pragma once

#include "steps.h"
#include "tile_softmax.h"

namespace capsfast::cuda {

struct TileArgs {
  Inputs in;
  bool in_runs, tf32;         // in_runs: see poses_in_runs(). tf32: one TF32 product instead of three
  Global<const float> V, ds;  // [B, J, D]; V absent in the first iteration, ds in the forward
  Operand dcoupling;          // [B, I, J]
  Operand coupling;           // [B, I, J], written
  bool unweighted;            // every coefficient is 1
  Normaliser<float> norm;     // [B, J], for a softmax over the input capsules whose normaliser is known
  Global<float> sum;          // [splits, B, J, D], written; absent if only the coupling is wanted
  Global<float> max;          // [splits, B, J], written, for one whose normaliser is not known yet
  Global<double> total;       // [splits, B, J], written with max: sum of exp(b - max)
};

// sum += coefficient votes. A warp may have columns beyond J D. Their votes are 0; they take the coefficient of the
// warp's first output capsule, which always exists.
template <class Tr>
CAPSFAST_DEVICE void add_weighted(const Accumulator (&votes)[Tr::row_tiles][Tr::column_tiles], const Lane& lane,
                                  bool unweighted, int J, Shared<float> coefficients, int base,
                                  Accumulator (&sum)[Tr::row_tiles][Tr::column_tiles]) {
#pragma unroll
  for (int out = 0; out < Tr::outputs; ++out) {
    const int first = lane.warp * Tr::outputs,
              from = base + (first + out < J ? first + out : first) * Tr::score_pitch + lane.group;
#pragma unroll
    for (int eight = 0; eight < Tr::eights; ++eight) {
      const int row = eight / 2, n = eight % 2 * 2;
      const float c = unweighted ? 1.0f : static_cast<float>(coefficients[from + eight * 8]);
#pragma unroll
      for (int tile = out * Tr::D / 8; tile < (out + 1) * Tr::D / 8; ++tile) {
        sum[row][tile][n] += c * votes[row][tile][n];
        sum[row][tile][n + 1] += c * votes[row][tile][n + 1];
      }
    }
  }
}

// Multiplies the sum so far by `factor` [j][row], after maxima have grown.
template <class Tr>
CAPSFAST_DEVICE void rescale(const Lane& lane, int J, Shared<float> factor,
                             Accumulator (&sum)[Tr::row_tiles][Tr::column_tiles]) {
#pragma unroll
  for (int eight = 0; eight < Tr::eights; ++eight) {
    const int row = eight / 2, n = eight % 2 * 2;
#pragma unroll
    for (int out = 0; out < Tr::outputs; ++out) {
      const int j = lane.warp * Tr::outputs + out;
      const float f = j < J ? static_cast<float>(factor[j * Tr::score_pitch + eight * 8 + lane.group]) : 1.0f;
#pragma unroll
      for (int tile = out * Tr::D / 8; tile < (out + 1) * Tr::D / 8; ++tile) {
        sum[row][tile][n] *= f;
        sum[row][tile][n + 1] *= f;
      }
    }
  }
}

template <class Tr>
CAPSFAST_DEVICE void write_sum(const TileArgs& a, int b0, int split, const Lane& lane,
                               const Accumulator (&sum)[Tr::row_tiles][Tr::column_tiles]) {
  const Inputs& in = a.in;
#pragma unroll
  for (int row = 0; row < Tr::row_tiles; ++row) {
#pragma unroll
    for (int tile = 0; tile < Tr::column_tiles; ++tile) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int b = b0 + row * 16 + n / 2 * 8 + lane.group;
        const int column = lane.warp * TileSize::columns + tile * 8 + 2 * lane.quad + n % 2;
        if (b < in.B && column < in.J * Tr::D) a.sum[(split * in.B + b) * in.J * Tr::D + column] = sum[row][tile][n];
      }
    }
  }
}

// The pass for the tile of samples from b0 on and one split of the input capsules. Begins with a barrier, because the
// block may have used shared memory for a pass before.
template <class Tr, class E>
CAPSFAST_DEVICE void reduce_tile(const TileArgs& a, int b0, int split, int splits) {
  constexpr bool kBackward = Tr::backward;
  const Inputs& in = a.in;
  const Lane lane = this_lane();
  const int J = static_cast<int>(in.J), size = Tr::scores(J), vectors = Tr::vectors(gpu::threads());
  const int high_at = vectors * (kBackward ? 2 : 1), low_at = high_at + (Tr::parted ? Tr::poses : 0),
            weights_at = low_at + Tr::poses;
  const Shared<float> V = gpu::shared<float>(0, vectors), ds = gpu::shared<float>(kBackward ? 4 * vectors : 0, vectors);
  const Shared<float> high = gpu::shared<float>(4 * high_at, Tr::poses),
                      low = gpu::shared<float>(4 * low_at, Tr::poses);
  // `logits` become c. `weights` are the coefficients of the sum: in the forward the same array as `logits`, in the
  // backward dc, which becomes db. With the softmax over the output capsules each has two buffers in turn, so that no
  // warp overwrites what another still reads. With the other one buffer is enough, and the memory of the rest holds the
  // numbers of the columns, column(1) to column(3).
  const Shared<float> weights = gpu::shared<float>(4 * weights_at, 2 * size);
  const Shared<float> logits = gpu::shared<float>(4 * (weights_at + (kBackward ? 2 * size : 0)), 2 * size);
  const auto column = [&](int n) {
    return gpu::shared<float>(4 * (weights_at + (in.softmax_in ? n * size : 0)), size);
  };
  const Running running{column(1), column(2), column(3)};
  const Columns columns{column(1), column(3), a.norm.mean};
  const bool follows = !kBackward && a.max;
  const SoftmaxSet softmax{1, 0, 0, a.coupling, a.dcoupling};
  const int i_begin = static_cast<int>(in.I * split / splits), i_end = static_cast<int>(in.I * (split + 1) / splits);
  Accumulator sum[Tr::row_tiles][Tr::column_tiles];
#pragma unroll
  for (int n = 0; n < Tr::row_tiles * Tr::column_tiles * 4; ++n)
    sum[n / (Tr::column_tiles * 4)][n / 4 % Tr::column_tiles][n % 4] = 0.0f;
  gpu::barrier();
  if (a.V) stage_vectors<Tr>(in, a.V, b0, lane, V, 0);
  if constexpr (kBackward) stage_vectors<Tr>(in, a.ds, b0, lane, ds, 0);
  if (follows) start_columns<Tr>(in, in.leaky && split == 0, b0, lane, running);  // the leaky entry counts once
  if (in.softmax_in && a.norm.max) stage_columns<Tr>(in, a.norm.max, a.norm.scale, b0, lane, columns);
  int64_t from = weight_at<Tr>(in, i_begin, lane);
  float next[Tr::ahead ? Tr::column_tiles : 1][Tr::values];
  if constexpr (Tr::ahead) {
    if (i_begin < i_end) fetch_weight<Tr, E>(in, from, lane, next);
  }
  int base = 0;
  for (int i = i_begin; i < i_end; ++i) {
    const int input = (i - i_begin) % Tr::inputs;
    if (input == 0) {
      gpu::barrier();
      stage_poses<Tr, E>(in, a.in_runs, a.tf32, b0, i, i_end - i, lane, high, low);
      gpu::barrier();
    }
    float weight[Tr::column_tiles][Tr::values];
    if constexpr (Tr::ahead) {
#pragma unroll
      for (int tile = 0; tile < Tr::column_tiles; ++tile) {
#pragma unroll
        for (int n = 0; n < Tr::values; ++n) weight[tile][n] = next[tile][n];
      }
      from += in.matrix.stride[0];
      if (i + 1 < i_end) fetch_weight<Tr, E>(in, from, lane, next);
    } else {
      fetch_weight<Tr, E>(in, from, lane, weight);
      from += in.matrix.stride[0];
    }
    Accumulator votes[Tr::row_tiles][Tr::column_tiles];
    make_votes<Tr>(weight, a.tf32, high, low, input, lane, votes);
    drop_masked<Tr>(in, b0, i, lane, votes);
    if (!a.unweighted) {
      float with_V[Tr::outputs] = {}, with_ds[Tr::outputs] = {};
      if (a.V) dot<Tr>(votes, V, 0, lane, with_V);
      if constexpr (kBackward) dot<Tr>(votes, ds, 0, lane, with_ds);
      base = in.softmax_in ? 0 : size - base;
      gpu::warp_barrier();  // all lanes have read the coefficients of the capsule before
      write_scores<Tr>(with_V, lane, J, base, logits);
      if constexpr (kBackward) write_scores<Tr>(with_ds, lane, J, base, weights);
      if (in.softmax_in) {
        bool moved = false;
        if (follows) {
          moved = follow_columns<Tr>(in, running, b0, i, lane, weights);
        } else {
          softmax_columns<Tr>(in, columns, true, a.dcoupling, a.coupling, b0, i, lane, 0, logits, weights);
        }
        gpu::warp_barrier();
        if (moved) rescale<Tr>(lane, J, running.factor, sum);
      } else {
        gpu::barrier();
        softmax_rows<Tr, kBackward>(in, softmax, b0, i, lane, base, logits, weights);
        gpu::barrier();
      }
    }
    if (a.sum) add_weighted<Tr>(votes, lane, a.unweighted, J, weights, base, sum);
  }
  if (a.sum) write_sum<Tr>(a, b0, split, lane, sum);
  if (follows) {
    each_column<Tr>(in, b0, lane, [&](int b, int j, int at) {
      const int64_t to = (split * in.B + b) * in.J + j;
      a.max[to] = running.max[at];
      a.total[to] = static_cast<double>(static_cast<float>(running.total[at]));
    });
  }
}

// Passes [begin, end) of a forward or backward. If `together`, a cooperative launch runs these and the steps between
// and after them; begin = -1 adds the step before pass 0. Else it is a launch of one pass without steps.
template <bool kBackward>
struct TilePasses {
  std::conditional_t<kBackward, BackwardSteps<float>, ForwardSteps<float>> steps;
  bool in_runs, tf32, together;
  int begin, end;

  CAPSFAST_DEVICE TileArgs pass(int n) const {
    const ReduceArgs<float> args = steps.pass(n);
    const Scoring<float>& with = args.scoring;
    return {args.in,       in_runs,         tf32,      with.V,        with.ds,  with.dcoupling,
            args.coupling, args.unweighted, args.norm, args.sum_tile, args.max, args.total};
  }
};

// Tiles of samples are the fast axis of the grid: blocks that read the same weights are neighbours, and run at about
// the same time.
template <class E, int kK, int kD, bool kBackward, bool kTwo>
CAPSFAST_KERNEL(32 * TileSize::resident_warps(kTwo), 1)
tile_kernel(TilePasses<kBackward> a) {
  using Tr = Tiles<E, kK, kD, kBackward, kTwo>;
  for (int n = a.begin; n < a.end; ++n) {
    if (n >= 0) {
      reduce_tile<Tr, E>(a.pass(n), static_cast<int>(gpu::block_x()) * Tr::samples, static_cast<int>(gpu::block_y()),
                         static_cast<int>(gpu::blocks_y()));
      if (!a.together) return;
      gpu::grid_barrier();
    }
    a.steps.after(n);
    if (n + 1 < a.end) gpu::grid_barrier();
  }
}

}  // namespace capsfast::cuda
