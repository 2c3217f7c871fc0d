// The pass that accumulates sum_i c votes (forward) or sum_i db votes (backward) on tensor cores. A block of threads
// has some strips and walks over a split of the input capsules; see layout.h. Its column warps exchange the sums of the
// softmax for each input capsule, and wait for the others only between two stages of weights. At the end the sums of
// the streams are added up in a fixed order. The step after the pass adds up the splits (steps.h).
//
// If a block has too few column warps for all output capsules, blocks share the output capsules. Then a sweep of the
// same kernel first writes the norms of each block's output capsules, and the pass reads these norms.
#pragma once

#include <algorithm>

#include "softmax.h"

namespace capsfast::cuda::columns {

// What a pass accumulates: votes as they are, in a first iteration in which all coefficients are the same; c votes; or
// db votes.
enum class Weights { none, coupling, gradient };

struct PassArgs {
  Inputs in;
  Cut cut;
  int begin, count;  // input capsules [begin, begin + count)
  bool sweep;        // writes norms and nothing else
  // In the order of the fragments. V is absent in an iteration that scores with logits alone.
  Global<const float> V, ds;
  Global<float> sums;           // [splits][strips][column warps][tiles][32 lanes] fours, written
  Global<float> pairs;          // [strips][count][column warps][Columns::pairs], written: c and db
  Global<Norm> norms;           // [strips][count][16 samples][cut.sections], if blocks share the output capsules
  Operand coupling, dcoupling;  // [B, I, J]: written in the forward, read in the backward
};

// The streams that a block adds up at a time leave their sums in shared memory, after the last stage.
template <class Tr>
class JoinMemory {
 public:
  static constexpr int fours = Tr::tiles * 32;  // of a column warp and strip
  CAPSFAST_HOST_DEVICE explicit JoinMemory(const Cut& cut) : count(cut.streams / 2 * cut.strips * cut.warps * fours) {}
  CAPSFAST_HOST_DEVICE int bytes() const { return kArrivalBytes + 16 * count; }
  CAPSFAST_DEVICE Shared<Four> sums() const { return gpu::shared<Four>(kArrivalBytes, count); }

 private:
  const int count;
};

template <class Tr>
CAPSFAST_HOST_DEVICE int pass_bytes(const Inputs& in, const Cut& cut) {
  const int ring = (Tr::given ? 0 : Ring<Tr, 16>(in, cut).bytes()) + Exchange::bytes(cut);
  const int join = JoinMemory<Tr>(cut).bytes();
  return ring > join ? ring : join;
}

// Adds the sums of the other streams to the sums of stream 0.
template <class Tr>
CAPSFAST_DEVICE void join_streams(const Cut& cut, const Coord& at, Accumulator (&sum)[Tr::tiles]) {
  using Memory = JoinMemory<Tr>;
  const Memory memory(cut);
#pragma unroll 1
  for (int left = cut.streams; left > 1;) {
    const int kept = (left + 1) / 2;
    const auto place = [&](int stream, int tile) {
      return ((stream * cut.strips + at.strip) * cut.warps + at.warp) * Memory::fours + tile * 32 + at.lane;
    };
    if (at.stream >= kept && at.stream < left)
      unrolled<Tr::tiles>([&](int tile) { memory.sums()[place(at.stream - kept, tile)] = four(sum[tile]); });
    gpu::barrier();
    if (at.stream < left - kept)
      unrolled<Tr::tiles>([&](int tile) { add(sum[tile], memory.sums()[place(at.stream, tile)]); });
    gpu::barrier();
    left = kept;
  }
}

// The state of a column warp in a pass. b0: the first sample of its strip.
template <class Tr, bool kBackward, bool kOptions>
class Turn {
 public:
  CAPSFAST_DEVICE Turn(const PassArgs& args, const Coord& where, int first_sample, int exchange_at)
      : a(args), at(where), b0(first_sample), exchange(args.cut, where, exchange_at) {
    const int J = static_cast<int>(a.in.J);
    unrolled<Tr::slots, 2>([&](int slot, int row) {
      const int j = at.output_of(a.cut, slot), b = b0 + at.group + 8 * row;
      bool exists = j < J;
      if constexpr (kOptions) exists = exists && b < static_cast<int>(a.in.B) && a.in.out_mask.at(b, j);
      const unsigned bit = 1u << (2 * slot + row);
      if (exists) valid.outputs |= bit;
      if (exists && at.counts(a.cut, slot, J)) valid.counted |= bit;
    });
    const int64_t from = (int64_t{b0 / kStrip} * a.cut.column_warps() + at.column_warp) * Tr::vectors;
    if (a.V) V = lane_vectors(a.V, from, Tr::vectors, at);
    if constexpr (kBackward) {
      ds = lane_vectors(a.ds, from, Tr::vectors, at);
      const int64_t numbers = int64_t{a.count} * a.cut.column_warps() * Tr::pairs, strip = b0 / kStrip;
      if (a.pairs)
        pairs = a.pairs.from(strip * numbers + at.column_warp * Tr::pairs, numbers - at.column_warp * Tr::pairs);
    }
  }

  // sum += c votes or db votes of input capsule i.
  CAPSFAST_DEVICE void add(int i, Accumulator (&votes)[Tr::tiles], Accumulator (&sum)[Tr::tiles]) {
    Scores<Tr> b, dc;
    if (kOptions && !a.V) {
      unrolled<Tr::slots, 2>([&](int slot, int row) { b[slot][row] = 0.0f; });
    } else {
      dot<Tr>(votes, V.reread(), a.cut.lanes, b);
    }
    if constexpr (kBackward) dot<Tr>(votes, ds.reread(), a.cut.lanes, dc);
    Valid here = valid;
    if constexpr (kOptions) add_options(i, b, dc, votes, &here);
    Norm norm[2];
    exponentials<Tr, kBackward, kOptions>(here, leaky(), b, dc, norm);
    const float max[2] = {norm[0].max, norm[1].max};
    if (kOptions && a.norms) {
      if (a.sweep) return write_norms(i, norm);
      unrolled<2>([&](int row) {
        const int64_t from = norms_of(i, row);
        norm[row] = sum_norms(at.quad, a.cut.sections, [&](int n) { return a.norms.template vector<Norm>(from + n); });
      });
    } else {
      over_column_warps(norm);
    }
    unrolled<2>([&](int row) { normalise<Tr, kBackward, kOptions>(norm[row], max[row], row, b, dc); });
    if constexpr (kOptions) write_coupling(i, b);
    if constexpr (kBackward) store_pairs(i, b, dc);
    if (kBackward && !a.sums) return;
    unrolled<Tr::tiles>([&](int tile) { add_weighted<Tr>(kBackward ? dc : b, tile, votes[tile], sum[tile]); });
  }

 private:
  CAPSFAST_DEVICE bool leaky() const { return kOptions && a.in.leaky && at.column_warp == 0; }

  // The norms over the output capsules of all column warps of the block, in the same order in each of them.
  CAPSFAST_DEVICE void over_column_warps(Norm (&norm)[2]) {
    if (a.cut.warps == 1) return;
    exchange.give(at, norm);
    if (a.cut.warps == 2) {
      Norm other[2];
      unrolled<2>([&](int row) { other[row] = exchange.take(1 - at.warp, at.group + 8 * row); });
      const bool near = other[0].max == 0.0f && other[1].max == 0.0f && norm[0].max == 0.0f && norm[1].max == 0.0f;
      if (!gpu::any(!near)) {
        unrolled<2>([&](int row) { norm[row].total += other[row].total, norm[row].mean += other[row].mean; });
        return;
      }
    }
    unrolled<2>([&](int row) {
      norm[row] = sum_norms(at.quad, a.cut.warps, [&](int n) { return exchange.take(n, at.group + 8 * row); });
    });
  }

  CAPSFAST_DEVICE int64_t unit_of(int i) const { return int64_t{b0 / kStrip} * a.count + i - a.begin; }
  CAPSFAST_DEVICE int64_t norms_of(int i, int row) const {
    return (unit_of(i) * kStrip + at.group + 8 * row) * a.cut.sections;
  }
  CAPSFAST_DEVICE void write_norms(int i, Norm (&norm)[2]) {
    over_column_warps(norm);
    if (at.warp > 0 || at.quad > 1) return;
    a.norms[norms_of(i, at.quad) + gpu::block_y()] = one_of(norm, at.quad);
  }

  // Logits, masks and the gradient of the coupling. A masked input capsule has votes 0, even if its inputs are NaN.
  CAPSFAST_DEVICE void add_options(int i, Scores<Tr>& b, Scores<Tr>& dc, Accumulator (&votes)[Tr::tiles],
                                   Valid* here) const {
    unrolled<2>([&](int row) {
      const int sample = b0 + at.group + 8 * row;
      const bool exists = sample < static_cast<int>(a.in.B) && a.in.mask.at(sample, i);
      if (!exists) {
        here->outputs &= ~(0b0101u << row);
        here->counted &= ~(0b0101u << row);
        unrolled<Tr::tiles>([&](int tile) { votes[tile][2 * row] = votes[tile][2 * row + 1] = 0.0f; });
      }
      unrolled<Tr::slots>([&](int slot) {
        if (!here->has(slot, row)) return;
        const int j = at.output_of(a.cut, slot);
        a.in.logits.add_to(&b[slot][row], sample, i, j);
        if constexpr (kBackward) a.dcoupling.add_to(&dc[slot][row], sample, i, j);
      });
    });
  }
  CAPSFAST_DEVICE void write_coupling(int i, const Scores<Tr>& c) const {
    if (kBackward || !a.coupling.data) return;
    unrolled<Tr::slots, 2>([&](int slot, int row) {
      const int sample = b0 + at.group + 8 * row;
      if (at.counts(a.cut, slot, static_cast<int>(a.in.J)) && sample < static_cast<int>(a.in.B))
        a.coupling.put(c[slot][row], sample, i, at.output_of(a.cut, slot));
    });
  }

  CAPSFAST_DEVICE void store_pairs(int i, const Scores<Tr>& c, const Scores<Tr>& db) const {
    if (!pairs) return;
    const int64_t to = int64_t{i - a.begin} * (a.cut.column_warps() * Tr::pairs);
    pairs.template as<Four>()[to / 4 + at.lane] = {c[0][0], c[0][1], db[0][0], db[0][1]};
    if constexpr (Tr::slots > 1) {
      if (at.quad > 1) return;
      const bool second = at.quad == 1;
      pairs.template as<Run<float, 2>>()[to / 2 + 64 + at.group + 8 * at.quad] = {
          second ? c[1][1] : c[1][0], second ? db[1][1] : db[1][0]};
    }
  }

  const PassArgs& a;
  const Coord& at;
  const int b0;
  Exchange exchange;
  Valid valid = {0, 0};
  Global<const float> V, ds;
  Global<float> pairs;  // of the strip and column warp
};

template <class Tr, Weights kWeights, bool kOptions>
CAPSFAST_KERNEL(32 * Tr::most_warps, 1)
pass_kernel(CAPSFAST_IN_PLACE PassArgs a) {
  if constexpr (!gpu::kTensorCores) return;
  constexpr bool kPlain = kWeights == Weights::none;
  using Pass = Turn<Tr, kWeights == Weights::gradient, kOptions>;
  const Cut& cut = a.cut;
  const int section = static_cast<int>(gpu::block_y());
  const Coord at = Coord::of<Tr>(cut, cut.strips, section);
  const int block = static_cast<int>(gpu::block_x()), split = block / cut.groups;
  const int strip = block % cut.groups * cut.strips + at.strip, b0 = strip * kStrip;
  const int begin = a.begin + part_of(a.count, split, cut.splits);
  const int end = a.begin + part_of(a.count, split + 1, cut.splits);
  const bool idle = b0 >= static_cast<int>(a.in.B);  // a strip beyond the batch has no vectors
  Accumulator sum[Tr::tiles] = {};
  if constexpr (Tr::given) {
    gpu::wait_for_launch_before();
    if (!idle) {
      Pass turn(a, at, b0, 0);
#pragma unroll 1
      for (int i = begin + at.stream; i < end; i += cut.streams) {
        Accumulator votes[Tr::tiles];
        load_votes<Tr>(a.in, cut, at, b0, i, votes);
        if constexpr (kPlain) {
          unrolled<Tr::tiles, 4>([&](int tile, int n) { sum[tile][n] += votes[tile][n]; });
        } else {
          turn.add(i, votes, sum);
        }
      }
    }
    gpu::barrier();
  } else {
    const Ring<Tr, 16> weights(a.in, cut);
    Pass turn(a, at, idle ? 0 : b0, weights.bytes());
    // While the column warp works on an input capsule, the poses of the next one are on their way.
    const Poses<Tr> poses(a.in, cut, at, b0);
    // A split of few input capsules may be empty.
    const int last = begin < end ? end - 1 : a.begin;
    const auto load = [&](int i) { return poses.load(at, b0, i < last ? i : last); };
    typename Poses<Tr>::Raw next = load(begin + at.stream);
    const auto votes_of = [&](int i, int stage, int capsule, auto adds, Accumulator(&votes)[Tr::tiles]) {
      const typename Poses<Tr>::Raw now = next;
      next = load(i + capsule + cut.streams);
      make_votes<Tr, decltype(adds)::value>(a.in, weights, stage, capsule, now, at, votes);
    };
    weights.template walk<false>(
        begin, end, section, [] { gpu::wait_for_launch_before(); },
        [&](int i, int count, int, int stage) {
          if (idle) return;
          if constexpr (kPlain) {
        // The tensor core adds up only two input capsules at a time, because its additions round towards zero.
#pragma unroll 1
            for (int capsule = at.stream; capsule < count; capsule += 2 * cut.streams) {
              Accumulator votes[Tr::tiles];
              votes_of(i, stage, capsule, std::false_type(), votes);
              if (capsule + cut.streams < count) votes_of(i, stage, capsule + cut.streams, std::true_type(), votes);
              unrolled<Tr::tiles, 4>([&](int tile, int n) { sum[tile][n] += votes[tile][n]; });
            }
            return;
          }
#pragma unroll 1
          for (int capsule = at.stream; capsule < count; capsule += cut.streams) {
            Accumulator votes[Tr::tiles];
            votes_of(i, stage, capsule, std::false_type(), votes);
            turn.add(i + capsule, votes, sum);
          }
        });
  }
  if (!a.sums) return gpu::let_next_launch_start();
  join_streams<Tr>(cut, at, sum);
  gpu::let_next_launch_start();
  if (idle || at.stream > 0) return;
  const int strips = cut.groups * cut.strips;
  const int64_t to = ((int64_t{split} * strips + strip) * cut.column_warps() + at.column_warp) * Tr::tiles * 32;
  unrolled<Tr::tiles>([&](int tile) { a.sums.template as<Four>()[to + tile * 32 + at.lane] = four(sum[tile]); });
}

}  // namespace capsfast::cuda::columns
