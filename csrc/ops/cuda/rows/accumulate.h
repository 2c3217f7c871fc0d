// The pass that accumulates sum_i c votes (forward) or sum_i db votes (backward) for J up to 12, D and K up to 16, on
// tensor cores. A warp has 16 samples and all columns (j, d), see layout.h, and walks over input capsules; no warp
// waits for another but where a chunk of weights and poses gives way to the next. The sums of the warps of a block,
// then of the blocks of a cluster, are added up in a fixed order before one partial sum goes to memory.
#pragma once

#include "../steps.h"
#include "softmax.h"

namespace capsfast::cuda::rows {

// One pass.
struct Pass {
  Inputs in;
  Global<const float> V;   // [tiles of 16 samples][Tr::vectors]
  bool scored;             // whether votes are scored with V: not in the first iteration
  Global<const float> ds;  // as V, absent in the forward
  Operand dcoupling;       // [B, I, J], added to dc
  Operand coupling;        // [B, I, J], written
  Normaliser<float> norm;  // [B, J], of a softmax over the input capsules whose normaliser is known
  bool unweighted;         // every coefficient is 1
  int zero;                // 0, which the compiler does not know: so it reads V anew instead of keeping all of it
  Global<float> sum;       // [segments, group, J, D], written; absent if only the coupling is wanted
  Global<float> max;       // [segments, group, J], written, if the normaliser is not known yet
  Global<double> total;    // [segments, group, J], written with max: sum of exp(b - max)
};

// Passes [begin, end) of a forward or backward. If `together`, a cooperative launch runs these and the steps between
// and after them; begin = -1 adds the step before pass 0. Else it is a launch of one pass without steps.
template <bool kBackward>
struct AccumulateArgs {
  std::conditional_t<kBackward, BackwardSteps<float>, ForwardSteps<float>> steps;
  Work work;
  Shape shape;
  InPieces in_pieces;
  bool together;
  int begin, end, zero;

  CAPSFAST_DEVICE Pass pass(int n) const {
    const cuda::AccumulateArgs<float> args = steps.pass(n);
    const Scoring<float>& with = args.scoring;
    Global<const float> V = with.V;
    // Where it is not scored with, it must not be chosen: that would take a register.
    if constexpr (!kBackward) V = steps.V;
    return {args.in,       V,         static_cast<bool>(with.V), with.ds, with.dcoupling,
            args.coupling, args.norm, args.unweighted,           zero,    args.sum_rows,
            args.max,      args.total};
  }
};

// Shared memory of a block after the last chunk of a segment, in floats: the sums of some of its warps, Tr::vectors
// each, then for a running maximum two numbers of each warp's columns [16][Tr::outputs], and the block's maxima.
template <class Tr>
struct JoinMemory {
  int sums, max, total, block_max, end;
  CAPSFAST_HOST_DEVICE JoinMemory(const Shape& shape) {
    constexpr int kColumns = kSamples * Tr::outputs;
    const int half = shape.warps() / 2;
    sums = 0;
    max = sums + (half > shape.tiles() ? half : shape.tiles()) * Tr::vectors;
    total = max + (Tr::in ? shape.warps() * kColumns : 0);
    block_max = total + (Tr::in ? shape.warps() * kColumns : 0);
    end = block_max + (Tr::in ? shape.tiles() * kColumns : 0);
  }
};

template <class Tr>
CAPSFAST_HOST_DEVICE int accumulate_bytes(const Inputs& in, const Shape& shape) {
  const int chunk = chunk_memory<Tr>(in, shape).end, join = 4 * JoinMemory<Tr>(shape).end;
  return chunk > join ? chunk : join;
}

// What a warp has of a segment.
template <class Tr>
struct Accumulation {
  Accumulator sum[Tr::tiles];
  Running<Tr> run;
};

// Calls f(slot, row, n) for this lane's columns, n being their index in an array [16][Tr::outputs]. A column that two
// lanes share belongs to the first.
template <class Tr, class F>
CAPSFAST_DEVICE void each_column(const ThreadCoord& at, const F& f) {
#pragma unroll
  for (int slot = 0; slot < Tr::slots; ++slot) {
    if (slot == Tr::groups && at.quad % 2 != 0) continue;
#pragma unroll
    for (int row = 0; row < 2; ++row) f(slot, row, (at.group + 8 * row) * Tr::outputs + output_of<Tr>(at, slot));
  }
}

// Gives the sums of all warps of the cluster that share a tile a common maximum, and leaves their totals in shared
// memory.
template <class Tr>
CAPSFAST_DEVICE void agree_on_maximum(const Shape& shape, const ThreadCoord& at, Accumulation<Tr>* mine) {
  constexpr int kColumns = kSamples * Tr::outputs;
  const JoinMemory<Tr> memory(shape);
  const int columns = shape.warps() * kColumns, tile = at.warp & (shape.tiles() - 1);
  const Shared<float> max = gpu::shared<float>(4 * memory.max, columns),
                      total = gpu::shared<float>(4 * memory.total, columns),
                      block_max = gpu::shared<float>(4 * memory.block_max, shape.tiles() * kColumns);
  each_column<Tr>(at, [&](int slot, int row, int n) { max[at.warp * kColumns + n] = mine->run.max[slot][row]; });
  gpu::barrier();
  if (at.warp < shape.tiles()) {
    each_column<Tr>(at, [&](int, int, int n) {
      float m = Extreme<float>::lowest;
      for (int warp = tile; warp < shape.warps(); warp += shape.tiles())
        m = std::fmax(m, static_cast<float>(max[warp * kColumns + n]));
      block_max[tile * kColumns + n] = m;
    });
  }
  gpu::cluster_barrier();
  Scores<Tr> factor;
#pragma unroll
  for (int slot = 0; slot < Tr::slots; ++slot) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int n = (at.group + 8 * row) * Tr::outputs + output_of<Tr>(at, slot);
      float m = Extreme<float>::lowest;
      for (int rank = 0; rank < gpu::cluster_size(); ++rank)
        m = std::fmax(m, block_max.read_from(rank, tile * kColumns + n));
      factor[slot][row] = exponential(mine->run.max[slot][row] - m);
      mine->run.max[slot][row] = m;
    }
  }
  each_column<Tr>(at, [&](int slot, int row, int n) {
    total[at.warp * kColumns + n] = mine->run.total[slot][row] * factor[slot][row];
  });
  rescale<Tr>(factor, mine->sum);
}

// Adds up the sums of the warps of a block that share a tile, pairs of warps first; leaves them in shared memory.
template <class Tr>
CAPSFAST_DEVICE void join_warps(const Shape& shape, const ThreadCoord& at, Accumulation<Tr>* mine) {
  const int slots = shape.warps() / 2 > shape.tiles() ? shape.warps() / 2 : shape.tiles();
  const Shared<float> sums = gpu::shared<float>(0, slots * Tr::vectors);
  const auto each_four = [&](int warp, const auto& f) {
#pragma unroll
    for (int tile = 0; tile < Tr::tiles; ++tile) f(warp * Tr::vectors + (tile * 32 + at.lane) * 4, mine->sum[tile]);
  };
  const auto put = [](const Shared<float>& to, int n, const Accumulator& x) {
    to.write(n, Four{x[0], x[1], x[2], x[3]});
  };
  for (int left = shape.warps() / 2; left >= shape.tiles(); left /= 2) {
    if (at.warp >= left && at.warp < 2 * left)
      each_four(at.warp - left, [&](int n, Accumulator& x) { put(sums, n, x); });
    gpu::barrier();
    if (at.warp < left) {
      each_four(at.warp, [&](int n, Accumulator& x) {
        const Four other = sums.template vector<Four>(n);
#pragma unroll
        for (int m = 0; m < 4; ++m) x[m] += other.value[m];
      });
    }
    gpu::barrier();
  }
  if (at.warp < shape.tiles()) each_four(at.warp, [&](int n, Accumulator& x) { put(sums, n, x); });
}

// Adds up the sums of the blocks of a cluster, each block some of them, and writes them.
template <class Tr>
CAPSFAST_DEVICE void write_sums(const Pass& a, const Work& work, const Shape& shape, int64_t segment, int b0) {
  constexpr int kColumns = kSamples * Tr::outputs;
  const Inputs& in = a.in;
  const JoinMemory<Tr> memory(shape);
  const int D = static_cast<int>(in.D), J = static_cast<int>(in.J), size = gpu::cluster_size();
  const int first = gpu::cluster_rank() * gpu::threads() + gpu::thread(), step = size * gpu::threads();
  const Shared<Four> sums = gpu::shared<Four>(0, shape.tiles() * Tr::vectors / 4);
#pragma unroll 1
  for (int n = first; n < shape.tiles() * Tr::vectors / 4; n += step) {
    const int lane = n % 32, tile = n / 32 % Tr::tiles, sample = n / (Tr::vectors / 4) * kSamples + lane / 4;
    const Component column = component_of(Tr::tiles, tile, 2 * (lane % 4));
    Four sum = sums.read_from(0, n);
#pragma unroll 1
    for (int rank = 1; rank < size; ++rank) {
      const Four other = sums.read_from(rank, n);
#pragma unroll
      for (int m = 0; m < 4; ++m) sum.value[m] += other.value[m];
    }
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const int64_t b = b0 + sample + m / 2 * 8;
      const int d = column.d + m % 2;
      if (b < in.B && column.j < J && d < D) a.sum[work.row(segment, b, column.j, J) * D + d] = sum.value[m];
    }
  }
  if constexpr (Tr::in) {
    if (!a.max) return;
    const int columns = shape.warps() * kColumns;
    const Shared<float> max = gpu::shared<float>(4 * memory.block_max, shape.tiles() * kColumns),
                        total = gpu::shared<float>(4 * memory.total, columns);
    for (int n = first; n < shape.tiles() * kColumns; n += step) {
      const int j = n % Tr::outputs;
      const int64_t b = b0 + n / Tr::outputs;
      if (b >= in.B || j >= J) continue;
      float m = Extreme<float>::lowest;
      double sum = 0.0;
      for (int rank = 0; rank < size; ++rank) {
        m = std::fmax(m, max.read_from(rank, n));
        for (int stream = 0; stream < shape.streams; ++stream)
          sum += static_cast<double>(total.read_from(rank, stream * shape.tiles() * kColumns + n));
      }
      const int64_t row = work.row(segment, b, j, J);
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
  Scores<Tr> b, dc;
  if (Tr::plain || a.scored) {
    dot<Tr>(votes, lane_vectors<Tr>(a.V, vectors, at), b);
  } else {
#pragma unroll
    for (int slot = 0; slot < Tr::slots; ++slot) b[slot][0] = b[slot][1] = 0.0f;
  }
  if constexpr (kBackward) dot<Tr>(votes, lane_vectors<Tr>(a.ds, vectors, at), dc);
  if constexpr (!Tr::plain) apply_options<Tr, kBackward>(in, a.dcoupling, kBackward, at, of, b, dc);
  if constexpr (Tr::in) {
    if (!kBackward && a.max) {
      follow_maximum<Tr>(&mine->run, b, mine->sum);
    } else {
      softmax_known<Tr, kBackward>(in, a.norm, at, of, b, dc);
    }
  } else {
    softmax_out<Tr, kBackward>(counts, in.leaky, b, dc);
  }
  if constexpr (!Tr::plain && !kBackward) {
    if (a.coupling.data) {
#pragma unroll
      for (int slot = 0; slot < Tr::slots; ++slot) {
        const int j = output_of<Tr>(at, slot);
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          const int64_t sample = of.sample(at, row);
          const bool mask = sample < in.B && j < in.J && (slot < Tr::groups || at.quad % 2 == 0);
          if (mask)
            a.coupling.template write<float>(
                sample * a.coupling.stride[0] + of.i * a.coupling.stride[1] + j * a.coupling.stride[2], b[slot][row]);
        }
      }
    }
    gpu::warp_barrier();  // products follow, which take the whole warp
    if (Tr::in && !a.sum) return;
  }
  add_weighted<Tr>(kBackward ? dc : b, votes, mine->sum);
}

// The input capsules [begin, end) of a block, for the samples from b0 on.
template <class Tr, bool kBackward>
CAPSFAST_DEVICE void accumulate(const Pass& a, const Shape& shape, const InPieces& in_pieces, int b0, int begin,
                                int end, const ThreadCoord& at, Accumulation<Tr>* mine) {
  const Chunk<Tr> chunk(a.in, in_pieces, shape);
  const Shared<float> weight = chunk.weight(), poses = chunk.poses();
  const int tile = at.warp & (shape.tiles() - 1), stream = at.warp >> shape.tiles_log;
  const ScoreCoord samples{b0 + kSamples * tile, 0};
  const int64_t vectors = static_cast<int64_t>(b0 / kSamples + tile) * Tr::vectors + at.lane * 4;
  // A tile beyond the batch has no vectors; nothing that it computes is written.
  const bool idle = samples.b0 >= a.in.B;
  const unsigned counts = standing<Tr>(at, static_cast<int>(a.in.J));
  chunk.walk(b0, begin, end, [&](int i, int count) {
    if (idle) return;
    if (!kBackward && a.unweighted && (Tr::plain || !a.in.mask.data)) {
      // The tensor core adds up a chunk, no more: its additions round towards zero.
      Accumulator votes[Tr::tiles];
      clear<Tr>(votes);
#pragma unroll 1
      for (int capsule = stream; capsule < count; capsule += shape.streams)
        make_votes<Tr, true>(weight, capsule, poses, ((capsule << shape.tiles_log) + tile) * Tr::poses, at, votes);
      add<Tr>(votes, mine->sum);
      return;
    }
#pragma unroll 1
    for (int capsule = stream; capsule < count; capsule += shape.streams) {
      Accumulator votes[Tr::tiles];
      make_votes<Tr, false>(weight, capsule, poses, ((capsule << shape.tiles_log) + tile) * Tr::poses, at, votes);
      if constexpr (!Tr::plain) {
        drop_masked<Tr>(a.in, samples.b0, i + capsule, at, votes);
        if (!kBackward && a.unweighted) {
          add<Tr>(votes, mine->sum);
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
CAPSFAST_DEVICE void accumulate_segments(const Pass& a, const Work& work, const Shape& shape,
                                         const InPieces& in_pieces) {
  const int rank = gpu::cluster_rank(), size = gpu::cluster_size();
  const int unit = static_cast<int>(gpu::block_x()) / size, I = static_cast<int>(work.I);
  const int last = static_cast<int>(work.begin(unit + 1));
  for (int n = static_cast<int>(work.begin(unit)); n < last;) {
    const int g = n / I, i = n - g * I, b0 = g * static_cast<int>(work.group);
    const int here = last - n < I - i ? last - n : I - i;
    const ThreadCoord at = thread_coord();
    Accumulation<Tr> mine;
    clear<Tr>(mine.sum);
    if constexpr (Tr::in) {
      const bool leaky = a.in.leaky && i == 0 && rank == 0 && at.warp < shape.tiles();  // the leaky entry counts once
#pragma unroll
      for (int slot = 0; slot < Tr::slots; ++slot) {
        for (int row = 0; row < 2; ++row) {
          mine.run.max[slot][row] = leaky ? 0.0f : Extreme<float>::lowest;
          mine.run.total[slot][row] = leaky ? 1.0f : 0.0f;
        }
      }
    }
    gpu::cluster_barrier();
    accumulate<Tr, kBackward>(
        a, shape, in_pieces, b0, i + part_of(here, rank, size), i + part_of(here, rank + 1, size), at, &mine);
    if (a.sum) {
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
  // No block may leave, or use its shared memory for a step, while others read its sums.
  gpu::cluster_barrier();
}

template <class Steps>
CAPSFAST_CALLED void after_pass(const Steps& steps, int n) {
  steps.after(n, Share::of_grid(steps.in));
}

template <class Tr, bool kBackward>
CAPSFAST_KERNEL(32 * kMostWarps, 1)
accumulate_kernel(CAPSFAST_IN_PLACE AccumulateArgs<kBackward> a) {
  for (int n = a.begin; n < a.end; ++n) {
    if (n >= 0) {
      accumulate_segments<Tr, kBackward>(a.pass(n), a.work, a.shape, a.in_pieces);
      if (!a.together) return;
      gpu::grid_barrier();
    }
    after_pass(a.steps, n);
    if (n + 1 < a.end) gpu::grid_barrier();
  }
}

}  // namespace capsfast::cuda::rows
