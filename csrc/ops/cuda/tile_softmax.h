// The softmaxes of the tile kernels. That over the output capsules needs scores of all warps of a block, which exchange
// them through shared memory, between barriers. That over the input capsules needs no exchange: a column (sample, j)
// belongs to one lane.
#pragma once

#include <cmath>

#include "coupling.h"
#include "tile_votes.h"

namespace capsfast::cuda {

// The routing logit b from dot = votes . V; -inf if the input capsule is not `valid` or out_mask drops the output
// capsule.
CAPSFAST_DEVICE float logit(const Inputs& in, bool valid, int64_t b, int64_t i, int64_t j, float dot) {
  float x = dot;
  if (in.logits.data)
    x += in.logits.template read<float>(b * in.logits.stride[0] + i * in.logits.stride[1] + j * in.logits.stride[2]);
  return valid && in.out_mask.at(b, j) ? x : -Extreme<float>::infinity;
}

// dc from dot = votes . ds and, in the `last` iteration, dcoupling; 0 if either capsule is masked.
CAPSFAST_DEVICE float gradient(const Inputs& in, bool valid, int64_t b, int64_t i, int64_t j, float dot, bool last,
                               const Operand& dcoupling) {
  if (!(valid && in.out_mask.at(b, j))) return 0.0f;
  if (!(last && dcoupling.data)) return dot;
  return dot +
         dcoupling.template read<float>(b * dcoupling.stride[0] + i * dcoupling.stride[1] + j * dcoupling.stride[2]);
}

// Which softmaxes to compute: one for each of `count` iterations, whose scores are `stride` elements apart.
struct SoftmaxSet {
  int count, stride;
  int last;           // the iteration whose dc dcoupling is added to
  Operand coupling;   // [B, I, J], written
  Operand dcoupling;  // [B, I, J]
};

// Softmax over the output capsules: replaces scores [j][row] by c and dc by db = c (dc - sum_j c dc). Four lanes share
// a row.
template <class Tr, bool kBackward>
CAPSFAST_DEVICE void softmax_rows(const Inputs& in, const SoftmaxSet& set, int b0, int i, const Lane& lane, int base,
                                  Shared<float> scores, Shared<float> dc) {
  const int part = lane.thread % 4, rows = set.count * Tr::samples;
  const bool plain = !(in.logits.data || in.mask.data || in.out_mask.data || (kBackward && set.dcoupling.data));
  for (int first = 0; first < rows; first += gpu::threads() / 4) {
    const int unit = first + lane.thread / 4, which = unit / Tr::samples, row = unit % Tr::samples, b = b0 + row;
    // Rows beyond the batch keep their scores as they are: their votes are 0.
    const int outputs = unit < rows && b < in.B ? static_cast<int>(in.J) : 0;
    constexpr int kStep = 4 * Tr::score_pitch;
    const int start = base + which * set.stride + row, end = start + outputs * Tr::score_pitch,
              begin = start + part * Tr::score_pitch;
    if (!plain) {
      const bool valid = outputs > 0 && in.mask.at(b, i);
#pragma unroll 1
      for (int j = part, at = begin; at < end; j += 4, at += kStep) {
        scores[at] = logit(in, valid, b, i, j, scores[at]);
        if constexpr (kBackward) dc[at] = gradient(in, valid, b, i, j, dc[at], which == set.last, set.dcoupling);
      }
    }
    float m = in.leaky ? 0.0f : Extreme<float>::lowest;
#pragma unroll 1
    for (int at = begin; at < end; at += kStep) m = std::fmax(m, static_cast<float>(scores[at]));
    for (int mask = 2; mask > 0; mask /= 2) m = std::fmax(m, gpu::shuffle_xor(m, mask));
    float sum = in.leaky && part == 0 ? exponential(-m) : 0.0f, mean = 0.0f;
#pragma unroll 1
    for (int at = begin; at < end; at += kStep) {
      const float e = exponential(scores[at] - m);
      scores[at] = e;
      sum += e;
      if constexpr (kBackward) mean += e * dc[at];
    }
    for (int mask = 2; mask > 0; mask /= 2) {
      sum += gpu::shuffle_xor(sum, mask);
      if constexpr (kBackward) mean += gpu::shuffle_xor(mean, mask);
    }
    const float scale = inverse<float>(sum);
    mean *= scale;
#pragma unroll 1
    for (int at = begin; at < end; at += kStep) {
      const float c = scores[at] * scale;
      scores[at] = c;
      if constexpr (kBackward) dc[at] = c * (dc[at] - mean);
    }
    if (!set.coupling.data) continue;
#pragma unroll 1
    for (int j = part, at = begin; at < end; j += 4, at += kStep) {
      set.coupling.template write<float>(
          b * set.coupling.stride[0] + i * set.coupling.stride[1] + j * set.coupling.stride[2], scores[at]);
    }
  }
}

// Calls f(b, j, at) for the columns (b, j) whose dot products this lane has. `at` is their index in arrays [j][row].
template <class Tr, class F>
CAPSFAST_DEVICE void each_column(const Inputs& in, int b0, const Lane& lane, const F& f) {
  const int row = own_row<Tr>(lane), first = lane.warp * Tr::outputs, J = static_cast<int>(in.J);
  if (!owns_row<Tr>(lane) || b0 + row >= in.B) return;
  // Not unrolled, as a round keeps many registers for its softmax.
#pragma unroll 1
  for (int j = first; j < J && j < first + Tr::outputs; ++j) f(b0 + row, j, j * Tr::score_pitch + row);
}

// The known normaliser of the columns: c = exp(b - max) scale and, in the backward, mean = sum_i c dc.
struct Columns {
  Shared<float> max, scale;  // [j][row]
  Global<const float> mean;  // [B, J]
};

template <class Tr>
CAPSFAST_DEVICE void stage_columns(const Inputs& in, const Global<const float>& max, const Global<const float>& scale,
                                   int b0, const Lane& lane, const Columns& to) {
  each_column<Tr>(in, b0, lane, [&](int b, int j, int at) {
    to.max[at] = max[b * in.J + j];
    to.scale[at] = scale[b * in.J + j];
  });
}

// Softmax over the input capsules with a known normaliser: replaces scores [j][row] by c and, in the backward, dc by
// db. Writes c to `coupling` too, if that is there.
template <class Tr>
CAPSFAST_DEVICE void softmax_columns(const Inputs& in, const Columns& norm, bool last, const Operand& dcoupling,
                                     const Operand& coupling, int b0, int i, const Lane& lane, int base,
                                     Shared<float> scores, Shared<float> dc) {
  each_column<Tr>(in, b0, lane, [&](int b, int j, int at) {
    const bool valid = in.mask.at(b, i);
    const float c = exponential(logit(in, valid, b, i, j, scores[base + at]) - norm.max[at]) * norm.scale[at];
    scores[base + at] = c;
    if constexpr (Tr::backward)
      dc[base + at] = c * (gradient(in, valid, b, i, j, dc[base + at], last, dcoupling) - norm.mean[b * in.J + j]);
    if (coupling.data)
      coupling.template write<float>(b * coupling.stride[0] + i * coupling.stride[1] + j * coupling.stride[2], c);
  });
}

// The normaliser of the columns while it is computed, arrays [j][row]: after the input capsules so far,
// c = exp(b - max) / total. factor: what the last one has multiplied earlier terms with.
struct Running {
  Shared<float> max, total, factor;
};

// `max` is replaced only when b exceeds it by more than this. exp(8) is small enough for sums in float, and so they are
// hardly ever rescaled after the first input capsules.
constexpr float kSlack = 8.0f;

template <class Tr>
CAPSFAST_DEVICE void start_columns(const Inputs& in, bool leaky, int b0, const Lane& lane, const Running& run) {
  each_column<Tr>(in, b0, lane, [&](int, int, int at) {
    run.max[at] = leaky ? 0.0f : Extreme<float>::lowest;
    run.total[at] = leaky ? 1.0f : 0.0f;
  });
}

// Replaces scores [j][row] by exp(b - max). The result says whether `max` has changed in a column of this lane or of
// the three other lanes of its group.
template <class Tr>
CAPSFAST_DEVICE bool follow_columns(const Inputs& in, const Running& run, int b0, int i, const Lane& lane,
                                    Shared<float> scores) {
  int moved = 0;
  each_column<Tr>(in, b0, lane, [&](int b, int j, int at) {
    const float x = logit(in, in.mask.at(b, i), b, i, j, scores[at]);
    float max = run.max[at], factor = 1.0f;
    if (x > max + kSlack) {
      factor = exponential(max - x);
      max = x;
      run.max[at] = x;
      moved = 1;
    }
    const float e = exponential(x - max);
    run.total[at] = run.total[at] * factor + e;
    run.factor[at] = factor;
    scores[at] = e;
  });
  moved |= gpu::shuffle_xor(moved, 1);
  moved |= gpu::shuffle_xor(moved, 2);
  return moved != 0;
}

}  // namespace capsfast::cuda
