// The general accumulating pass: sum_i c votes (forward) or sum_i db votes (backward); for the pass ops also sum_i c or
// sum_i db. If a tile does not have all output capsules, a sweep for the normaliser comes first.
//
// A block has a tile of samples and a tile of output capsules, and walks over a split of the input capsules. A thread
// adds the votes of a tile that it has in registers to its own sum. From time to time the block adds these sums in
// double; the step after the pass adds up the splits in a fixed order (update.h).
#pragma once

#include "tile.h"

namespace capsfast::cuda {

template <class T, class E, bool kVotes>
struct Accumulation {
  using Votes = Tile<T, E, kVotes>;
  static constexpr int width = Votes::width, columns = kSamples * kThreads;
  // Shared memory, in elements and bytes. A softmax over the input capsules with unknown normaliser takes
  // bytes_to_follow more.
  static constexpr int elements = Votes::elements + Votes::scores, bytes = elements * static_cast<int>(sizeof(T)),
                       bytes_to_follow = 2 * columns * static_cast<int>(sizeof(T));

  const AccumulateArgs<T>& a;
  const Inputs& in = a.in;
  Votes tile{in};
  T sum[kSamples][width] = {};
  int tiles = 0;           // in `sum`
  bool overwrites = true;  // flush() overwrites the sums in memory, which hold nothing yet
  // The input capsules [i_begin, i_end) of the block's split.
  const int64_t split = gpu::block_z(), i_begin = in.I * split / gpu::blocks_z(),
                i_end = in.I * (split + 1) / gpu::blocks_z();

  // [sample][thread]: the sum of the weights, at the first run of an output capsule.
  Shared<T> mass = Votes::array(Votes::elements, Votes::scores);
  // [samples][outputs], for a softmax over the input capsules with unknown normaliser: the largest logit so far, and
  // the factor that rescales the sum in memory. The factor of the last tile is in tile.dc, at the first input capsule.
  CAPSFAST_DEVICE Shared<T> max() const { return Votes::array(elements, columns); }
  CAPSFAST_DEVICE Shared<T> kept() const { return Votes::array(elements + columns, columns); }

  // Calls f(n, sample, out) for the columns of the tile, each on one thread: the same thread in every call.
  template <class F>
  CAPSFAST_DEVICE void for_columns(const F& f) const {
    for (int n = gpu::thread(); n < kSamples * tile.shape.outputs; n += kThreads) {
      const int sample = n / tile.shape.outputs, out = n % tile.shape.outputs;
      if (sample < tile.samples && out < tile.outputs) f(n, sample, out);
    }
  }
  CAPSFAST_DEVICE int64_t row(int sample, int out) const {
    return (split * in.B + tile.b0 + sample) * in.J + tile.j0 + out;
  }

  // Replaces the logits of the tile by exp(b - max), where max is the largest of a column so far. Begins and ends with
  // a barrier.
  CAPSFAST_DEVICE void follow_maximum() const {
    gpu::barrier();
    for_columns([&](int column, int sample, int out) {
      const int begin = sample * Votes::pitch + out * tile.shape.runs, step = tile.shape.columns(),
                end = begin + tile.inputs * step;
      // The leaky entry, with logit 0, counts in the first split.
      if (overwrites && tiles == 0) max()[column] = in.leaky && split == 0 ? T(0) : Extreme<T>::lowest;
      const T before = max()[column];
      T m = before;
      for (int n = begin; n < end; n += step) m = larger<T>(m, tile.c[n]);
      for (int n = begin; n < end; n += step) tile.c[n] = std::exp(tile.c[n] - m);
      const T factor = std::exp(before - m);
      max()[column] = m;
      kept()[column] = tiles == 0 ? factor : kept()[column] * factor;
      tile.dc[begin] = factor;
    });
    gpu::barrier();
  }

  CAPSFAST_DEVICE void add_votes() {
    const Shared<T> weights = a.scoring.ds ? tile.dc : tile.c;
    const bool with_mass = tile.d_run == 0 && (a.mass || a.to.max);
    // Samples and output capsules that do not exist have numbers, too; flush() does not write them.
    unrolled<kSamples>([&](int n) {
      const int row = n * Votes::pitch, own = row + gpu::thread();
      T kept = tiles > 0 ? T(1) : T(0), weight = T(0);
      if (a.to.max) {
        kept *= tile.dc[row + tile.out * tile.shape.runs];
        unrolled<width>([&](int m) { sum[n][m] *= kept; });
      }
      if (tile.active())
        weight = a.unweighted ? T(n >= tile.samples || in.mask.at(tile.b0 + n, tile.i0 + tile.input))
                              : T(weights[row + tile.slot()]);
      if (with_mass) mass[own] = kept > T(0) ? mass[own] * kept + weight : weight;
      unrolled<width>([&](int m) { sum[n][m] += tile.votes[n][m] * weight; });
    });
    ++tiles;
  }

  // Adds the sums in registers to those in memory. Begins with a barrier.
  CAPSFAST_DEVICE void flush() {
    // The sums lie where weights and c were.
    const Shared<T> sums = Votes::array(0, columns * width);
    static_assert(columns * width <= Votes::scores_from + Votes::scores);
    gpu::barrier();
    Votes::put_runs(sums, sum);
    Votes::for_votes([&](int n, int m) { sum[n][m] = T(0); });
    gpu::barrier();
    // Adds the parts of all input capsules, which lie `step` apart, to a sum in memory.
    const auto add = [&](double& to, double begin, int sample, int out, const Shared<T>& parts, int at, int step) {
      const double factor = a.to.max ? static_cast<double>(kept()[sample * tile.shape.outputs + out]) : 1.0;
      double part = (overwrites ? begin : to) * factor;
      for (int n = 0; n < tile.shape.inputs; ++n) part += static_cast<double>(parts[at + n * step]);
      to = part;
    };
    const int all = tile.shape.columns() * width;
    const int64_t elements = in.D + a.mass;
    for (int n = gpu::thread(); n < all; n += kThreads) {
      const int out = n / (tile.shape.runs * width);
      const int64_t d = tile.d0 + n % (tile.shape.runs * width);
      for (int sample = 0; sample < tile.samples && out < tile.outputs && d < in.D; ++sample)
        add(a.to.sum[row(sample, out) * elements + d], 0.0, sample, out, sums, sample * kThreads * width + n, all);
    }
    if (tile.piece == 0 && (a.mass || a.to.max)) {
      for_columns([&](int column, int sample, int out) {
        const int64_t to = row(sample, out);
        const int at = sample * Votes::pitch + out * tile.shape.runs, step = tile.shape.columns();
        if (a.mass) add(a.to.sum[to * elements + in.D], 0.0, sample, out, mass, at, step);
        if (!a.to.max) return;
        add(a.to.total[to], in.leaky && split == 0 ? 1.0 : 0.0, sample, out, mass, at, step);
        a.to.max[to] = max()[column];
      });
    }
    tiles = 0;
    overwrites = false;
  }

  // Adds the input capsules from tile.i0 on.
  CAPSFAST_DEVICE void add_tile() {
    tile.fit(i_end);
    tile.make_dots(a.scoring, false);
    if (!a.unweighted) tile.score(a.scoring);
    if (a.to.max) {
      follow_maximum();
    } else if (!a.unweighted) {
      const Row<T> row = tile.normalise(a.scoring, a.norm, [&](int out, int n) {
        if (tile.piece == 0) a.coupling.template put<T>(tile.c[n], tile.b(), tile.i(), tile.j0 + out);
      });
      if (tile.j0 == 0 && tile.piece == 0 && tile.lane() == 0 && tile.has_scores())
        a.lse.put(log_sum(row.max, row.scale), tile.b(), tile.i());
    }
    if (!a.to.sum) return;
    add_votes();
    if (tiles == kTilesInT || tile.i0 + tile.inputs == i_end) flush();
  }
};

template <class T, class E, bool kVotes>
CAPSFAST_KERNEL(kThreads, kAccumulateBlocks)
accumulate_kernel(AccumulateArgs<T> a) {
  Accumulation<T, E, kVotes> block{a};
  auto& tile = block.tile;
  tile.piece = static_cast<int>(gpu::block_x() % tile.shape.pieces);
  tile.j0 = gpu::block_x() / tile.shape.pieces * tile.shape.outputs;
  for (tile.b0 = gpu::block_y() * kSamples; tile.b0 < a.in.B; tile.b0 += gpu::blocks_y() * kSamples) {
    block.overwrites = true;
    for (tile.i0 = block.i_begin; tile.i0 < block.i_end; tile.i0 += tile.shape.inputs) block.add_tile();
  }
}

// A sweep over the output capsules that computes the normaliser of a softmax over more output capsules than a tile has.
template <class T>
struct RowNormArgs {
  Inputs in;
  Scoring<T> scoring;
  Global<T> max, scale, mean;  // [B, I], written; mean only if scoring has ds
};

template <class T, class E, bool kVotes>
CAPSFAST_KERNEL(kThreads, kAccumulateBlocks)
row_norm_kernel(RowNormArgs<T> a) {
  const bool with_dc = static_cast<bool>(a.scoring.ds);
  Tile<T, E, kVotes> tile{a.in};
  tile.i0 = gpu::block_x() * tile.shape.inputs;
  for (tile.b0 = gpu::block_y() * kSamples; tile.b0 < a.in.B; tile.b0 += gpu::blocks_y() * kSamples) {
    Row<T> row = Row<T>::empty(a.in);
    for (tile.j0 = 0; tile.j0 < a.in.J; tile.j0 += tile.shape.outputs) {
      tile.fit(a.in.I);
      tile.make_dots(a.scoring, false);
      tile.score(a.scoring);
      row = tile.extended(row, with_dc);
    }
    if (!tile.has_scores() || tile.lane() != 0) continue;
    row = row.finished();
    const int64_t to = tile.b() * a.in.I + tile.i();
    a.max[to] = row.max;
    a.scale[to] = row.scale;
    if (with_dc) a.mean[to] = row.mean;
  }
}

}  // namespace capsfast::cuda
