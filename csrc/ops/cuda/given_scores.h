// The softmax over the output capsules, whose scores other threads have: lanes of the same warp, which are asked by
// shuffles, or any threads of the block, through shared memory.
#pragma once

#include "given_rows.h"

namespace capsfast::cuda {

// The lane that has output capsule (j + ahead) mod J of the same row, where j is that of `lane`. ahead <= J.
template <class Tr>
CAPSFAST_DEVICE int lane_ahead(const Spot<Tr>& at, int lane, int ahead) {
  const int to = lane + ahead * at.step;
  return to < at.end ? to : to - at.segment;
}

// The maximum over the output capsules of a row, in all its lanes, for each x[n].
template <int kCount, class Tr>
CAPSFAST_DEVICE void row_max(const Spot<Tr>& at, int lane, int J, float (&x)[kCount]) {
#pragma unroll
  for (int span = 1; span < 32; span *= 2) {
    if (span >= J) return;
    const int ahead = lane_ahead(at, lane, span);
#pragma unroll
    for (int n = 0; n < kCount; ++n) x[n] = std::fmax(x[n], gpu::shuffle(x[n], ahead));
  }
}

// The sum over the output capsules of a row, in all its lanes, for each x[n]. `run` is the sum over 1, 2, 4, ... output
// capsules from j on. The sum over all J is made of those whose lengths are the binary digits of J.
template <int kCount, class Tr>
CAPSFAST_DEVICE void row_sum(const Spot<Tr>& at, int lane, int J, float (&x)[kCount]) {
  float run[kCount];
#pragma unroll
  for (int n = 0; n < kCount; ++n) run[n] = x[n];
#pragma unroll
  for (int span = 2; span <= 32; span *= 2) {
    if (span > J) return;
    const int half = lane_ahead(at, lane, span / 2), covered = J & (span - 1);
#pragma unroll
    for (int n = 0; n < kCount; ++n) run[n] += gpu::shuffle(run[n], half);
    if ((J & span) == 0) continue;
    const int rest = lane_ahead(at, lane, covered);
#pragma unroll
    for (int n = 0; n < kCount; ++n) x[n] = covered == 0 ? run[n] : x[n] + gpu::shuffle(run[n], rest);
  }
}

// 1 / sum, or 0 if the sum is: then no logit is finite, and the coupling is to be 0.
CAPSFAST_DEVICE float scale_of(float sum) { return sum == 0.0f ? 0.0f : gpu::reciprocal(sum); }

// Replaces b by c and, in the backward, dc by db = c (dc - sum_j c dc), within the warp. b is -inf for votes that do
// not count.
template <bool kBackward, int kCount, class Tr>
CAPSFAST_DEVICE void softmax_warp(const Inputs& in, const Spot<Tr>& at, float (&b)[kCount], float (&dc)[kCount]) {
  constexpr float kNear = 40.0f;  // up to here exp(b) and its product with dc are well within float32
  const int J = static_cast<int>(in.J), lane = gpu::reread_thread_idx() % 32;
  float sum[kCount], mean[kCount], rest[kCount];
  bool far = false;
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    rest[n] = in.leaky ? 1.0f : 0.0f;
    far = far || (std::fabs(b[n]) > kNear && b[n] != -Extreme<float>::infinity);
  }
  // If all logits of the warp are small, the maximum need not be subtracted.
  if (gpu::any(far)) {
    float m[kCount];
#pragma unroll
    for (int n = 0; n < kCount; ++n) m[n] = std::fmax(b[n], in.leaky ? 0.0f : Extreme<float>::lowest);
    row_max(at, lane, J, m);
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      b[n] -= m[n];
      if (in.leaky) rest[n] = exponential(-m[n]);
    }
  }
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    sum[n] = b[n] = exponential(b[n]);
    if constexpr (kBackward) mean[n] = b[n] * dc[n];
  }
  row_sum(at, lane, J, sum);
  if constexpr (kBackward) row_sum(at, lane, J, mean);
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    const float scale = scale_of(sum[n] + rest[n]);
    b[n] *= scale;
    if constexpr (kBackward) dc[n] = b[n] * (dc[n] - mean[n] * scale);
  }
}

// Scores of a chunk in shared memory, [terms][slots][J]: for some iterations (terms) and all input capsules of the
// chunk (slots).
struct GivenScores {
  Shared<float> b, dc;
  int slots;                       // input capsules of a chunk
  int row_lanes, row, rows, lane;  // lanes of a softmax; this thread's first one; how many at a time; its lane

  template <class Tr>
  CAPSFAST_DEVICE GivenScores(const Inputs& in, const GivenShape& shape, const Spot<Tr>& at, const GivenMemory& memory,
                              int together, bool backward)
      : b(gpu::shared<float>(memory.b, size(in, at, together, backward))),
        dc(gpu::shared<float>(memory.dc, backward ? size(in, at, together, backward) : 0)),
        slots(at.rows * (backward ? Tr::backward : Tr::forward)),
        row_lanes(1 << shape.row_lanes_log),
        row(gpu::thread() >> shape.row_lanes_log),
        rows(gpu::threads() >> shape.row_lanes_log),
        lane(gpu::thread() & (row_lanes - 1)) {}

 private:
  template <class Tr>
  static CAPSFAST_DEVICE int size(const Inputs& in, const Spot<Tr>& at, int together, bool backward) {
    return Tr::exchange == Exchange::block
               ? together * at.rows * static_cast<int>(in.J) * (backward ? Tr::backward : Tr::forward)
               : 0;
  }
};

// Writes values[n] of this thread's votes to scores `to`, from element `from` on. Votes beyond the last input capsule
// are written too: there is room for a whole chunk, and nobody reads them. For votes that count, adds the element of
// `more` [B, I, J].
template <int kCount, class Tr>
CAPSFAST_DEVICE void put(const Spot<Tr>& at, int J, const Part& part, const Chunk& chunk, int from,
                         const float (&values)[kCount], const Operand& more, Shared<float> to) {
  if (!at.leads()) return;
  const int groups = at.rows * J;
  int element = from + at.row * J + at.j;
#pragma unroll
  for (int n = 0; n < kCount; ++n) to[element + n * groups] = values[n];
  if (!more.data) return;
  int64_t m = part.b * more.stride[0] + (part.begin + chunk.first + at.row) * more.stride[1] + at.j * more.stride[2];
#pragma unroll 1
  for (int n = 0; n < kCount; ++n, element += groups, m += at.rows * more.stride[1]) {
    if (chunk.counts >> n & 1) to[element] += more.read<float>(m);
  }
}

// Reads what put() has written; 0 for votes that do not count.
template <int kCount, class Tr>
CAPSFAST_DEVICE void take(const Spot<Tr>& at, int J, const Chunk& chunk, int from, Shared<float> values,
                          float (&to)[kCount]) {
  int element = from + at.row * J + at.j;
#pragma unroll
  for (int n = 0; n < kCount; ++n, element += at.rows * J)
    to[n] = chunk.counts >> n & 1 ? static_cast<float>(values[element]) : 0.0f;
}

// Softmax of the J scores from element `at` on, of which this lane has every row_lanes-th: replaces b by c and, in the
// backward, dc by db = c (dc - sum_j c dc). GivenSize::wide scores at a time, so that their loads are under way
// together. outputs: J, or 0 for lanes without a row, which take part in the shuffles.
template <bool kBackward>
CAPSFAST_DEVICE void softmax_row(const Inputs& in, const GivenScores& scores, int outputs, int at) {
  const auto each = [&](const auto& f) {
    for (int j = scores.lane; j < outputs; j += GivenSize::wide * scores.row_lanes) {
#pragma unroll
      for (int n = 0; n < GivenSize::wide; ++n) {
        if (j + n * scores.row_lanes < outputs) f(at + j + n * scores.row_lanes);
      }
    }
  };
  float m = in.leaky ? 0.0f : Extreme<float>::lowest;
  each([&](int n) { m = std::fmax(m, static_cast<float>(scores.b[n])); });
  for (int mask = scores.row_lanes / 2; mask > 0; mask /= 2) m = std::fmax(m, gpu::shuffle_xor(m, mask));
  float sum = in.leaky && scores.lane == 0 ? exponential(-m) : 0.0f, mean = 0.0f;
  each([&](int n) {
    const float e = exponential(scores.b[n] - m);
    scores.b[n] = e;
    sum += e;
    if constexpr (kBackward) mean += e * scores.dc[n];
  });
  for (int mask = scores.row_lanes / 2; mask > 0; mask /= 2) {
    sum += gpu::shuffle_xor(sum, mask);
    if constexpr (kBackward) mean += gpu::shuffle_xor(mean, mask);
  }
  const float scale = scale_of(sum);
  mean *= scale;
  each([&](int n) {
    const float c = scores.b[n] * scale;
    scores.b[n] = c;
    if constexpr (kBackward) scores.dc[n] = c * (scores.dc[n] - mean);
  });
}

// The softmaxes of all input capsules of a chunk and of `terms` iterations, in shared memory.
template <bool kBackward>
CAPSFAST_DEVICE void softmax_block(const Inputs& in, const Part& part, int first, int terms,
                                   const GivenScores& scores) {
  const int J = static_cast<int>(in.J),
            capsules = part.count - first < scores.slots ? part.count - first : scores.slots, rows = terms * capsules;
  for (int start = 0; start < rows; start += scores.rows) {
    const int row = start + scores.row, term = terms == 1 ? 0 : row / capsules, capsule = row - term * capsules;
    softmax_row<kBackward>(in, scores, row < rows ? J : 0, (term * scores.slots + capsule) * J);
  }
}

}  // namespace capsfast::cuda
