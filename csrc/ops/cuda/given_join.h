// Adds up the sums of the threads of a block, and those of the blocks of a cluster, in a fixed order. For this the
// threads have other places (Output): each has four components of an output capsule.
#pragma once

#include "given_passes.h"

namespace capsfast::cuda {

// A thread's place among those that have output capsules: number `lane` of the `lanes` neighbours that have capsule j.
// It is computed where it is needed, so that it takes no registers during a pass.
struct Output {
  int lanes, lane, j;
  int four, fours;  // this thread's group of four among the J D / 4 of all output capsules, `fours`
  bool mine;        // the thread has such a place

  CAPSFAST_DEVICE Output(const GivenShape& shape, const Inputs& in) : lanes(1 << shape.output_lanes_log) {
    const int of_one = static_cast<int>(in.D) / GivenSize::few, thread = gpu::reread_thread_idx();
    lane = thread & (lanes - 1);
    j = thread >> shape.output_lanes_log;
    mine = j < in.J && lane < of_one;
    if (j >= in.J) j = 0;
    four = j * of_one + lane;
    fours = static_cast<int>(in.J) * of_one;
  }
};

using FourSum = Sum<GivenSize::few>;

// Adds up `count` sums; `of` has max(k), total(k) and value(k) of the k-th. kFollow: each has a maximum of its own.
template <bool kFollow, class Of>
CAPSFAST_DEVICE FourSum gather(int count, bool leaky, const Of& of) {
  FourSum all;
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
    const Four value = of.value(k);
#pragma unroll
    for (int n = 0; n < GivenSize::few; ++n) all.value.value[n] += factor * value.value[n];
  }
  return all;
}

// The sums of the rows of a block, for gather().
struct OfRows {
  Shared<Four> sums;
  Shared<float> columns;
  int four, fours, j, J;
  CAPSFAST_DEVICE float max(int k) const { return columns[2 * (k * J + j)]; }
  CAPSFAST_DEVICE float total(int k) const { return columns[2 * (k * J + j) + 1]; }
  CAPSFAST_DEVICE Four value(int k) const { return sums.vector<Four>(k * fours + four); }
};

// The sums of the blocks of a cluster, for gather().
struct OfBlocks {
  Shared<Four> sums;
  Shared<float> columns;
  int four, column;
  CAPSFAST_DEVICE float max(int k) const { return columns.read_from(k, column); }
  CAPSFAST_DEVICE float total(int k) const { return columns.read_from(k, column + 1); }
  CAPSFAST_DEVICE Four value(int k) const { return sums.read_from(k, four); }
};

// Adds up the sums `mine` of the threads of a block, in the threads with an Output. There must be a barrier between
// this and the next call. kFollow: each sum has a maximum of its own.
template <bool kFollow, class Tr>
CAPSFAST_DEVICE FourSum join_rows(const Inputs& in, const Spot<Tr>& at, const Output& output, const GivenMemory& memory,
                                  bool leaky, const Sum<Tr::numbers>& mine) {
  const int J = static_cast<int>(in.J), of_one = static_cast<int>(in.D) / GivenSize::few;
  const OfRows of{gpu::shared<Four>(memory.sums, at.rows * output.fours),
                  gpu::shared<float>(memory.columns, kFollow ? 2 * at.rows * J : 0),
                  output.four,
                  output.fours,
                  output.j,
                  J};
  const int group = at.row * J + at.j;
  if (at.mine) {
#pragma unroll
    for (int n = 0; n < Tr::Numbers::fours; ++n) of.sums[group * of_one + at.four(n)] = mine.value.four(n);
    if (kFollow && at.leads()) {
      of.columns[2 * group] = mine.max;
      of.columns[2 * group + 1] = mine.total;
    }
  }
  gpu::barrier();
  return output.mine ? gather<kFollow>(at.rows, leaky, of) : FourSum{};
}

// The same for all blocks of a cluster; every block gets the result. buffer: 0 and 1 in turn, so that one barrier of
// the cluster a call is enough.
template <bool kFollow, class Tr>
CAPSFAST_DEVICE FourSum join_cluster(const Inputs& in, const Spot<Tr>& at, const Output& output,
                                     const GivenMemory& memory, int buffer, const Sum<Tr::numbers>& mine) {
  const FourSum block = join_rows<kFollow>(in, at, output, memory, in.leaky && gpu::cluster_rank() == 0, mine);
  if (gpu::cluster_size() == 1) return block;
  const int J = static_cast<int>(in.J);
  const OfBlocks of{
      gpu::shared<Four>(memory.shares, 2 * output.fours), gpu::shared<float>(memory.share_columns, kFollow ? 4 * J : 0),
      buffer * output.fours + output.four, 2 * (buffer * J + output.j)};
  if (output.mine) {
    of.sums[of.four] = block.value.four(0);
    if (kFollow && output.lane == 0) {
      of.columns[of.column] = block.max;
      of.columns[of.column + 1] = block.total;
    }
  }
  gpu::cluster_barrier();
  return output.mine ? gather<kFollow>(gpu::cluster_size(), false, of) : FourSum{};
}

}  // namespace capsfast::cuda
