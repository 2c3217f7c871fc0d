// The gradient pass of the backward, for all iterations at once: du and dweight, on tensor cores, with the
// mapping of accumulate.h. For each input capsule of its samples a warp makes the votes and dvotes = sum_t c_t ds_t +
// db_t V[t], one iteration after the other, and writes du = dvotes W. dweight = dvotes^T u is a sum over samples. Warps
// of a block that share an input capsule leave their sums in shared memory; a thread for each element adds up these
// sums in a fixed order and adds the result to memory.
//
// There are no clusters here, although they could add up more before writing to memory: a cluster barrier empties the
// L1 cache, which holds V and ds.
#pragma once

#include "accumulate.h"

namespace capsfast::cuda::rows {

struct GradientArgs : cuda::GradientArgs<float> {
  int zero;       // always 0. The compiler does not know, and so reads V and ds anew for the sums
  Shape shape;    // chunk == streams, two stages
  int64_t all;    // elements of V of one iteration
  float scale;    // of dvotes: J, so that coefficients of iteration 0 become 1
  float unscale;  // of products with dvotes: 1 / scale, times what makes up for bits that single products drop
};

// Shared memory of a block, after Weights: [warps][turn] fours, and [warps][Tr::weight] sums of dweight in the order of
// a weight.
template <class Tr>
class GradientMemory {
 public:
  // A warp transposes dvotes two pairs of tiles at a time: four numbers of each lane, of even or odd columns. Gaps
  // between quads, and between even and odd columns, keep lanes in different banks.
  static constexpr int quad = 10, odd = 44, pair = odd + 3 * quad + 8, pairs = 2, turn = pairs * pair;

  CAPSFAST_HOST_DEVICE GradientMemory(const Inputs& in, const Shape& shape)
      : warps(shape.warps()), turned_at(Weights<Tr>(in, shape).bytes()), sums_at(turned_at + 16 * warps * turn) {}
  CAPSFAST_HOST_DEVICE int bytes() const { return sums_at + 4 * warps * Tr::weight; }
  CAPSFAST_DEVICE Shared<Four> turned() const { return gpu::shared<Four>(turned_at, warps * turn); }
  CAPSFAST_DEVICE Shared<float> poses(int warp) const {
    return gpu::shared<float>(turned_at + 16 * warp * turn, kSamples * Tr::components);
  }
  CAPSFAST_DEVICE Shared<float> sums() const { return gpu::shared<float>(sums_at, warps * Tr::weight); }

 private:
  const int warps, turned_at, sums_at;  // the last two in bytes
};

// dvotes of a warp's samples for one input capsule, in the order of V, times a.scale. vectors_at: where these samples
// begin in V and ds of one iteration.
template <class Tr>
CAPSFAST_DEVICE void make_dvotes(const GradientArgs& a, const ThreadCoord& at, int64_t vectors_at, unsigned counts,
                                 const Accumulator (&votes)[Tr::tiles], Accumulator (&dvotes)[Tr::tiles]) {
  // ds is read for the dot products and again for its sum. kKept fours of ds stay in registers: as many as fit beside
  // votes and dvotes before the compiler spills.
  constexpr int kSpare = (Tr::exact ? 51 : 48) - 2 * Tr::tiles;
  constexpr int kKept = kSpare < Tr::tiles ? kSpare : Tr::tiles;
  const int64_t mine = vectors_at + at.lane * 4;
  const int iterations = static_cast<int>(a.iterations);
  int t = static_cast<int>(a.start);
  // In iteration 0 every coefficient is 1 / J. Without iteration 0, the sum begins with V[0], which is 0.
  const Global<const float> begin = lane_vectors<Tr>(t == 0 ? a.ds : a.V, mine, at);
  unrolled<Tr::tiles>([&](int tile) {
    const Four x = begin.template vector<Four>(tile * 128);
    unrolled<4>([&](int n) { dvotes[tile][n] = x.value[n]; });
  });
  if (t == 0) t = 1;
  int64_t vectors = mine + t * a.all;
#pragma unroll 1
  for (; t < iterations; ++t, vectors += a.all) {
    Scores<Tr> b, dc;
    Four kept[Tr::tiles];
    dot<Tr>(votes, lane_vectors<Tr>(a.V, vectors, at), b);
    dot<Tr, kKept>(votes, lane_vectors<Tr>(a.ds, vectors, at), dc, kept);
    softmax<Tr, true>(counts, b, dc, a.scale);
    const int64_t again = vectors + a.zero;
    add_vectors<Tr, kKept>(b, lane_vectors<Tr>(a.ds, again, at), dvotes, kept);
    if (!a.gradient_last) add_vectors<Tr>(dc, lane_vectors<Tr>(a.V, again, at), dvotes);
  }
}

// Writes neighbouring elements, from n on, of a contiguous tensor with a last axis of K; the first is component k. n is
// unsigned, because the compiler divides unsigned numbers by a single shift.
template <class Tr, int kCount>
CAPSFAST_DEVICE void write_run(const Operand& to, uint64_t n, int k, int K, const Run<float, kCount>& x) {
  with_element<Tr>(to.storage, [&](auto e) {
    using E = decltype(e);
    Run<E, kCount> run;
    unrolled<kCount>([&](int m) { run.value[m] = narrowed<E>(x.value[m]); });
    if (K % kCount == 0) {
      to.data.as<Run<E, kCount>>()[static_cast<int64_t>(n / kCount)] = run;
      return;
    }
    unrolled<kCount>([&](int m) {
      if (k + m < K) to.data.as<E>()[static_cast<int64_t>(n) + m] = run.value[m];
    });
  });
}

// du [16 samples, K] = dvotes [16, columns] weight [columns, K]. A product may take its columns in any order, so a
// lane's dvotes already are its part of the left operand. Products of high parts, and of even and odd columns, have
// sums of their own, because the tensor core adds towards zero: short sums of numbers of one size lose the least.
// Column n of the product of step s is component steps n + s, so what a lane reads and writes are neighbours. (With two
// steps, lanes of quads 0 and 1, and of 2 and 3, read the same banks: rows of 16 floats start in two banks only, and
// bulk copies leave no gaps.)
template <class Tr, class E>
CAPSFAST_DEVICE void write_du(const GradientArgs& a, const Shared<E>& weight, const ThreadCoord& at, int b0, int i,
                              const Accumulator (&dvotes)[Tr::tiles]) {
  Accumulator sum[Tr::steps][2][Tr::parts];
  unrolled<Tr::pairs, 2>([&](int pair, int odd) {
    const ColumnPlace<Tr> column(2 * at.quad + odd);
    const Accumulator& x = dvotes[2 * pair + odd];  // two tiles of sample `group`, then of sample `group` + 8
    float high[4], low[4];
    // If the compiler knew the mask, it would use x itself as the operand, and move it into this order twice.
    take_parts<Tr>({x[0], x[2], x[1], x[3]}, high, low, kTf32Bits | static_cast<uint32_t>(a.zero));
    float w_high[Tr::steps][2], w_low[Tr::steps][2];
    unrolled<2>([&](int tile) {
      const auto w = weight.template vector<Run<E, Tr::steps>>(column.at(2 * pair + tile) + Tr::steps * at.group);
      unrolled<Tr::steps>([&](int step) { two_parts<Tr, E>(w.value[step], w_high[step][tile], w_low[step][tile]); });
    });
    unrolled<Tr::steps>([&](int step) {
      Accumulator(&to)[Tr::parts] = sum[step][odd];
      pair == 0 ? gpu::mma_tf32_from_zero(to[0], high, w_high[step]) : gpu::mma_tf32(to[0], high, w_high[step]);
      if constexpr (Tr::exact) {
        pair == 0 ? gpu::mma_tf32_from_zero(to[1], low, w_high[step]) : gpu::mma_tf32(to[1], low, w_high[step]);
        if constexpr (std::is_same_v<E, float>) gpu::mma_tf32(to[1], high, w_low[step]);
      }
    });
  });
  constexpr int kCount = 2 * Tr::steps;
  const int I = static_cast<int>(a.in.I), K = static_cast<int>(a.in.K), k = kCount * at.quad;
  const int64_t first = (int64_t{b0 + at.group} * I + i) * K + k, step = int64_t{8 * K} * I;  // elements of du
  unrolled<2>([&](int row) {
    if (b0 + at.group + 8 * row >= static_cast<int>(a.in.B) || k >= K) return;
    Run<float, kCount> x;
    unrolled<2, Tr::steps>([&](int n, int step) {
      float to = sum[step][0][0][2 * row + n] + sum[step][1][0][2 * row + n];
      if constexpr (Tr::exact) to += sum[step][0][1][2 * row + n] + sum[step][1][1][2 * row + n];
      x.value[Tr::steps * n + step] = to * a.unscale;
    });
    write_run<Tr>(a.du, static_cast<uint64_t>(first + row * step), k, K, x);
  });
}

// Leaves the poses of a strip for make_dweight(), [16 samples][Tr::components], where the warp transposes dvotes later.
template <class Tr>
CAPSFAST_DEVICE void keep_poses(const Inputs& in, const typename Poses<Tr>::Raw& poses, const Shared<float>& to,
                                const ThreadCoord& at) {
  constexpr int kCount = Poses<Tr>::count;
  gpu::warp_barrier();  // all lanes have read what is overwritten now
  with_element<Tr>(in.u.storage, [&](auto e) {
    unrolled<2>([&](int row) {
      Run<float, kCount> x;
      unrolled<kCount>([&](int n) { x.value[n] = poses.template get<decltype(e)>(row, n); });
      to.write((at.group + 8 * row) * Tr::components + kCount * at.quad, x);
    });
  });
}

// dweight [columns, K] = dvotes^T u, a sum over the warp's samples, to its part of `sums`. Lanes need other elements of
// dvotes than they have, so shared memory of the warp transposes dvotes.
template <class Tr>
CAPSFAST_DEVICE void make_dweight(const Shared<float>& poses, const Shared<Four>& turned, const Shared<float>& sums,
                                  const ThreadCoord& at, const Accumulator (&dvotes)[Tr::tiles]) {
  using Memory = GradientMemory<Tr>;
  gpu::warp_barrier();  // the other lanes have left their poses
  // A product may take its samples in any order. This lane has samples quad and quad + 8 in the first product, quad + 4
  // and quad + 12 in the second.
  float u_high[2][Tr::steps][2], u_low[2][Tr::steps][2];
  unrolled<2, Tr::steps>([&](int product, int step) {
    unrolled<2>([&](int n) {
      const float x = poses[(4 * product + at.quad + 8 * n) * Tr::components + step * kStep + at.group];
      two_parts<Tr>(x, u_high[product][step][n], u_low[product][step][n]);
    });
  });
  const int warp = at.warp * Memory::turn;
  const int mine = warp + at.quad * Memory::quad + at.group;
  const int wanted = warp + at.group / 2 * Memory::quad + at.group % 2 * Memory::odd + at.quad;
  const ColumnPlace<Tr> column(at.group);
  const int to = at.warp * Tr::weight + 2 * at.quad;
  unrolled<Tr::pairs / Memory::pairs>([&](int turn) {
    const int first = turn * Memory::pairs;
    gpu::warp_barrier();  // all lanes have read the numbers that are overwritten now
    unrolled<Memory::pairs, 2>([&](int pair, int odd) {
      turned[mine + pair * Memory::pair + odd * Memory::odd] = four(dvotes[2 * (first + pair) + odd]);
    });
    gpu::warp_barrier();
    // Columns n = group of both tiles of a pair, k = 2 quad and 2 quad + 1.
    Accumulator dweight[Memory::pairs][Tr::steps];
    unrolled<2, Memory::pairs>([&](int product, int pair) {
      float high[4], low[4];
      const Four x = turned[wanted + pair * Memory::pair + 4 * product];
      take_parts<Tr>(x.value, high, low);
      unrolled<Tr::steps>([&](int step) {
        multiply<Tr>(product == 0, dweight[pair][step], high, low, u_high[product][step], u_low[product][step]);
      });
    });
    unrolled<Memory::pairs, Tr::steps>([&](int pair, int step) {
      unrolled<2>([&](int tile) {
        const Accumulator& x = dweight[pair][step];
        sums.write(
            to + column.at(2 * (first + pair) + tile) + step * kStep, Run<float, 2>{x[2 * tile], x[2 * tile + 1]});
      });
    });
  });
}

// For each of `count` input capsules from i on, adds up dweight of the warps that share the input capsule, a warp for
// each of `strips` strips, and adds the sum to memory or, if `first`, overwrites memory. Warps take whole output
// capsules; an input capsule has warps of its own unless the weight is shared. A thread has the same elements in every
// call. A thread starts several loads before its first addition, because a load takes long.
template <class Tr>
CAPSFAST_DEVICE void write_dweight(const GradientArgs& a, const Shared<float>& sums, int strips, int part, int i,
                                   bool first, int count) {
  constexpr int kTogether = 5;
  static_assert(kMostGradientStrips == 2);
  const ThreadCoord at = thread_coord();
  const int J = static_cast<int>(a.in.J), D = static_cast<int>(a.in.D), K = static_cast<int>(a.in.K);
  const int I = static_cast<int>(a.in.I), stream = at.warp >> a.shape.strips_log;
  const int capsule = a.shared_weight ? 0 : stream, more = a.shared_weight ? count : 1;  // sums in each element
  const int begin = a.shared_weight ? at.warp : at.warp & (a.shape.strips() - 1);
  const int step = a.shared_weight ? a.shape.warps() : a.shape.strips();
  if (capsule >= count) return;
  const int64_t row = a.shared_weight ? part : int64_t{part} * I + i + capsule;
  const int size = J * D * K;
  const Global<float> to = a.dweight_rows.from(row * size, size).reread();  // one address in registers
  const bool whole = K % 4 == 0;
#pragma unroll 1
  for (int four = at.lane; four < kMostD * Tr::components / 4; four += 32) {
    const int d = four / (Tr::components / 4), k = four % (Tr::components / 4) * 4;
    if (d >= D || k >= K) continue;
#pragma unroll 1
    for (int j0 = begin; j0 < J; j0 += kTogether * step) {
      Four sum[kTogether] = {}, added[kTogether] = {};
      const unsigned n0 = static_cast<unsigned>((j0 * D + d) * K + k), next = static_cast<unsigned>(step * D * K);
      const int from0 = (capsule << a.shape.strips_log) * Tr::weight + j0 * kMostD * Tr::components + 4 * four;
      // Calls f(m, element of `to`, element of `sums`) for the output capsules of this turn.
      const auto each = [&](const auto& f) {
        unrolled<kTogether>([&](int m) {
          if (j0 + m * step < J) f(m, n0 + static_cast<unsigned>(m) * next, from0 + m * step * kMostD * Tr::components);
        });
      };
      if (!first && whole) {
        each([&](int m, unsigned n, int) { sum[m] = to.template vector_once<Four>(n); });
      } else if (!first) {
        each([&](int m, unsigned n, int) {
          unrolled<4>([&](int e) { sum[m].value[e] = k + e < K ? to[n + e] : 0.0f; });
        });
      }
      each([&](int m, unsigned, int from) { added[m] = sums.template vector<Four>(from); });
      if (strips == kMostGradientStrips)
        each([&](int m, unsigned, int from) { add(added[m].value, sums.template vector<Four>(from + Tr::weight)); });
#pragma unroll 1
      for (int c = 1; c < more; ++c) {
#pragma unroll 1
        for (int strip = 0; strip < strips; ++strip) {
          const int other = ((c << a.shape.strips_log) + strip) * Tr::weight;
          each([&](int m, unsigned, int from) { add(added[m].value, sums.template vector<Four>(from + other)); });
        }
      }
      each([&](int m, unsigned, int) {
        unrolled<4>([&](int e) { sum[m].value[e] += added[m].value[e] * a.unscale; });
      });
      if (whole) {
        each([&](int m, unsigned n, int) { to.template as<Four>()[n / 4] = sum[m]; });
      } else {
        each([&](int m, unsigned n, int) {
          unrolled<4>([&](int e) {
            if (k + e < K) to[n + e] = sum[m].value[e];
          });
        });
      }
    }
  }
}

// A block walks over the groups of samples of one part of the batch and the input capsules of one split. Parts are the
// fast axis of the grid, so blocks that read the same weights are neighbours.
template <class Tr>
CAPSFAST_KERNEL(32 * kMostWarps, 1)
gradient_kernel(GradientArgs a) {
  if constexpr (!gpu::kTensorCores) return;
  const Shape& shape = a.shape;
  const ThreadCoord at = thread_coord();
  const GradientMemory<Tr> memory(a.in, shape);
  const Weights<Tr> weights(a.in, shape);
  const Shared<float> sums = memory.sums();
  const int strip = at.warp & (shape.strips() - 1), stream = at.warp >> shape.strips_log, group = shape.samples();
  const int part = static_cast<int>(gpu::block_x()), parts = static_cast<int>(gpu::blocks_x());
  const int split = static_cast<int>(gpu::block_y()), splits = static_cast<int>(gpu::blocks_y());
  const int I = static_cast<int>(a.in.I), B = static_cast<int>(a.in.B);
  const int begin = part_of(I, split, splits), end = part_of(I, split + 1, splits);
  const unsigned counts = standing<Tr>(at, static_cast<int>(a.in.J));
  for (int b0 = part * group; b0 < B; b0 += parts * group) {
    const bool first = b0 == part * group;
    const int here = (B - b0 + kSamples - 1) / kSamples, strips = here < shape.strips() ? here : shape.strips();
    const Poses<Tr> poses(a.in, shape, at, b0 + kSamples * strip);
    // The poses of the warp's next input capsule are on their way while the sums of dweight are written.
    const auto load = [&](int i) { return poses.load(thread_coord(), i < end ? i : end - 1); };
    typename Poses<Tr>::Raw next = load(begin + stream);
    weights.walk(begin, end, [&](int i, int count, int stage) {
      if (stream < count && strip < strips) {
        Accumulator dvotes[Tr::tiles];
        {
          Accumulator votes[Tr::tiles];
          make_votes<Tr, false>(a.in, weights, stage, stream, next, at, votes);
          if (a.dweight_rows) keep_poses<Tr>(a.in, next, memory.poses(at.warp), at);
          make_dvotes<Tr>(a, at, static_cast<int64_t>(b0 / kSamples + strip) * Tr::vectors, counts, votes, dvotes);
        }
        if (a.du.data) {
          with_element<Tr>(a.in.matrix.storage, [&](auto e) {
            write_du<Tr>(a, weights.template at<decltype(e)>(stage, stream), thread_coord(), b0 + kSamples * strip,
                         i + stream, dvotes);
          });
        }
        if (a.dweight_rows) make_dweight<Tr>(memory.poses(at.warp), memory.turned(), sums, thread_coord(), dvotes);
      }
      next = load(i + shape.chunk + stream);
      if (!a.dweight_rows) return;
      gpu::barrier();
      const int row = a.shared_weight ? part * splits + split : part;
      // The barrier before the next chunk keeps the next sums from overwriting these sums too early.
      write_dweight<Tr>(a, sums, strips, row, i, first && !(a.shared_weight && i > begin), count);
    });
  }
}

}  // namespace capsfast::cuda::rows
