// The pass that accumulates sum_i c votes (forward) or sum_i db votes (backward) for J up to 12, D and K up to 16, on
// tensor cores. A warp has 16 samples and all columns (j, d), see layout.h, and walks over input capsules. Warps wait
// for each other only between two chunks of weights and poses. The sums of the warps of a block, then of the blocks of
// a cluster, are added up in a fixed order before one partial sum goes to memory.
#pragma once

#include "../steps.h"
#include "softmax.h"

namespace capsfast::cuda::rows {

// One pass. The arguments of all families, except that V is always there, even if the pass does not score with it.
struct Pass : cuda::AccumulateArgs<float> {
  bool scored;  // whether votes are scored with V: not in the first iteration
  int zero;     // always 0. The compiler does not know, and so reads V anew instead of keeping it in registers
};

// Passes [begin, end) of a forward or backward. If `together`, a cooperative launch runs these passes and the steps
// between and after them; begin = -1 adds the step before pass 0. Else the launch has one pass and no steps.
template <bool kBackward>
struct AccumulateArgs {
  std::conditional_t<kBackward, BackwardSteps<float>, ForwardSteps<float>> steps;
  Work work;
  Shape shape;
  bool together;
  int begin, end, zero;

  CAPSFAST_DEVICE Pass pass(int n) const {
    Pass pass{steps.pass(n), false, zero};
    pass.scored = static_cast<bool>(pass.scoring.V);
    // Always set, even if the pass does not score with V: a choice would take a register.
    if constexpr (!kBackward) pass.scoring.V = steps.V;
    return pass;
  }
};

// Shared memory of a block after the last chunk of a segment: the sums of some of its warps, Tr::vectors floats each.
// With a running maximum then two numbers for each warp's columns [16][Tr::outputs], and the block's maxima.
template <class Tr>
class JoinMemory {
 public:
  static constexpr int columns = kSamples * Tr::outputs;

  CAPSFAST_HOST_DEVICE explicit JoinMemory(const Shape& shape)
      : tiles_(shape.tiles()), warps_(shape.warps()), slots_(warps_ / 2 > tiles_ ? warps_ / 2 : tiles_) {}
  CAPSFAST_HOST_DEVICE int bytes() const {
    return 4 * (slots_ * Tr::vectors + (Tr::in ? (2 * warps_ + tiles_) * columns : 0));
  }
  CAPSFAST_DEVICE Shared<Four> sums() const { return gpu::shared<Four>(0, slots_ * Tr::vectors / 4); }
  CAPSFAST_DEVICE Shared<float> max() const { return columns_from(0, warps_); }
  CAPSFAST_DEVICE Shared<float> total() const { return columns_from(warps_, warps_); }
  CAPSFAST_DEVICE Shared<float> block_max() const { return columns_from(2 * warps_, tiles_); }

 private:
  CAPSFAST_DEVICE Shared<float> columns_from(int first, int count) const {
    return gpu::shared<float>(4 * (slots_ * Tr::vectors + first * columns), count * columns);
  }
  int tiles_, warps_, slots_;
};

template <class Tr>
CAPSFAST_HOST_DEVICE int accumulate_bytes(const Inputs& in, const Shape& shape) {
  const int chunk = ChunkMemory<Tr>(in, shape).end, join = JoinMemory<Tr>(shape).bytes();
  return chunk > join ? chunk : join;
}

// Calls f(slot, row, n) for this lane's columns, where n is the index in an array [16][Tr::outputs]. A column that two
// lanes share belongs to the first lane, except for reads.
template <class Tr, class F>
CAPSFAST_DEVICE void each_column(const ThreadCoord& at, bool reads, const F& f) {
  unrolled<Tr::slots, 2>([&](int slot, int row) {
    if (reads || slot < Tr::groups || at.quad % 2 == 0)
      f(slot, row, (at.group + 8 * row) * Tr::outputs + output_of<Tr>(at, slot));
  });
}

// Rescales the sums of all warps of the cluster that share a tile to a common maximum. Leaves the totals in shared
// memory.
template <class Tr>
CAPSFAST_DEVICE void agree_on_maximum(const Shape& shape, const ThreadCoord& at, Accumulation<Tr>* mine) {
  const JoinMemory<Tr> memory(shape);
  const int tile = at.warp & (shape.tiles() - 1), from = at.warp * memory.columns, to = tile * memory.columns;
  const Shared<float> max = memory.max(), total = memory.total(), block_max = memory.block_max();
  each_column<Tr>(at, false, [&](int slot, int row, int n) { max[from + n] = mine->max[slot][row]; });
  gpu::barrier();
  if (at.warp < shape.tiles()) {
    each_column<Tr>(at, false, [&](int, int, int n) {
      float m = Extreme<float>::lowest;
      for (int warp = tile; warp < shape.warps(); warp += shape.tiles())
        m = std::fmax(m, static_cast<float>(max[warp * memory.columns + n]));
      block_max[to + n] = m;
    });
  }
  gpu::cluster_barrier();
  Scores<Tr> factor;
  each_column<Tr>(at, true, [&](int slot, int row, int n) {
    float m = Extreme<float>::lowest;
    for (int rank = 0; rank < gpu::cluster_size(); ++rank) m = std::fmax(m, block_max.read_from(rank, to + n));
    factor[slot][row] = exponential(mine->max[slot][row] - m);
  });
  each_column<Tr>(
      at, false, [&](int slot, int row, int n) { total[from + n] = mine->total[slot][row] * factor[slot][row]; });
  rescale<Tr>(factor, mine->sum);
}

// Adds up the sums of the warps of a block that share a tile, pairs of warps first; leaves them in shared memory.
template <class Tr>
CAPSFAST_DEVICE void join_warps(const Shape& shape, const ThreadCoord& at, Accumulation<Tr>* mine) {
  const Shared<Four> sums = JoinMemory<Tr>(shape).sums();
  const auto put = [&](int warp) {
    unrolled<Tr::tiles>([&](int tile) { sums[(warp * Tr::tiles + tile) * 32 + at.lane] = four(mine->sum[tile]); });
  };
  for (int left = shape.warps() / 2; left >= shape.tiles(); left /= 2) {
    if (at.warp >= left && at.warp < 2 * left) put(at.warp - left);
    gpu::barrier();
    if (at.warp < left) {
      unrolled<Tr::tiles>([&](int tile) { add(mine->sum[tile], sums[(at.warp * Tr::tiles + tile) * 32 + at.lane]); });
    }
    gpu::barrier();
  }
  if (at.warp < shape.tiles()) put(at.warp);
}

// Adds up the sums of the blocks of a cluster and writes them; each block does a part.
template <class Tr>
CAPSFAST_DEVICE void write_sums(const Pass& a, const Work& work, const Shape& shape, int64_t segment, int b0) {
  const Inputs& in = a.in;
  const JoinMemory<Tr> memory(shape);
  const int D = static_cast<int>(in.D), J = static_cast<int>(in.J), size = gpu::cluster_size();
  const int first = gpu::cluster_rank() * gpu::threads() + gpu::thread(), step = size * gpu::threads();
#pragma unroll 1
  for (int n = first; n < shape.tiles() * Tr::vectors / 4; n += step) {
    const int lane = n % 32, tile = n / 32 % Tr::tiles, sample = n / (Tr::vectors / 4) * kSamples + lane / 4;
    const Component column = component_of(Tr::tiles, tile, 2 * (lane % 4));
    Four sum = memory.sums().read_from(0, n);
#pragma unroll 1
    for (int rank = 1; rank < size; ++rank) add(sum.value, memory.sums().read_from(rank, n));
    unrolled<2, 2>([&](int row, int odd) {
      const int64_t b = b0 + sample + row * 8;
      const int d = column.d + odd;
      if (b < in.B && column.j < J && d < D)
        a.sum_rows[work.row(segment, b, column.j, J) * D + d] = sum.value[2 * row + odd];
    });
  }
  if constexpr (Tr::in) {
    if (!a.max) return;
    const Shared<float> max = memory.block_max(), total = memory.total();
    const int columns = shape.tiles() * memory.columns;
    for (int n = first; n < columns; n += step) {
      const int j = n % Tr::outputs;
      const int64_t b = b0 + n / Tr::outputs, row = work.row(segment, b, j, J);
      if (b >= in.B || j >= J) continue;
      float m = Extreme<float>::lowest;
      double sum = 0.0;
      for (int rank = 0; rank < size; ++rank) {
        m = std::fmax(m, max.read_from(rank, n));
        for (int stream = 0; stream < shape.streams; ++stream)
          sum += static_cast<double>(total.read_from(rank, stream * columns + n));
      }
      a.max[row] = m;
      a.total[row] = sum;
    }
  }
}

// One input capsule of a warp.
template <class Tr, bool kBackward>
CAPSFAST_DEVICE void add_capsule(const Pass& a, const ThreadCoord& at, const ScoreCoord& of, int64_t vectors,
                                 unsigned counts, const Accumulator (&votes)[Tr::tiles], Accumulation<Tr>* mine) {
  const Inputs& in = a.in;
  Scores<Tr> b = {}, dc;
  if (Tr::plain || a.scored) dot<Tr>(votes, lane_vectors<Tr>(a.scoring.V, vectors, at), b);
  if constexpr (kBackward) dot<Tr>(votes, lane_vectors<Tr>(a.scoring.ds, vectors, at), dc);
  if constexpr (!Tr::plain) apply_options<Tr, kBackward>(in, a.scoring.dcoupling, kBackward, at, of, b, dc);
  if constexpr (Tr::in) {
    if (!kBackward && a.max) {
      follow_maximum<Tr>(mine, b);
    } else {
      softmax_known<Tr, kBackward>(in, a.norm, at, of, b, dc);
    }
  } else {
    softmax_out<Tr, kBackward>(counts, in.leaky, b, dc);
  }
  if constexpr (!Tr::plain && !kBackward) {
    if (a.coupling.data) write_scores<Tr>(in, a.coupling, at, of, b);
    gpu::warp_barrier();  // products follow, which take the whole warp
    if (Tr::in && !a.sum_rows) return;
  }
  const Scores<Tr>& c = kBackward ? dc : b;
  unrolled<Tr::tiles, 4>([&](int tile, int n) { mine->sum[tile][n] += c[tile / 8][n / 2] * votes[tile][n]; });
}

// The input capsules [begin, end) of a block, for the samples from b0 on.
template <class Tr, bool kBackward>
CAPSFAST_DEVICE void accumulate(const Pass& a, const Shape& shape, int b0, int begin, int end, const ThreadCoord& at,
                                Accumulation<Tr>* mine) {
  const Chunk<Tr> chunk(a.in, shape);
  const int tile = at.warp & (shape.tiles() - 1), stream = at.warp >> shape.tiles_log;
  const ScoreCoord samples{b0 + kSamples * tile, 0};
  const int64_t vectors = static_cast<int64_t>(b0 / kSamples + tile) * Tr::vectors + at.lane * 4;
  // A tile beyond the batch has no vectors; nothing that it computes is written.
  const bool idle = samples.b0 >= a.in.B;
  const unsigned counts = standing<Tr>(at, static_cast<int>(a.in.J));
  chunk.walk(b0, begin, end, [&](int i, int count) {
    if (idle) return;
    if (!kBackward && a.unweighted && (Tr::plain || !a.in.mask.data)) {
      // The tensor core adds up only a chunk, because its additions round towards zero.
      Accumulator votes[Tr::tiles] = {};
#pragma unroll 1
      for (int capsule = stream; capsule < count; capsule += shape.streams)
        make_votes<Tr, true>(chunk, capsule, tile, at, votes);
      unrolled<Tr::tiles, 4>([&](int tile, int n) { mine->sum[tile][n] += votes[tile][n]; });
      return;
    }
#pragma unroll 1
    for (int capsule = stream; capsule < count; capsule += shape.streams) {
      Accumulator votes[Tr::tiles];
      make_votes<Tr, false>(chunk, capsule, tile, at, votes);
      if constexpr (!Tr::plain) {
        drop_masked<Tr>(a.in, samples.b0, i + capsule, at, votes);
        if (!kBackward && a.unweighted) {
          unrolled<Tr::tiles, 4>([&](int tile, int n) { mine->sum[tile][n] += votes[tile][n]; });
          continue;
        }
      }
      add_capsule<Tr, kBackward>(
          a, at, {samples.b0 + capsule * a.zero, i + capsule}, vectors + capsule * a.zero, counts, votes, mine);
    }
  });
}

// Where part `rank` of `count` things begins, of `size` equal parts.
CAPSFAST_DEVICE int part_of(int count, int rank, int size) {
  return static_cast<int>(static_cast<int64_t>(count) * rank / size);
}

// The segments of a cluster in one pass. Begins with a barrier, because the block may have used shared memory before.
template <class Tr, bool kBackward>
CAPSFAST_DEVICE void accumulate_segments(const Pass& a, const Work& work, const Shape& shape) {
  const int rank = gpu::cluster_rank(), size = gpu::cluster_size();
  const int unit = static_cast<int>(gpu::block_x()) / size, I = static_cast<int>(work.I);
  const int last = static_cast<int>(work.begin(unit + 1));
  for (int n = static_cast<int>(work.begin(unit)); n < last;) {
    const int g = n / I, i = n - g * I, b0 = g * static_cast<int>(work.group);
    const int here = last - n < I - i ? last - n : I - i;
    const ThreadCoord at = thread_coord();
    Accumulation<Tr> mine{};
    if constexpr (Tr::in) {
      const bool leaky = a.in.leaky && i == 0 && rank == 0 && at.warp < shape.tiles();  // the leaky entry counts once
      unrolled<Tr::slots, 2>([&](int slot, int row) {
        mine.max[slot][row] = leaky ? 0.0f : Extreme<float>::lowest;
        mine.total[slot][row] = leaky ? 1.0f : 0.0f;
      });
    }
    gpu::cluster_barrier();
    accumulate<Tr, kBackward>(
        a, shape, b0, i + part_of(here, rank, size), i + part_of(here, rank + 1, size), at, &mine);
    if (a.sum_rows) {
      gpu::barrier();
      const ThreadCoord anew = thread_coord();
      if constexpr (Tr::in) {
        if (a.max) agree_on_maximum<Tr>(shape, anew, &mine);
      }
      join_warps<Tr>(shape, anew, &mine);
      gpu::cluster_barrier();
      write_sums<Tr>(a, work, shape, work.segment(unit, g), b0);
    }
    n += here;
  }
  // No block may exit, or use its shared memory for a step, while other blocks read its sums.
  gpu::cluster_barrier();
}

template <class Steps>
CAPSFAST_CALLED void after_pass(const Steps& steps, int n) {
  steps.after(n, Share::of_grid(steps.in));
}

template <class Tr, bool kBackward>
CAPSFAST_KERNEL(32 * kMostWarps, 1)
accumulate_kernel(CAPSFAST_IN_PLACE AccumulateArgs<kBackward> a) {
  if constexpr (!gpu::kTensorCores) return;
  for (int n = a.begin; n < a.end; ++n) {
    if (n >= 0) {
      accumulate_segments<Tr, kBackward>(a.pass(n), a.work, a.shape);
      if (!a.together) return;
      gpu::grid_barrier();
    }
    after_pass(a.steps, n);
    if (n + 1 < a.end) gpu::grid_barrier();
  }
}

}  // namespace capsfast::cuda::rows
