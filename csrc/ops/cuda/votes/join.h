// Adds up the sums of the threads of a block, and those of the blocks of a cluster, in a fixed order, and squashes the
// result. For this the threads have other coordinates (OutputCoord): each has four components of an output capsule.
#pragma once

#include "../update.h"
#include "accumulate.h"

namespace capsfast::cuda {

// A thread's coordinates among those that have output capsules: it is lane `lane` of the `lanes` that have capsule j.
// It is computed where it is needed, so that it takes no registers during a pass.
struct OutputCoord {
  int lanes, lane, j;
  int quad, quads;  // this thread's quad among the J D / 4 of all output capsules, `quads`
  bool mine;        // the thread has such coordinates

  CAPSFAST_DEVICE OutputCoord(const VotesShape& shape, const Inputs& in) : lanes(1 << shape.output_lanes_log) {
    const int of_one = static_cast<int>(in.D) / VotesSize::few, thread = gpu::reread_thread_idx();
    lane = thread & (lanes - 1);
    j = thread >> shape.output_lanes_log;
    mine = j < in.J && lane < of_one;
    if (j >= in.J) j = 0;
    quad = j * of_one + lane;
    quads = static_cast<int>(in.J) * of_one;
  }
};

using QuadSum = Sum<VotesSize::few>;

// Adds up `count` sums; `of` has max(k), total(k) and value(k) of the k-th. kFollow: each has a maximum of its own.
template <bool kFollow, class Of>
CAPSFAST_DEVICE QuadSum add_sums(int count, bool leaky, const Of& of) {
  QuadSum all;
  if constexpr (kFollow) {
    // The leaky entry has logit 0.
    if (leaky) all.max = 0.0f;
    for (int k = 0; k < count; ++k) all.max = larger<float>(all.max, of.max(k));
    if (leaky) all.total = exponential(-all.max);
  }
#pragma unroll 4
  for (int k = 0; k < count; ++k) {
    float factor = 1.0f;
    if constexpr (kFollow) {
      factor = exponential(of.max(k) - all.max);
      all.total += factor * of.total(k);
    }
    const Quad value = of.value(k);
#pragma unroll
    for (int n = 0; n < VotesSize::few; ++n) all.value.value[n] += factor * value.value[n];
  }
  return all;
}

// The sums of the rows of a block, for add_sums().
struct RowSums {
  Shared<Quad> sums;
  Shared<float> columns;
  int quad, quads, j, J;
  CAPSFAST_DEVICE float max(int k) const { return columns[2 * (k * J + j)]; }
  CAPSFAST_DEVICE float total(int k) const { return columns[2 * (k * J + j) + 1]; }
  CAPSFAST_DEVICE Quad value(int k) const { return sums.vector<Quad>(k * quads + quad); }
};

// The sums of the blocks of a cluster, for add_sums().
struct BlockSums {
  Shared<Quad> sums;
  Shared<float> columns;
  int quad, column;
  CAPSFAST_DEVICE float max(int k) const { return columns.read_from(k, column); }
  CAPSFAST_DEVICE float total(int k) const { return columns.read_from(k, column + 1); }
  CAPSFAST_DEVICE Quad value(int k) const { return sums.read_from(k, quad); }
};

// Adds up the sums `mine` of the threads of a block, in the threads with an OutputCoord. There must be a barrier
// between this and the next call. kFollow: each sum has a maximum of its own.
template <bool kFollow, class Traits>
CAPSFAST_DEVICE QuadSum join_rows(const Inputs& in, const ThreadCoord<Traits>& at, const OutputCoord& output,
                                  const VotesMemory& memory, bool leaky, const Sum<Traits::elements>& mine) {
  const int J = static_cast<int>(in.J), of_one = static_cast<int>(in.D) / VotesSize::few;
  const RowSums of{
      gpu::shared<Quad>(memory.sums, at.rows * output.quads),
      gpu::shared<float>(memory.columns, kFollow ? 2 * at.rows * J : 0),
      output.quad,
      output.quads,
      output.j,
      J};
  const int group = at.row * J + at.j;
  if (at.mine) {
#pragma unroll
    for (int n = 0; n < Traits::Elements::quads; ++n) of.sums[group * of_one + at.quad(n)] = mine.value.quad(n);
    if (kFollow && at.leads()) {
      of.columns[2 * group] = mine.max;
      of.columns[2 * group + 1] = mine.total;
    }
  }
  gpu::barrier();
  return output.mine ? add_sums<kFollow>(at.rows, leaky, of) : QuadSum{};
}

// The same for all blocks of a cluster; every block gets the result. buffer: 0 and 1 in turn, so that one barrier of
// the cluster a call is enough.
template <bool kFollow, class Traits>
CAPSFAST_DEVICE QuadSum join_cluster(const Inputs& in, const ThreadCoord<Traits>& at, const OutputCoord& output,
                                     const VotesMemory& memory, int buffer, const Sum<Traits::elements>& mine) {
  const QuadSum block = join_rows<kFollow>(in, at, output, memory, in.leaky && gpu::cluster_rank() == 0, mine);
  if (gpu::cluster_size() == 1) return block;
  const int J = static_cast<int>(in.J);
  const BlockSums of{
      gpu::shared<Quad>(memory.shares, 2 * output.quads), gpu::shared<float>(memory.share_columns, kFollow ? 4 * J : 0),
      buffer * output.quads + output.quad, 2 * (buffer * J + output.j)};
  if (output.mine) {
    of.sums[of.quad] = block.value.quad(0);
    if (kFollow && output.lane == 0) {
      of.columns[of.column] = block.max;
      of.columns[of.column + 1] = block.total;
    }
  }
  gpu::cluster_barrier();
  return output.mine ? add_sums<kFollow>(gpu::cluster_size(), false, of) : QuadSum{};
}

// The index of this thread's quad at index n of a tensor [.., J, D] of quads.
CAPSFAST_DEVICE int64_t quad_index(const OutputCoord& at, int64_t n) { return n * at.quads + at.quad; }

// s + bias.
CAPSFAST_DEVICE QuadVector add_bias(const Squashing& squash, const OutputCoord& at, const QuadVector& s) {
  QuadVector to = s;
#pragma unroll
  for (int n = 0; n < VotesSize::few; ++n) {
    if (at.mine) to.value[n] = squash.biased(s.value[n], at.j, VotesSize::few * at.lane + n);
  }
  return to;
}

// squash(s + bias); 0 unless `valid`.
CAPSFAST_DEVICE QuadVector squash_output(const Squashing& squash, const OutputCoord& at, bool valid,
                                         const QuadVector& s) {
  const QuadVector x = add_bias(squash, at, s);
  const float n = lane_sum(product(x, x), at.lanes), f = radial<float>(squash.kind, n, static_cast<float>(squash.eps));
  QuadVector to = {};
  if (valid) add(f, x, &to);
  return to;
}

// The gradient of s, if g is that of squash(s + bias); 0 unless `valid`.
CAPSFAST_DEVICE QuadVector squash_gradient(const Squashing& squash, const OutputCoord& at, bool valid,
                                           const QuadVector& s, const QuadVector& g) {
  const QuadVector x = add_bias(squash, at, s);
  const float n = lane_sum(product(x, x), at.lanes), x_g = lane_sum(product(x, g), at.lanes),
              eps = static_cast<float>(squash.eps);
  const float f = radial<float>(squash.kind, n, eps), slope = 2 * radial_derivative<float>(squash.kind, n, eps) * x_g;
  QuadVector to = {};
  if (valid) {
    add(f, g, &to);
    add(slope, x, &to);
  }
  return to;
}

}  // namespace capsfast::cuda
