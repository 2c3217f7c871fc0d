// The pass that accumulates sum_i c votes (forward) or sum_i db votes (backward) for J up to 12, D and K up to 16, on
// tensor cores. A warp has 16 samples and all columns (j, d), see layout.h, and walks over input capsules. Warps wait
// for each other only between two chunks of weights. The sums of the warps of a block, then of the blocks of
// a cluster, are added up in a fixed order before one partial sum goes to memory.
#pragma once

#include <type_traits>

#include "../../../cuda/grid.h"
#include "../steps.h"
#include "softmax.h"

namespace capsfast::cuda::rows {

using Pass = cuda::AccumulateArgs<float>;

// Passes [begin, end) of a forward or backward. If `together`, a cooperative launch runs these passes and the steps
// between and after them; begin = -1 adds the step before pass 0. Else the launch has one pass and no steps.
template <bool kBackward>
struct AccumulateArgs {
  std::conditional_t<kBackward, BackwardSteps<float>, ForwardSteps<float>> steps;
  Shape shape;
  bool together;
  int begin, end;

  CAPSFAST_DEVICE Pass pass(int n) const {
    Pass pass = steps.pass(n);
    // Always set, even if the pass does not score with V: a choice would take a register.
    if constexpr (!kBackward) pass.scoring.V = steps.V;
    return pass;
  }
};

// Shared memory of a block after the last chunk of a segment: half of the sums of some of its warps, Tr::vectors / 2
// floats each. All of them at once would take so much that V and ds no longer fit the L1 cache.
template <class Tr>
class JoinMemory {
 public:
  static constexpr int tiles = Tr::tiles / 2, fours = tiles * 32;

  CAPSFAST_HOST_DEVICE explicit JoinMemory(const Shape& shape)
      : slots_(shape.warps() / 2 > shape.strips() ? shape.warps() / 2 : shape.strips()) {}
  CAPSFAST_HOST_DEVICE int bytes() const { return kArrivalBytes + 16 * slots_ * fours; }
  CAPSFAST_DEVICE Shared<Four> sums() const { return gpu::shared<Four>(kArrivalBytes, slots_ * fours); }

 private:
  int slots_;
};

template <class Tr>
CAPSFAST_HOST_DEVICE int accumulate_bytes(const Inputs& in, const Shape& shape) {
  const int ring = Weights<Tr>(in, shape).bytes(), join = JoinMemory<Tr>(shape).bytes();
  return ring > join ? ring : join;
}

// Adds up half of the sums of the warps of a block that share a strip, pairs of warps first; leaves it in shared
// memory.
template <class Tr>
CAPSFAST_DEVICE void join_warps(const Shape& shape, const ThreadCoord& at, int half, Accumulator (&sum)[Tr::tiles]) {
  using Memory = JoinMemory<Tr>;
  const Shared<Four> sums = Memory(shape).sums();
  const auto each = [&](int slot, const auto& f) {
    unrolled<Memory::tiles>([&](int tile) {
      f(slot * Memory::fours + tile * 32 + at.lane, sum[half * Memory::tiles + tile]);
    });
  };
  const auto put = [&](int n, Accumulator& sum) { sums[n] = four(sum); };
  for (int left = shape.warps() / 2; left >= shape.strips(); left /= 2) {
    if (at.warp >= left && at.warp < 2 * left) each(at.warp - left, put);
    gpu::barrier();
    if (at.warp < left) each(at.warp, [&](int n, Accumulator& sum) { add(sum, sums[n]); });
    gpu::barrier();
  }
  if (at.warp < shape.strips()) each(at.warp, put);
}

// Adds up half of the sums of the blocks of a cluster and writes it; each block does a part.
template <class Tr>
CAPSFAST_DEVICE void write_sums(const Pass& a, const Shape& shape, int64_t segment, int b0, int half) {
  using Memory = JoinMemory<Tr>;
  const Inputs& in = a.in;
  const Work& work = a.to.work;
  const Memory memory(shape);
  const int D = static_cast<int>(in.D), J = static_cast<int>(in.J), size = gpu::cluster_size();
  const int first = gpu::cluster_rank() * gpu::threads() + gpu::thread(), step = size * gpu::threads();
#pragma unroll 1
  for (int n = first; n < shape.strips() * Memory::fours; n += step) {
    const int lane = n % 32, sample = n / Memory::fours * kSamples + lane / 4;
    const int tile = half * Memory::tiles + n / 32 % Memory::tiles;
    Four parts[kMostCluster];  // all loads are on their way before the first addition
    unrolled<kMostCluster>([&](int rank) {
      if (rank < size) parts[rank] = memory.sums().read_from(rank, n);
    });
    Four sum = parts[0];
    unrolled<kMostCluster - 1>([&](int rank) {
      if (rank + 1 < size) add(sum.value, parts[rank + 1]);
    });
    unrolled<2, 2>([&](int row, int odd) {
      const Component column = component_of(Tr::tiles, tile, 2 * (lane % 4) + odd);
      const int64_t b = b0 + sample + row * 8;
      if (b < in.B && column.j < J && column.d < D)
        a.to.sum_rows[work.row(segment, b, column.j, J) * D + column.d] = sum.value[2 * row + odd];
    });
  }
}

// Adds an input capsule to the sum of a warp.
template <class Tr, bool kBackward>
CAPSFAST_DEVICE void add_capsule(const Global<const float>& V, const Global<const float>& ds, unsigned counts,
                                 const Accumulator (&votes)[Tr::tiles], Accumulator (&sum)[Tr::tiles]) {
  Scores<Tr> b, dc;
  dot<Tr>(votes, V.reread(), b);
  if constexpr (kBackward) dot<Tr>(votes, ds.reread(), dc);
  softmax<Tr, kBackward>(counts, b, dc);
  const Scores<Tr>& c = kBackward ? dc : b;
  unrolled<Tr::tiles, 4>([&](int tile, int n) { sum[tile][n] += c[tile / 8][n / 2] * votes[tile][n]; });
}

// Adds the input capsules [begin, end) of a block, for the samples from b0 on.
template <class Tr, bool kBackward>
CAPSFAST_DEVICE void accumulate(const Pass& a, const Shape& shape, int b0, int begin, int end, const ThreadCoord& at,
                                Accumulator (&sum)[Tr::tiles]) {
  const Weights<Tr> weights(a.in, shape);
  const int strip = at.warp & (shape.strips() - 1), stream = at.warp >> shape.strips_log;
  const int first = b0 + kSamples * strip;  // sample of the strip
  const int64_t vectors = static_cast<int64_t>(b0 / kSamples + strip) * Tr::vectors + at.lane * 4;
  // A strip beyond the batch has no vectors; nothing that it computes is written.
  const bool idle = first >= a.in.B;
  Global<const float> V, ds;
  if (!idle) {
    V = lane_vectors<Tr>(a.scoring.V, vectors, at);
    if constexpr (kBackward) ds = lane_vectors<Tr>(a.scoring.ds, vectors, at);
  }
  const unsigned counts = standing<Tr>(at, static_cast<int>(a.in.J));
  // While the warp works on an input capsule, the poses of the next one are on their way. If a segment is short, a
  // block of a cluster may have no input capsule; then the block loads poses that exist and does not use them.
  const Poses<Tr> poses(a.in, shape, at, first);
  const int last = begin < end ? end - 1 : begin;
  const auto load = [&](int i) { return poses.load(at, i < last ? i : last); };
  typename Poses<Tr>::Raw next = load(begin + stream);
  const auto votes_of = [&](int i, int stage, int capsule, auto adds, Accumulator(&votes)[Tr::tiles]) {
    const typename Poses<Tr>::Raw now = next;
    next = load(i + capsule + shape.streams);
    make_votes<Tr, decltype(adds)::value>(a.in, weights, stage, capsule, now, at, votes);
  };
  weights.walk(begin, end, [&](int i, int count, int stage) {
    if (idle) return;
    if (!kBackward && a.unweighted) {
      // The tensor core adds up only two input capsules at a time, because its additions round towards zero.
#pragma unroll 1
      for (int capsule = stream; capsule < count; capsule += 2 * shape.streams) {
        Accumulator votes[Tr::tiles];
        votes_of(i, stage, capsule, std::false_type(), votes);
        if (capsule + shape.streams < count) votes_of(i, stage, capsule + shape.streams, std::true_type(), votes);
        unrolled<Tr::tiles, 4>([&](int tile, int n) { sum[tile][n] += votes[tile][n]; });
      }
      return;
    }
#pragma unroll 1
    for (int capsule = stream; capsule < count; capsule += shape.streams) {
      Accumulator votes[Tr::tiles];
      votes_of(i, stage, capsule, std::false_type(), votes);
      add_capsule<Tr, kBackward>(V, ds, counts, votes, sum);
    }
  });
}

// Where part `rank` begins, if `count` things are cut into `size` equal parts.
CAPSFAST_DEVICE int part_of(int count, int rank, int size) {
  return static_cast<int>(static_cast<int64_t>(count) * rank / size);
}

// The segments of a cluster in one pass. Other blocks may read this block's sums until the next barrier of the cluster
// or of the grid.
template <class Tr, bool kBackward>
CAPSFAST_DEVICE void accumulate_segments(const Pass& a, const Shape& shape) {
  const Work& work = a.to.work;
  const int rank = gpu::cluster_rank(), size = gpu::cluster_size();
  const int unit = static_cast<int>(gpu::block_x()) / size, I = static_cast<int>(work.I);
  const int begin = static_cast<int>(work.begin(unit)), last = static_cast<int>(work.begin(unit + 1));
  for (int n = begin; n < last;) {
    const int g = n / I, i = n - g * I, b0 = g * static_cast<int>(work.group);
    const int count = last - n < I - i ? last - n : I - i;
    const ThreadCoord at = thread_coord();
    Accumulator sum[Tr::tiles] = {};
    if (n > begin) gpu::cluster_barrier();
    accumulate<Tr, kBackward>(
        a, shape, b0, i + part_of(count, rank, size), i + part_of(count, rank + 1, size), at, sum);
    const ThreadCoord reread = thread_coord();
    unrolled<2>([&](int half) {
      if (half == 1) gpu::cluster_barrier();
      join_warps<Tr>(shape, reread, half, sum);
      gpu::cluster_barrier();
      write_sums<Tr>(a, shape, work.segment(unit, g), b0, half);
    });
    n += count;
  }
}

template <class Steps>
CAPSFAST_CALLED void after_pass(const Steps& steps, int n) {
  steps.after(n);
}

template <class Tr, bool kBackward>
CAPSFAST_KERNEL(32 * kMostWarps, 1)
accumulate_kernel(CAPSFAST_IN_PLACE AccumulateArgs<kBackward> a) {
  if constexpr (!gpu::kTensorCores) return;
  for (int n = a.begin; n < a.end; ++n) {
    if (n >= 0) {
      accumulate_segments<Tr, kBackward>(a.pass(n), a.shape);
      if (!a.together) return gpu::cluster_barrier();
      gpu::grid_barrier();
    }
    after_pass(a.steps, n);
    if (n + 1 < a.end) gpu::grid_barrier();
  }
}

}  // namespace capsfast::cuda::rows
