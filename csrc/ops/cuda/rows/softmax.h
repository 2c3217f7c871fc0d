// From dot products to coupling coefficients c and, in the backward, db, in the registers of a warp.
#pragma once

#include <cmath>

#include "../../../math/softmax.h"
#include "../warp.h"
#include "votes.h"

namespace capsfast::cuda::rows {

// The place of a score: samples b0 + group and b0 + group + 8, input capsule i.
struct ScoreCoord {
  int b0, i;
  CAPSFAST_DEVICE int64_t sample(const ThreadCoord& at, int row) const { return b0 + at.group + 8 * row; }
};

// Writes scores to [B, I, J], for the columns that this lane counts.
template <class Tr>
CAPSFAST_DEVICE void write_scores(const Inputs& in, const Operand& to, const ThreadCoord& at, const ScoreCoord& of,
                                  const Scores<Tr>& x) {
  unrolled<Tr::slots, 2>([&](int slot, int row) {
    const int64_t sample = of.sample(at, row);
    if (sample < in.B && stands_for<Tr>(at, slot, static_cast<int>(in.J)))
      to.write<float>(to.at(sample, of.i, output_of<Tr>(at, slot)), x[slot][row]);
  });
}

// The options of the scores: adds logits to b and dcoupling, if wanted, to dc. For a masked input or output capsule
// makes b -inf and dc 0.
template <class Tr, bool kBackward>
CAPSFAST_DEVICE void apply_options(const Inputs& in, const Operand& dcoupling, bool with_dcoupling,
                                   const ThreadCoord& at, const ScoreCoord& of, Scores<Tr>& b, Scores<Tr>& dc) {
  unrolled<Tr::slots, 2>([&](int slot, int row) {
    const int64_t sample = of.sample(at, row);
    const int j = output_of<Tr>(at, slot);
    const bool counts = sample < in.B && in.mask.at(sample, of.i) && j < in.J && in.out_mask.at(sample, j);
    if (counts && in.logits.data) b[slot][row] += in.logits.template read<float>(in.logits.at(sample, of.i, j));
    if (!counts) b[slot][row] = -Extreme<float>::infinity;
    if constexpr (kBackward) {
      if (counts && with_dcoupling && dcoupling.data)
        dc[slot][row] += dcoupling.template read<float>(dcoupling.at(sample, of.i, j));
      if (!counts) dc[slot][row] = 0.0f;
    }
  });
}

// The sum over the four lanes of a quad, in all of them.
CAPSFAST_DEVICE float quad_sum(float x) {
  x += gpu::shuffle_xor(x, 1);
  return x + gpu::shuffle_xor(x, 2);
}
CAPSFAST_DEVICE float quad_max(float x) {
  x = std::fmax(x, gpu::shuffle_xor(x, 1));
  return std::fmax(x, gpu::shuffle_xor(x, 2));
}

// Logits within +-kNear need no subtraction of the maximum before exp(): the exponential, a sum of twelve, and its
// product with a gradient as small as 1e-25 neither overflow nor become 0.
constexpr float kNear = 30.0f;

// Softmax over the output capsules: replaces b by c times `times` and, in the backward, dc by db = c (dc - sum_j c dc)
// times `times`. counts: see standing().
template <class Tr, bool kBackward>
CAPSFAST_DEVICE void softmax_out(unsigned counts, bool leaky, Scores<Tr>& b, Scores<Tr>& dc, float times = 1.0f) {
  float leak[2] = {1.0f, 1.0f};  // exp() of the leaky entry's logit, 0
  bool far = false;
  unrolled<Tr::slots, 2>([&](int slot, int row) { far = far | (std::fabs(b[slot][row]) > kNear); });
  if (!Tr::plain || gpu::any(far)) {
    unrolled<2>([&](int row) {
      float m = !Tr::plain && leaky ? 0.0f : Extreme<float>::lowest;
      unrolled<Tr::slots>([&](int slot) { m = counts >> slot & 1 ? std::fmax(m, b[slot][row]) : m; });
      m = quad_max(m);
      if constexpr (!Tr::plain) leak[row] = exponential(-m);
      // Only the logit of padding can exceed the maximum. The coefficient of padding may be any number but not NaN.
      unrolled<Tr::slots>([&](int slot) {
        const float x = b[slot][row] - m;
        b[slot][row] = x > 0.0f ? 0.0f : x;
      });
    });
  }
  unrolled<2>([&](int row) {
    float sum = 0.0f, mean = 0.0f;
    unrolled<Tr::slots>([&](int slot) {
      const float e = exponential(b[slot][row]);
      b[slot][row] = e;
      const float term = counts >> slot & 1 ? e : 0.0f;
      sum += term;
      if constexpr (kBackward) mean += term * dc[slot][row];
    });
    sum = quad_sum(sum);
    float scale;
    if constexpr (Tr::plain) {
      scale = gpu::reciprocal(sum);
    } else {
      scale = inverse(leaky ? sum + leak[row] : sum);
    }
    if constexpr (kBackward) mean = quad_sum(mean) * scale;
    unrolled<Tr::slots>([&](int slot) {
      const float c = b[slot][row] * (scale * times);
      b[slot][row] = c;
      if constexpr (kBackward) dc[slot][row] = c * (dc[slot][row] - mean);
    });
  });
}

// Softmax over the input capsules with a known normaliser [B, J]: replaces b by c and, in the backward, dc by db.
template <class Tr, bool kBackward>
CAPSFAST_DEVICE void softmax_known(const Inputs& in, const Normaliser<float>& norm, const ThreadCoord& at,
                                   const ScoreCoord& of, Scores<Tr>& b, Scores<Tr>& dc) {
  unrolled<Tr::slots, 2>([&](int slot, int row) {
    const int64_t sample = of.sample(at, row);
    const int j = output_of<Tr>(at, slot);
    float c = 0.0f, db = 0.0f;
    if (sample < in.B && j < in.J) {
      const int64_t column = sample * in.J + j;
      c = exponential(b[slot][row] - norm.max[column]) * norm.scale[column];
      if constexpr (kBackward) db = (c > kWhole<float> ? 0.0f : c) * (dc[slot][row] - norm.mean[column]);
    }
    b[slot][row] = c;
    if constexpr (kBackward) dc[slot][row] = db;
  });
}

// The sums of a warp over a segment. For a softmax over the input capsules with unknown normaliser, c = exp(b - max) /
// total after the input capsules so far.
template <class Tr>
struct Accumulation {
  Accumulator sum[Tr::tiles];
  Scores<Tr> max, total;
};

// `max` is replaced only if b exceeds it by more than this. exp(8) is small enough for sums in float, and sums are
// hardly ever rescaled after the first input capsules.
constexpr float kSlack = 8.0f;

template <class Tr>
CAPSFAST_DEVICE void rescale(const Scores<Tr>& factor, Accumulator (&sum)[Tr::tiles]) {
  unrolled<Tr::tiles, 4>([&](int tile, int n) { sum[tile][n] *= factor[tile / 8][n / 2]; });
}

// Replaces b by exp(b - max), after `max` has followed it.
template <class Tr>
CAPSFAST_DEVICE void follow_maximum(Accumulation<Tr>* mine, Scores<Tr>& b) {
  Scores<Tr> factor;
  bool moved = false;
  unrolled<Tr::slots, 2>([&](int slot, int row) {
    const float x = b[slot][row], before = mine->max[slot][row];
    const bool rises = x > before + kSlack;
    const float max = rises ? x : before;
    factor[slot][row] = rises ? exponential(before - x) : 1.0f;
    moved = moved || rises;
    b[slot][row] = exponential(x - max);
    mine->max[slot][row] = max;
    mine->total[slot][row] = mine->total[slot][row] * factor[slot][row] + b[slot][row];
  });
  if (moved) rescale<Tr>(factor, mine->sum);
}

}  // namespace capsfast::cuda::rows
