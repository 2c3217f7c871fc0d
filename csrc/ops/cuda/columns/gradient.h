// The gradient pass of the backward, for all iterations at once: du and dweight, or dvotes, and dlogits, on tensor
// cores.
//
// The backward passes have stored c and db, so no votes and no softmax are made here: a column warp computes dvotes =
// sum_t c_t ds_t + db_t V_t of an input capsule and a strip, then du = dvotes W and dweight = dvotes^T u. It does the
// strips of the block one after the other, so dweight stays in its registers meanwhile, and V and ds in the L1 cache.
// The column warps of a stream add up du in shared memory. Each stream has other input capsules.
#pragma once

#include "softmax.h"

namespace capsfast::cuda::columns {

struct GradientArgs {
  Inputs in;
  Cut cut;            // each warp does the strips of the block in turn; chunk == streams
  int begin, count;   // input capsules [begin, begin + count)
  int start, paired;  // iterations [start, r) have gradients, and [paired, r) have stored c and db
  int iterations;     // r. If start < paired, c of iteration 0 is 1 / scale, and its V is 0
  bool gradient_last, shared_weight;
  bool adds;                  // to dweight of a shared weight, which has sums over other input capsules
  Global<const float> V, ds;  // [r][strips][column warps][tiles][32] fours
  Global<const float> pairs;  // [r - paired][strips][count][column warps][Columns::pairs]
  Operand du, dvotes;         // [B, I, K], [B, I, J, D], written
  Global<float> dweight;      // [parts, I, J, D, K] or, for a shared weight, [parts, splits, streams, J, D, K]
  Operand dlogits_sample;     // [B, I, J], written
  Global<float> dlogits;      // [parts, I, J]
  int strips;                 // of the batch
  int zero;                   // always 0, which the compiler does not know
  float scale, unscale;       // factors of dvotes, and of what is made from dvotes
};

// Shared memory of a block, after the ring. First a part for each warp, which transposes a pair of tiles of dvotes
// there; gaps between quads, and between even and odd tiles, keep lanes in different banks. Then du of the column
// warps, [streams][strips][column warps][steps][32 lanes].
template <class Tr>
class GradientMemory {
 public:
  static constexpr int quad = 10, odd = 44, turn = odd + 3 * quad + 8;  // fours

  CAPSFAST_HOST_DEVICE GradientMemory(const Inputs& in, const Cut& how)
      : cut(how), warps(how.warps * how.streams), at(Tr::given ? 0 : Ring<Tr, 8>(in, how).bytes()) {}
  CAPSFAST_HOST_DEVICE int bytes() const { return Tr::given ? 0 : at + 16 * (warps * turn + du_fours()); }
  CAPSFAST_DEVICE Shared<Four> turned() const { return gpu::shared<Four>(at, warps * turn); }
  CAPSFAST_DEVICE Shared<Four> du() const { return gpu::shared<Four>(at + 16 * warps * turn, du_fours()); }
  CAPSFAST_DEVICE int du_place(const Coord& here, int strip, int warp, int step) const {
    return (((here.stream * cut.strips + strip) * cut.warps + warp) * Tr::steps + step) * 32 + here.lane;
  }

 private:
  CAPSFAST_HOST_DEVICE int du_fours() const { return warps * cut.strips * Tr::steps * 32; }
  const Cut& cut;
  const int warps, at;
};

// dvotes of a strip and an input capsule, times a.scale. 0 for masked input capsules.
template <class Tr>
CAPSFAST_DEVICE void make_dvotes(const GradientArgs& a, const Coord& at, int strip, int i, bool with_dlogits,
                                 Accumulator (&dvotes)[Tr::tiles], Scores<Tr>& dlogits) {
  // Where the strip and the column warp begin in iteration t: `from` in V and ds, `pair` in the pairs.
  const int warps = a.cut.column_warps();
  const int64_t all = int64_t{a.strips} * warps * Tr::vectors,
                all_pairs = int64_t{a.strips} * a.count * warps * Tr::pairs;
  int64_t from = (int64_t{strip} * warps + at.column_warp) * Tr::vectors;
  int64_t pair = ((int64_t{strip} * a.count + i - a.begin) * warps + at.column_warp) * Tr::pairs;
  if (a.start < a.paired) {
    const Global<const float> ds = lane_vectors(a.ds, from, Tr::vectors, at).reread();
    unrolled<Tr::tiles>([&](int tile) {
      const Four x = ds.template vector<Four>(tile * 128);
      unrolled<4>([&](int n) { dvotes[tile][n] = x.value[n]; });
    });
  } else {
    unrolled<Tr::tiles, 4>([&](int tile, int n) { dvotes[tile][n] = 0.0f; });
  }
  unrolled<Tr::slots, 2>([&](int slot, int row) { dlogits[slot][row] = 0.0f; });
  from += a.paired * all;
#pragma unroll 1
  for (int t = a.paired; t < a.iterations; ++t, from += all, pair += all_pairs) {
    Scores<Tr> c, db;
    const Four whole = a.pairs.template vector_once<Four>(pair + 4 * at.lane);
    unrolled<2>([&](int row) { c[0][row] = whole.value[row], db[0][row] = whole.value[2 + row]; });
    if constexpr (Tr::slots > 1) {
      unrolled<2>([&](int row) {
        const auto fifth = a.pairs.template vector_once<Run<float, 2>>(pair + 128 + 2 * (at.group + 8 * row));
        c[1][row] = fifth.value[0], db[1][row] = fifth.value[1];
      });
    }
    unrolled<Tr::slots, 2>([&](int slot, int row) {
      if (with_dlogits) dlogits[slot][row] += db[slot][row];
      c[slot][row] *= a.scale, db[slot][row] *= a.scale;
    });
    const auto add_vectors = [&](const Scores<Tr>& coefficients, const Global<const float>& of) {
      const Global<const float> lane = lane_vectors(of, from, Tr::vectors, at).reread();
      unrolled<Tr::tiles>([&](int tile) {
        add_weighted<Tr>(coefficients, tile, lane.template vector<Four>(tile * 128).value, dvotes[tile]);
      });
    };
    add_vectors(c, a.ds);
    if (!a.gradient_last && t > 0) add_vectors(db, a.V);
  }
  // ds may be NaN, from other input capsules of the sample.
  unrolled<2>([&](int row) {
    const int b = strip * kStrip + at.group + 8 * row;
    if (!a.in.mask.data || (b < static_cast<int>(a.in.B) && a.in.mask.at(b, i))) return;
    unrolled<Tr::tiles>([&](int tile) { dvotes[tile][2 * row] = dvotes[tile][2 * row + 1] = 0.0f; });
  });
}

// The poses of a strip that a lane needs for dweight: of each sample quad + 4 product + 8 n, `steps` components from
// steps group on. Zero for masked input capsules, even if they are NaN.
template <class Tr>
using DweightPoses = float[2][2][Tr::steps];

template <class Tr>
CAPSFAST_DEVICE void load_poses(const GradientArgs& a, const Coord& at, int b0, int i, DweightPoses<Tr>& u) {
  const int B = static_cast<int>(a.in.B), K = static_cast<int>(a.in.K), k0 = Tr::steps * at.group;
  with_element<Tr>(a.in.u.storage, [&](auto e) {
    using E = decltype(e);
    const Global<const E> poses = a.in.u.data.template as<const E>();
    const int64_t at_pose = a.in.u.at(b0 + at.quad, i, k0);
    const bool whole = b0 + kStrip <= B && K == Tr::components && !a.in.mask.data;
    unrolled<2, 2>([&](int product, int n) {
      const int row = 4 * product + 8 * n;
      if (whole) {
        unrolled<Tr::steps>([&](int step) {
          u[product][n][step] = float(poses[at_pose + row * a.in.u.stride[0] + step * a.in.u.stride[2]]);
        });
        return;
      }
      const int sample = b0 + at.quad + row, b = sample < B ? sample : B - 1;
      const bool valid = a.in.mask.at(b, i);
      unrolled<Tr::steps>([&](int step) {
        const int k = k0 + step < K ? k0 + step : K - 1;
        const float x = float(poses[a.in.u.at(b, i, k)]);
        u[product][n][step] = valid ? x : 0.0f;
      });
    });
  });
}

// dweight [columns, K] += dvotes^T u of a strip. Lanes need other elements of dvotes than they have, so shared memory
// of the warp transposes two tiles at a time. Rows `group` and group + 8 of a product are the columns n = 2 (group / 2)
// and 2 (group / 2) + 1 of tile 2 m + group % 2. The samples of a product are s = quad + 4 product and s + 8.
template <class Tr>
CAPSFAST_DEVICE void add_dweight(const GradientMemory<Tr>& memory, const Coord& at, int number,
                                 const DweightPoses<Tr>& u, const Accumulator (&dvotes)[Tr::tiles],
                                 Accumulator (&dweight)[Tr::tiles / 2][Tr::steps]) {
  using Memory = GradientMemory<Tr>;
  const Shared<Four> turned = memory.turned();
  const int warp = number * Memory::turn, mine = warp + at.quad * Memory::quad + at.group;
  const int wanted = warp + at.group / 2 * Memory::quad + at.group % 2 * Memory::odd + at.quad;
  float u_high[2][Tr::steps][2], u_low[2][Tr::steps][2];
  unrolled<2, Tr::steps>([&](int product, int step) {
    unrolled<2>([&](int n) { two_parts<Tr>(u[product][n][step], u_high[product][step][n], u_low[product][step][n]); });
  });
  unrolled<Tr::tiles / 2>([&](int m) {
    gpu::warp_barrier();  // all lanes have read what is overwritten now
    unrolled<2>([&](int odd) { turned[mine + odd * Memory::odd] = four(dvotes[2 * m + odd]); });
    gpu::warp_barrier();
    unrolled<2>([&](int product) {
      float high[4], low[4];
      const Four x = turned[wanted + 4 * product];
      take_parts<Tr>(x.value, high, low);
      unrolled<Tr::steps>([&](int step) {
        Accumulator& to = dweight[m][step];
        if constexpr (Tr::exact) {
          gpu::mma_tf32(to, low, u_high[product][step]);
          gpu::mma_tf32(to, high, u_low[product][step]);
        }
        gpu::mma_tf32(to, high, u_high[product][step]);
      });
    });
  });
}

// Writes dweight of an input capsule, or adds it to what is there: [J, D, K] from `to` on.
template <class Tr>
CAPSFAST_DEVICE void write_dweight(const GradientArgs& a, const Coord& at, const Global<float>& to, bool overwrites,
                                   const Accumulator (&dweight)[Tr::tiles / 2][Tr::steps]) {
  constexpr int kCount = 2 * Tr::steps;
  const int J = static_cast<int>(a.in.J), D = static_cast<int>(a.in.D), K = static_cast<int>(a.in.K);
  const int k = kCount * at.quad, quad = at.group / 2;
  // The first column of each slot.
  const int j[2] = {at.output + (quad >> a.cut.lanes_log()), at.output + 4};
  const int d[2] = {(quad & (a.cut.lanes - 1)) * kSpan + at.group % 2 * 2, at.group % 2 * 8 + 2 * quad};
  const int begin[2] = {(j[0] * D + d[0]) * K + k, (j[1] * D + d[1]) * K + k};
  unrolled<Tr::tiles / 2, 2>([&](int m, int e) {
    const int slot = 2 * m / kWholeTiles, further = 4 * m * (1 - slot) + e;
    if (j[slot] >= J || d[slot] + further >= D || k >= K) return;
    Run<float, kCount> x;
    unrolled<2, Tr::steps>([&](int n, int step) {
      x.value[Tr::steps * n + step] = dweight[m][step][2 * e + n] * a.unscale;
    });
    const int place = begin[slot] + further * K;
    constexpr int kAtOnce = kCount < 4 ? kCount : 4;
    if (K % kAtOnce == 0) {
      unrolled<kCount / kAtOnce>([&](int part) {
        if (k + part * kAtOnce >= K) return;
        Run<float, kAtOnce> run;
        if (!overwrites) run = to.template vector_once<Run<float, kAtOnce>>(place + part * kAtOnce);
        unrolled<kAtOnce>([&](int n) {
          const float added = x.value[part * kAtOnce + n];
          run.value[n] = overwrites ? added : run.value[n] + added;
        });
        to.template as<Run<float, kAtOnce>>()[place / kAtOnce + part] = run;
      });
      return;
    }
    unrolled<kCount>([&](int n) {
      if (k + n < K) to[place + n] = overwrites ? x.value[n] : to[place + n] + x.value[n];
    });
  });
}

// Leaves the column warp's part of du [16 samples, K] = dvotes [16, columns] weight [columns, K] in shared memory. A
// product may take its columns in any order, so a lane's dvotes already are its part of the left operand. Products of
// high parts have a sum of their own, because the tensor core adds towards zero: sums of numbers of one size lose the
// least. Column n of the product of step s is component steps n + s, so what a lane reads and writes are neighbours.
// adds: adds to what other sections of the output capsules have left there.
template <class Tr, class E>
CAPSFAST_DEVICE void make_du(const GradientMemory<Tr>& memory, const Shared<E>& weight, const Coord& at, int strip,
                             bool adds, int zero, const Accumulator (&dvotes)[Tr::tiles]) {
  using Weights = Ring<Tr, 8>;
  constexpr bool kTwo = Tr::exact && std::is_same_v<E, float>;
  Accumulator sum[Tr::steps][Tr::exact ? 2 : 1] = {};
  const int whole = Weights::place_of(kSpan * at.quad) + Tr::steps * at.group;
  const int fifth = Weights::place_of(4 * kSpan + 2 * at.quad) + Tr::steps * at.group;
  unrolled<Tr::tiles>([&](int tile) {
    const Accumulator& x = dvotes[tile];
    float high[4], low[4];
    // If the compiler knew the mask, it would use x itself as the operand, and move it into this order twice.
    take_parts<Tr>({x[0], x[2], x[1], x[3]}, high, low, kTf32Bits | static_cast<uint32_t>(zero));
    const int row =
        tile < kWholeTiles ? whole + 2 * tile * Tr::components : fifth + 8 * (tile - kWholeTiles) * Tr::components;
    Run<E, Tr::steps> w[2];
    unrolled<2>([&](int e) { w[e] = weight.template vector<Run<E, Tr::steps>>(row + e * Tr::components); });
    unrolled<Tr::steps>([&](int step) {
      float w_high[2], w_low[2];
      unrolled<2>([&](int e) { two_parts<Tr, E>(float(w[e].value[step]), w_high[e], w_low[e]); });
      gpu::mma_tf32(sum[step][0], high, w_high);
      if constexpr (Tr::exact) gpu::mma_tf32(sum[step][1], low, w_high);
      if constexpr (kTwo) gpu::mma_tf32(sum[step][1], high, w_low);
    });
  });
  unrolled<Tr::steps>([&](int step) {
    const int place = memory.du_place(at, strip, at.warp, step);
    Four to = four(sum[step][0]);
    if constexpr (Tr::exact) add(to.value, four(sum[step][1]));
    if (adds) add(to.value, memory.du()[place]);
    memory.du()[place] = to;
  });
}

// Adds up du of a strip over the column warps and writes it.
template <class Tr>
CAPSFAST_DEVICE void write_du(const GradientArgs& a, const GradientMemory<Tr>& memory, const Coord& at, int strip,
                              int b0, int i) {
  constexpr int kCount = 2 * Tr::steps;
  Four sum[Tr::steps] = {};
  for (int warp = 0; warp < a.cut.warps; ++warp)
    unrolled<Tr::steps>([&](int step) { add(sum[step].value, memory.du()[memory.du_place(at, strip, warp, step)]); });
  const int K = static_cast<int>(a.in.K), k = kCount * at.quad;
  unrolled<2>([&](int row) {
    const int b = b0 + at.group + 8 * row;
    if (b >= static_cast<int>(a.in.B) || k >= K) return;
    const float factor = a.in.mask.at(b, i) ? a.unscale : 0.0f;
    const int64_t to = (int64_t{b} * a.in.I + i) * K + k;
    with_element<Tr>(a.du.storage, [&](auto e) {
      using E = decltype(e);
      Run<E, kCount> run;
      unrolled<2, Tr::steps>([&](int n, int step) {
        const float x = sum[step].value[2 * row + n];
        run.value[Tr::steps * n + step] = narrowed<E>(factor == 0.0f ? 0.0f : x * factor);
      });
      constexpr int kAtOnce = kCount * sizeof(E) > 16 ? 4 : kCount;
      unrolled<kCount / kAtOnce>([&](int part) {
        const int n0 = part * kAtOnce;
        if (K % kAtOnce == 0) {
          if (k + n0 < K) {
            Run<E, kAtOnce> x;
            unrolled<kAtOnce>([&](int n) { x.value[n] = run.value[n0 + n]; });
            a.du.data.template as<Run<E, kAtOnce>>()[(to + n0) / kAtOnce] = x;
          }
          return;
        }
        unrolled<kAtOnce>([&](int n) {
          if (k + n0 + n < K) a.du.data.template as<E>()[to + n0 + n] = run.value[n0 + n];
        });
      });
    });
  });
}

// Writes the gradients of given votes, contiguous [B, I, J, D].
template <class Tr>
CAPSFAST_DEVICE void write_dvotes(const GradientArgs& a, const Coord& at, int b0, int i,
                                  const Accumulator (&dvotes)[Tr::tiles]) {
  const int J = static_cast<int>(a.in.J), D = static_cast<int>(a.in.D);
  with_element<Tr>(a.dvotes.storage, [&](auto e) {
    using E = decltype(e);
    unrolled<2>([&](int row) {
      const int b = b0 + at.group + 8 * row;
      if (b >= static_cast<int>(a.in.B)) return;
      const int64_t from = (int64_t{b} * a.in.I + i) * J * D;
      unrolled<Tr::tiles>([&](int tile) {
        const Place place = place_of(a.cut, at, tile);
        if (place.j >= J || place.d >= D) return;
        const int64_t to = from + place.j * D + place.d;
        Run<E, 2> x;
        unrolled<2>([&](int n) { x.value[n] = narrowed<E>(dvotes[tile][2 * row + n] * a.unscale); });
        if (D % 2 == 0) {
          a.dvotes.data.template as<Run<E, 2>>()[to / 2] = x;
          return;
        }
        a.dvotes.data.template as<E>()[to] = x.value[0];
        if (place.d + 1 < D) a.dvotes.data.template as<E>()[to + 1] = x.value[1];
      });
    });
  });
}

// Writes the gradients of logits [B, I, J] and adds the gradients of logits [I, J] over the samples of a strip to
// `sum`.
template <class Tr>
CAPSFAST_DEVICE void take_dlogits(const GradientArgs& a, const Coord& at, int b0, int i, const Scores<Tr>& dlogits,
                                  float (&sum)[Tr::slots]) {
  unrolled<Tr::slots>([&](int slot) {
    float both = 0.0f;
    unrolled<2>([&](int row) {
      const int b = b0 + at.group + 8 * row;
      if (b >= static_cast<int>(a.in.B)) return;
      both += dlogits[slot][row];
      if (at.counts(a.cut, slot, static_cast<int>(a.in.J)))
        a.dlogits_sample.put(dlogits[slot][row], b, i, at.output_of(a.cut, slot));
    });
    for (int mask = 4; mask < 32; mask *= 2) both += gpu::shuffle_xor(both, mask);
    sum[slot] += both;
  });
}

// Input capsule i of a column warp, for the strips [strip, strip + count) of the batch and a section of the
// output capsules.
template <class Tr, class Weight>
CAPSFAST_DEVICE void add_capsule(const GradientArgs& a, const GradientMemory<Tr>& memory, const Coord& at, int part,
                                 int strip, int count, int i, int section, bool overwrites, const Weight& weight) {
  const int number = at.stream * a.cut.warps + at.warp;
  const bool with_dlogits = a.dlogits || a.dlogits_sample.data;
  Accumulator dweight[Tr::tiles / 2][Tr::given ? 1 : Tr::steps] = {};
  float dlogits_sum[Tr::slots] = {};
#pragma unroll 1
  for (int n = 0; n < count; ++n) {
    const int b0 = (strip + n) * kStrip;
    Accumulator dvotes[Tr::tiles];
    Scores<Tr> dlogits;
    make_dvotes<Tr>(a, at, strip + n, i, with_dlogits, dvotes, dlogits);
    if (with_dlogits) take_dlogits<Tr>(a, at, b0, i, dlogits, dlogits_sum);
    if constexpr (Tr::given) {
      if (a.dvotes.data) write_dvotes<Tr>(a, at, b0, i, dvotes);
    } else {
      DweightPoses<Tr> u;
      if (a.dweight) load_poses<Tr>(a, at, b0, i, u);
      if (a.du.data) weight([&](const auto& w) { make_du(memory, w, at, n, section > 0, a.zero, dvotes); });
      if (a.dweight) add_dweight<Tr>(memory, at, number, u, dvotes, dweight);
    }
  }
  if constexpr (!Tr::given) {
    if (a.dweight) {
      const int size = static_cast<int>(a.in.J * a.in.D * a.in.K), I = static_cast<int>(a.in.I);
      const int splits = static_cast<int>(gpu::blocks_y()), split = static_cast<int>(gpu::block_y());
      const int64_t row =
          a.shared_weight ? (int64_t{part} * splits + split) * a.cut.streams + at.stream : int64_t{part} * I + i;
      write_dweight<Tr>(a, at, a.dweight.from(row * size, size), overwrites, dweight);
    }
    if (a.du.data && section + 1 == a.cut.sections) {
      if (a.cut.warps > 1) gpu::named_barrier(at.stream + 1, 32 * a.cut.warps);
      for (int n = at.warp; n < count; n += a.cut.warps) write_du<Tr>(a, memory, at, n, (strip + n) * kStrip, i);
    }
  }
  if (!a.dlogits || at.group > 0) return;
  unrolled<Tr::slots>([&](int slot) {
    if (!at.counts(a.cut, slot, static_cast<int>(a.in.J))) return;
    float& to = a.dlogits[(int64_t{part} * a.in.I + i) * a.in.J + at.output_of(a.cut, slot)];
    to = strip == part * a.cut.strips ? dlogits_sum[slot] : to + dlogits_sum[slot];
  });
}

// A block has the strips of one part of the batch, some at a time, and the input capsules of one split. Parts are the
// fast axis of the grid, so blocks that read the same weights are neighbours.
template <class Tr>
CAPSFAST_KERNEL(32 * Tr::most_warps, 1)
gradient_kernel(CAPSFAST_IN_PLACE GradientArgs a) {
  if constexpr (!gpu::kTensorCores) return;
  const Cut& cut = a.cut;
  const GradientMemory<Tr> memory(a.in, cut);
  const int part = static_cast<int>(gpu::block_x()), parts = static_cast<int>(gpu::blocks_x());
  const int split = static_cast<int>(gpu::block_y()), splits = static_cast<int>(gpu::blocks_y());
  const int begin = a.begin + part_of(a.count, split, splits), end = a.begin + part_of(a.count, split + 1, splits);
  Coord at = Coord::of<Tr>(cut, 1, 0);
  if constexpr (Tr::given) gpu::wait_for_launch_before();
  for (int strip = part * cut.strips; strip < a.strips; strip += parts * cut.strips) {
    const int count = a.strips - strip < cut.strips ? a.strips - strip : cut.strips;
    const bool first_strips = strip == part * cut.strips;
    if constexpr (Tr::given) {
      for (int i = begin + at.stream; i < end; i += cut.streams) {
        for (int section = 0; section < cut.sections; ++section) {
          at.template go_to<Tr>(cut, section);
          add_capsule<Tr>(a, memory, at, part, strip, count, i, section, first_strips, 0);
        }
      }
    } else {
      const Ring<Tr, 8> weights(a.in, cut);
      weights.template walk<true>(
          begin, end, 0, [] { gpu::wait_for_launch_before(); },
          [&](int i, int present, int section, int stage) {
            if (at.stream >= present) return;
            at.template go_to<Tr>(cut, section);
            const bool overwrites = first_strips && (!a.shared_weight || (i == begin && !a.adds));
            add_capsule<Tr>(
                a, memory, at, part, strip, count, i + at.stream, section, overwrites, [&](const auto& use) {
                  with_element<Tr>(a.in.matrix.storage,
                                   [&](auto e) { use(weights.template at<decltype(e)>(stage, at.stream, at.warp)); });
                });
          });
    }
  }
  gpu::let_next_launch_start();
}

}  // namespace capsfast::cuda::columns
