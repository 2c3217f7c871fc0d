// The general accumulating pass: sum_i c votes (forward) or sum_i db votes (backward), and for the pass ops sum_i c or
// sum_i db beside them.
//
// A block has a tile of samples, a tile of output capsules and a split of the input capsules, over which it walks. It
// reads a weight once for the samples of the tile. A thread has rows (j, d) of the sum, so that no two threads add to
// one number. Partial sums are in double; the step after the pass adds them up in a fixed order (update.h).
#pragma once

#include "plan.h"
#include "scores.h"

namespace capsfast::cuda {

template <class T>
struct AccumulateShared {
  using Size = AccumulateTile<T>;
  static constexpr int scores = Size::pairs * Size::outputs * static_cast<int>(sizeof(T));
  static constexpr int columns = Size::samples * Size::outputs;
  static constexpr int rows_at = 2 * scores, total_at = rows_at + Size::pairs * 4 * static_cast<int>(sizeof(T));
  static constexpr int max_at = total_at + columns * 8, factor_at = max_at + columns * static_cast<int>(sizeof(T));
  static constexpr int bytes = factor_at + columns * static_cast<int>(sizeof(T));
};

// Replaces the logits of a tile by exp(b - max), where max is the largest of a column so far. `factor` is what the sum
// so far has to be multiplied with. max, total and factor are [samples][outputs].
template <class T, int kSamples>
CAPSFAST_DEVICE void follow_maximum(const Tile& tile, const Scores<T, kSamples>& scores, Shared<T> max,
                                    Shared<double> total, Shared<T> factor) {
  for (int n = gpu::thread(); n < kSamples * tile.outputs; n += gpu::threads()) {
    const int out = n % tile.outputs, sample = n / tile.outputs, column = sample * scores.pitch + out;
    if (sample >= tile.samples) continue;
    const T before = max[column];
    T m = before;
    for (int input = 0; input < tile.inputs; ++input) m = larger<T>(m, scores.logits[scores.at(input, sample, out)]);
    T sum = T(0);
    for (int input = 0; input < tile.inputs; ++input) {
      const int at = scores.at(input, sample, out);
      const T e = std::exp(scores.logits[at] - m);
      scores.logits[at] = e;
      sum += e;
    }
    const T scale = std::exp(before - m);
    max[column] = m;
    factor[column] = scale;
    total[column] = total[column] * static_cast<double>(scale) + static_cast<double>(sum);
  }
}

template <class T, class E, bool kVotes>
CAPSFAST_DEVICE void add_votes(const AccumulateArgs<T>& a, const Tile& tile, int64_t split, bool first, bool rescale,
                               Shared<T> factor, const Scores<T, AccumulateTile<T>::samples>& scores) {
  constexpr int kSamples = AccumulateTile<T>::samples;
  const Inputs& in = a.in;
  const int64_t elements = in.D + a.mass, rows = tile.outputs * elements;
  const bool backward = static_cast<bool>(a.scoring.ds);
  for (int64_t row = gpu::thread(); row < rows; row += gpu::threads()) {
    const int out = static_cast<int>(row / elements);
    const int64_t j = tile.j0 + out, d = row % elements;
    T sum[kSamples];
#pragma unroll
    for (int n = 0; n < kSamples; ++n) sum[n] = T(0);
    for (int input = 0; input < tile.inputs; ++input) {
      const int64_t i = tile.i0 + input;
      const unsigned valid = valid_samples(in, tile, i);
      T votes[kSamples];
      if (d < in.D) {
        Votes<T, E, kVotes>::make(in, tile, valid, i, j, d, votes);
      } else {
#pragma unroll
        for (int n = 0; n < kSamples; ++n) votes[n] = T(1);
      }
#pragma unroll
      for (int n = 0; n < kSamples; ++n) {
        if (!(valid >> n & 1)) continue;
        const int at = scores.at(input, n, out);
        sum[n] += a.unweighted ? votes[n] : votes[n] * (backward ? scores.dc[at] : scores.logits[at]);
      }
    }
#pragma unroll
    for (int n = 0; n < kSamples; ++n) {
      if (n >= tile.samples) continue;
      double& to = a.sum[((split * in.B + tile.b0 + n) * in.J + j) * elements + d];
      const double before = first ? 0.0 : rescale ? to * static_cast<double>(factor[n * scores.pitch + out]) : to;
      to = before + static_cast<double>(sum[n]);
    }
  }
}

template <class T>
CAPSFAST_DEVICE void write_coupling(const AccumulateArgs<T>& a, const Tile& tile,
                                    const Scores<T, AccumulateTile<T>::samples>& scores) {
  constexpr int kSamples = AccumulateTile<T>::samples;
  for (int n = gpu::thread(); n < tile.inputs * kSamples * tile.outputs; n += gpu::threads()) {
    const int out = n % tile.outputs, pair = n / tile.outputs, sample = pair % kSamples;
    if (sample >= tile.samples) continue;
    const int64_t b = tile.b0 + sample, i = tile.i0 + pair / kSamples, j = tile.j0 + out;
    a.coupling.template write<T>(b * a.coupling.stride[0] + i * a.coupling.stride[1] + j * a.coupling.stride[2],
                                 scores.logits[pair * scores.pitch + out]);
  }
}

// max - log scale, where `norm` or else `rows` has them, as for normalise().
template <class T>
CAPSFAST_DEVICE void write_lse(const AccumulateArgs<T>& a, const Tile& tile, Shared<T> rows) {
  constexpr int kSamples = AccumulateTile<T>::samples;
  for (int pair = gpu::thread(); pair < tile.inputs * kSamples; pair += gpu::threads()) {
    if (pair % kSamples >= tile.samples) continue;
    const int64_t b = tile.b0 + pair % kSamples, i = tile.i0 + pair / kSamples, at = b * a.in.I + i;
    const T max = a.norm.max ? a.norm.max[at] : rows[pair * 3];
    const T scale = a.norm.max ? a.norm.scale[at] : rows[pair * 3 + 1];
    a.lse.template write<T>(b * a.lse.stride[0] + i * a.lse.stride[1], log_sum(max, scale));
  }
}

template <class T, class E, bool kVotes>
CAPSFAST_KERNEL(kThreads, kBlocksFor<T>)
accumulate_kernel(AccumulateArgs<T> a) {
  using Size = AccumulateTile<T>;
  using Memory = AccumulateShared<T>;
  constexpr int kSamples = Size::samples;
  const Inputs& in = a.in;
  const Scores<T, kSamples> scores{gpu::shared<T>(0, Size::pairs * Size::outputs),
                                   gpu::shared<T>(Memory::scores, Size::pairs * Size::outputs), Size::outputs};
  const Shared<T> rows = gpu::shared<T>(Memory::rows_at, Size::pairs * 3);
  const Shared<double> total = gpu::shared<double>(Memory::total_at, Memory::columns);
  const Shared<T> max = gpu::shared<T>(Memory::max_at, Memory::columns),
                  factor = gpu::shared<T>(Memory::factor_at, Memory::columns);
  const bool follow = static_cast<bool>(a.max);
  const int64_t split = gpu::block_x(), i_begin = in.I * split / gpu::blocks_x(),
                i_end = in.I * (split + 1) / gpu::blocks_x();
  Tile tile;
  tile.j0 = gpu::block_z() * Size::outputs;
  tile.outputs = static_cast<int>(in.J - tile.j0 < Size::outputs ? in.J - tile.j0 : Size::outputs);
  for (tile.b0 = gpu::block_y() * kSamples; tile.b0 < in.B; tile.b0 += gpu::blocks_y() * kSamples) {
    tile.samples = static_cast<int>(in.B - tile.b0 < kSamples ? in.B - tile.b0 : kSamples);
    for (int n = gpu::thread(); n < Memory::columns && follow; n += gpu::threads()) {
      const bool leaky = in.leaky && split == 0;  // the entry of logit 0 must count once: the first split has it
      max[n] = leaky ? T(0) : Extreme<T>::lowest;
      total[n] = leaky ? 1.0 : 0.0;
    }
    for (tile.i0 = i_begin; tile.i0 < i_end; tile.i0 += Size::inputs) {
      tile.inputs = static_cast<int>(i_end - tile.i0 < Size::inputs ? i_end - tile.i0 : Size::inputs);
      if (!a.unweighted && follow) {
        score<T, E, kVotes>(in, tile, a.scoring, scores);
        gpu::barrier();
        follow_maximum(tile, scores, max, total, factor);
        gpu::barrier();
      } else if (!a.unweighted) {
        couple<T, E, kVotes>(in, tile, a.scoring, a.norm, rows, scores);
        if (a.coupling.data) write_coupling(a, tile, scores);
        if (a.lse.data && tile.j0 == 0) write_lse(a, tile, rows);
      }
      if (a.sum) add_votes<T, E, kVotes>(a, tile, split, tile.i0 == i_begin, follow, factor, scores);
      gpu::barrier();
    }
    for (int n = gpu::thread(); n < kSamples * tile.outputs && follow; n += gpu::threads()) {
      const int out = n % tile.outputs, sample = n / tile.outputs;
      if (sample >= tile.samples) continue;
      const int64_t to = (split * in.B + tile.b0 + sample) * in.J + tile.j0 + out;
      a.max[to] = max[sample * Size::outputs + out];
      a.total[to] = total[sample * Size::outputs + out];
    }
    gpu::barrier();
  }
}

// A sweep over the output capsules, for a softmax over more of them than a tile has: computes its normaliser.
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
  using Memory = AccumulateShared<T>;
  constexpr int kSamples = Size::samples;
  const Inputs& in = a.in;
  const Scores<T, kSamples> scores{gpu::shared<T>(0, Size::pairs * Size::outputs),
                                   gpu::shared<T>(Memory::scores, Size::pairs * Size::outputs), Size::outputs};
  const Shared<T> rows = gpu::shared<T>(Memory::rows_at, Size::pairs * 3);
  const bool with_dc = static_cast<bool>(a.scoring.ds);
  Tile tile;
  tile.i0 = gpu::block_x() * Size::inputs;
  tile.inputs = static_cast<int>(in.I - tile.i0 < Size::inputs ? in.I - tile.i0 : Size::inputs);
  for (tile.b0 = gpu::block_y() * kSamples; tile.b0 < in.B; tile.b0 += gpu::blocks_y() * kSamples) {
    tile.samples = static_cast<int>(in.B - tile.b0 < kSamples ? in.B - tile.b0 : kSamples);
    start_rows(tile.inputs * kSamples, in.leaky, rows);
    for (tile.j0 = 0; tile.j0 < in.J; tile.j0 += Size::outputs) {
      tile.outputs = static_cast<int>(in.J - tile.j0 < Size::outputs ? in.J - tile.j0 : Size::outputs);
      score<T, E, kVotes>(in, tile, a.scoring, scores);
      gpu::barrier();
      add_rows(tile, scores, with_dc, rows);
      gpu::barrier();
    }
    for (int pair = gpu::thread(); pair < tile.inputs * kSamples; pair += gpu::threads()) {
      if (pair % kSamples >= tile.samples) continue;
      const int64_t to = (tile.b0 + pair % kSamples) * in.I + tile.i0 + pair / kSamples;
      const T scale = inverse<T>(rows[pair * 3 + 1]);
      a.max[to] = rows[pair * 3];
      a.scale[to] = scale;
      if (with_dc) a.mean[to] = rows[pair * 3 + 2] * scale;
    }
    gpu::barrier();
  }
}

}  // namespace capsfast::cuda
