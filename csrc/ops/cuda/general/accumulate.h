// The general accumulating pass: sum_i c votes (forward) or sum_i db votes (backward); for the pass ops also sum_i c or
// sum_i db. If a tile does not have all output capsules, a sweep for the normaliser comes first.
//
// A block has a tile of samples and a tile of output capsules, and walks over a split of the input capsules. It reads a
// weight once for the samples of the tile. A thread has rows (j, d) of the sum, so no two threads add to one number.
// Partial sums are in double; the step after the pass adds them up in a fixed order (update.h).
#pragma once

#include "tile.h"

namespace capsfast::cuda {

template <class T, class E, bool kVotes>
struct Accumulation {
  using Size = AccumulateTile<T>;
  using Scores = Tile<T, E, kVotes, Size>;
  static constexpr int columns = kSamples * Size::outputs, elements = Scores::elements + 2 * columns;
  static constexpr int bytes = elements * static_cast<int>(sizeof(T)) + columns * 8;

  const AccumulateArgs<T>& a;
  const Inputs& in = a.in;
  Scores tile{in};
  // The input capsules [i_begin, i_end) of the block's split.
  const int64_t split = gpu::block_z(), i_begin = in.I * split / gpu::blocks_z(),
                i_end = in.I * (split + 1) / gpu::blocks_z();
  // [samples][outputs], for a softmax over the input capsules with unknown normaliser: the largest logit so far, the
  // factor that rescales the sum so far, and the sum of exp(b - max).
  Shared<T> max = Scores::array(Scores::elements, columns);
  Shared<T> factor = Scores::array(Scores::elements + columns, columns);
  Shared<double> total = gpu::shared<double>(elements * static_cast<int>(sizeof(T)), columns);

  // Replaces the logits of the tile by exp(b - max), where max is the largest of a column so far. Ends with a
  // barrier.
  CAPSFAST_DEVICE void follow_maximum() const {
    for_each(tile.samples, tile.outputs, [&](int sample, int out) {
      const int column = tile.index(0, sample, out), end = columns * tile.inputs;
      if (tile.i0 == i_begin) {
        const bool leaky = in.leaky && split == 0;  // the entry with logit 0 must count once: the first split has it
        max[column] = leaky ? T(0) : Extreme<T>::lowest;
        total[column] = leaky ? 1.0 : 0.0;
      }
      const T before = max[column];
      T m = before, sum = T(0);
      for (int n = column; n < end; n += columns) m = larger<T>(m, tile.c[n]);
      for (int n = column; n < end; n += columns) {
        const T e = std::exp(tile.c[n] - m);
        tile.c[n] = e;
        sum += e;
      }
      const T scale = std::exp(before - m);
      max[column] = m;
      factor[column] = scale;
      total[column] = total[column] * static_cast<double>(scale) + static_cast<double>(sum);
      if (tile.i0 + tile.inputs < i_end) return;
      const int64_t to = (split * in.B + tile.b0 + sample) * in.J + tile.j0 + out;
      a.to.max[to] = m;
      a.to.total[to] = total[column];
    });
    gpu::barrier();
  }

  CAPSFAST_DEVICE void add_votes() const {
    const Shared<T> weights = a.scoring.ds ? tile.dc : tile.c;
    const int64_t components = in.D + a.mass;
    for_each(tile.outputs, components, [&](int out, int64_t d) {
      T sum[kSamples] = {};
      for (int input = 0; input < tile.inputs; ++input) {
        const unsigned valid = tile.valid_samples(tile.i0 + input);
        T votes[kSamples];
        tile.make_votes(valid, tile.i0 + input, tile.j0 + out, d, votes);
        for_samples(
            valid, [&](int n) { sum[n] += a.unweighted ? votes[n] : votes[n] * weights[tile.index(input, n, out)]; });
      }
      for_samples(tile.all_samples(), [&](int n) {
        double& to = a.to.sum[((split * in.B + tile.b0 + n) * in.J + tile.j0 + out) * components + d];
        const double kept = a.to.max ? static_cast<double>(factor[tile.index(0, n, out)]) : 1.0;
        to = (tile.i0 == i_begin ? 0.0 : to * kept) + static_cast<double>(sum[n]);
      });
    });
  }

  // Adds the input capsules from tile.i0 on. Must be called after a barrier, and ends with a barrier.
  CAPSFAST_DEVICE void add_tile() {
    tile.fit(i_end, Size::outputs);
    if (!a.unweighted) tile.score(a.scoring);
    if (a.to.max) {
      follow_maximum();
    } else if (!a.unweighted) {
      tile.normalise(a.scoring, a.norm, [&](int pair, int out, int n) {
        a.coupling.template put<T>(tile.c[n], tile.sample_of(pair), tile.input_of(pair), tile.j0 + out);
      });
      tile.for_pairs(a.lse.data && tile.j0 == 0, [&](int pair, int) {
        const T lse = log_sum(tile.norm(a.norm.max, tile.max, pair, 0), tile.norm(a.norm.scale, tile.scale, pair, 0));
        a.lse.put(lse, tile.sample_of(pair), tile.input_of(pair));
      });
    }
    if (a.to.sum) add_votes();
    gpu::barrier();
  }
};

template <class T, class E, bool kVotes>
CAPSFAST_KERNEL(kThreads, kBlocksFor<T>)
accumulate_kernel(AccumulateArgs<T> a) {
  Accumulation<T, E, kVotes> block{a};
  auto& tile = block.tile;
  tile.j0 = gpu::block_x() * AccumulateTile<T>::outputs;
  for (tile.b0 = gpu::block_y() * kSamples; tile.b0 < a.in.B; tile.b0 += gpu::blocks_y() * kSamples) {
    for (tile.i0 = block.i_begin; tile.i0 < block.i_end; tile.i0 += AccumulateTile<T>::inputs) block.add_tile();
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
CAPSFAST_KERNEL(kThreads, kBlocksFor<T>)
row_norm_kernel(RowNormArgs<T> a) {
  using Size = AccumulateTile<T>;
  const bool with_dc = static_cast<bool>(a.scoring.ds);
  Tile<T, E, kVotes, Size> tile{a.in};
  tile.i0 = gpu::block_x() * Size::inputs;
  for (tile.b0 = gpu::block_y() * kSamples; tile.b0 < a.in.B; tile.b0 += gpu::blocks_y() * kSamples) {
    for (tile.j0 = 0; tile.j0 < a.in.J; tile.j0 += Size::outputs) {
      tile.fit(a.in.I, Size::outputs);
      tile.score(a.scoring);
      tile.add_to_normaliser(with_dc);
    }
    tile.for_pairs(1, [&](int pair, int) {
      const int64_t to = tile.sample_of(pair) * a.in.I + tile.input_of(pair);
      a.max[to] = tile.max[pair];
      a.scale[to] = tile.scale[pair];
      if (with_dc) a.mean[to] = tile.mean[pair];
    });
  }
}

}  // namespace capsfast::cuda
