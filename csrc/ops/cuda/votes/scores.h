// The softmaxes. Over the output capsules other threads have the rest of the scores: lanes of the same warp, which are
// asked by shuffles, or any threads of the block, through shared memory.
#pragma once

#include "layout.h"

namespace capsfast::cuda {

// The lane that has output capsule (j + ahead) mod J of the same row, where j is that of `lane`. ahead <= J.
template <class Traits>
CAPSFAST_DEVICE int lane_ahead(const ThreadCoord<Traits>& at, int lane, int ahead) {
  const int to = lane + ahead * at.step;
  return to < at.end ? to : to - at.segment;
}

// The maximum over the output capsules of a row, in all its lanes, for each x[n].
template <int kCount, class Traits>
CAPSFAST_DEVICE void row_max(const ThreadCoord<Traits>& at, int lane, int J, float (&x)[kCount]) {
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
template <int kCount, class Traits>
CAPSFAST_DEVICE void row_sum(const ThreadCoord<Traits>& at, int lane, int J, float (&x)[kCount]) {
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

// Replaces b by c and, in the backward, dc by db = c (dc - sum_j c dc), within the warp. b is -inf for votes that
// are not valid.
template <bool kBackward, int kCount, class Traits>
CAPSFAST_DEVICE void softmax_warp(const Inputs& in, const ThreadCoord<Traits>& at, float (&b)[kCount],
                                  float (&dc)[kCount]) {
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
struct VotesScores {
  Shared<float> b, dc;
  int slots;                       // input capsules of a chunk
  int row_lanes, row, rows, lane;  // lanes of a softmax; this thread's first one; how many at a time; its lane

  template <class Traits>
  CAPSFAST_DEVICE VotesScores(const Inputs& in, const VotesShape& shape, const ThreadCoord<Traits>& at,
                              const VotesMemory& memory, int together, bool backward)
      : b(gpu::shared<float>(memory.b, size(in, at, together, backward))),
        dc(gpu::shared<float>(memory.dc, backward ? size(in, at, together, backward) : 0)),
        slots(at.rows * (backward ? Traits::backward : Traits::forward)),
        row_lanes(1 << shape.row_lanes_log),
        row(gpu::thread() >> shape.row_lanes_log),
        rows(gpu::threads() >> shape.row_lanes_log),
        lane(gpu::thread() & (row_lanes - 1)) {}

 private:
  template <class Traits>
  static CAPSFAST_DEVICE int size(const Inputs& in, const ThreadCoord<Traits>& at, int together, bool backward) {
    return Traits::exchange == Exchange::block
               ? together * at.rows * static_cast<int>(in.J) * (backward ? Traits::backward : Traits::forward)
               : 0;
  }
};

// Writes values[n] of this thread's votes to scores `to`, from element `from` on. Votes beyond the last input capsule
// are written too: there is room for a whole chunk, and nobody reads them. For valid votes, adds the element of `more`
// [B, I, J].
template <int kCount, class Traits>
CAPSFAST_DEVICE void store_scores(const ThreadCoord<Traits>& at, int J, const Part& part, const Chunk& chunk, int from,
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
    if (chunk.valid >> n & 1) to[element] += more.read<float>(m);
  }
}

// Reads what store_scores() has written; 0 for votes that are not valid.
template <int kCount, class Traits>
CAPSFAST_DEVICE void load_scores(const ThreadCoord<Traits>& at, int J, const Chunk& chunk, int from,
                                 Shared<float> values, float (&to)[kCount]) {
  int element = from + at.row * J + at.j;
#pragma unroll
  for (int n = 0; n < kCount; ++n, element += at.rows * J)
    to[n] = chunk.valid >> n & 1 ? static_cast<float>(values[element]) : 0.0f;
}

// Softmax of the J scores from element `at` on, of which this lane has every row_lanes-th: replaces b by c and, in the
// backward, dc by db = c (dc - sum_j c dc). VotesSize::wide scores at a time, so that their loads are under way
// together. outputs: J, or 0 for lanes without a row, which take part in the shuffles.
template <bool kBackward>
CAPSFAST_DEVICE void softmax_row(const Inputs& in, const VotesScores& scores, int outputs, int at) {
  const auto each = [&](const auto& f) {
    for (int j = scores.lane; j < outputs; j += VotesSize::wide * scores.row_lanes) {
#pragma unroll
      for (int n = 0; n < VotesSize::wide; ++n) {
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
                                   const VotesScores& scores) {
  const int J = static_cast<int>(in.J),
            capsules = part.count - first < scores.slots ? part.count - first : scores.slots, rows = terms * capsules;
  for (int start = 0; start < rows; start += scores.rows) {
    const int row = start + scores.row, term = terms == 1 ? 0 : row / capsules, capsule = row - term * capsules;
    softmax_row<kBackward>(in, scores, row < rows ? J : 0, (term * scores.slots + capsule) * J);
  }
}

// The normaliser of the softmax over the input capsules, for one output capsule: c = exp(b - max) scale. mean = sum_i c
// dc, in the backward.
struct Column {
  float max, scale, mean;
};

// Replaces b by c and, in the backward, dc by db, with a known normaliser.
template <bool kBackward, int kCount>
CAPSFAST_DEVICE void softmax_known(const Column& column, float (&b)[kCount], float (&dc)[kCount]) {
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    b[n] = exponential(b[n] - column.max) * column.scale;
    if constexpr (kBackward) dc[n] = b[n] * (dc[n] - column.mean);
  }
}

// Replaces b = votes . V by c and, in the backward, dc = votes . ds by db. Adds the logits to b and dcoupling to dc
// before.
template <class Traits, bool kBackward, int kCount>
CAPSFAST_DEVICE void softmax(const Inputs& in, const ThreadCoord<Traits>& at, const Part& part, const Chunk& chunk,
                             const Operand& dcoupling, const Column& column, const VotesScores& scores,
                             float (&b)[kCount], float (&dc)[kCount]) {
  exclude_invalid(chunk, b);
  if constexpr (Traits::exchange != Exchange::block) {
    if (in.logits.data) add_elements(in.logits, at, part, chunk, b);
    if (kBackward && dcoupling.data) add_elements(dcoupling, at, part, chunk, dc);
  }
  if constexpr (Traits::exchange == Exchange::none) {
    softmax_known<kBackward>(column, b, dc);
  } else if constexpr (Traits::exchange == Exchange::warp) {
    softmax_warp<kBackward>(in, at, b, dc);
  } else {
    gpu::warp_barrier();  // all lanes have read what is overwritten now
    const int J = static_cast<int>(in.J);
    store_scores(at, J, part, chunk, 0, b, in.logits, scores.b);
    if constexpr (kBackward) store_scores(at, J, part, chunk, 0, dc, dcoupling, scores.dc);
    gpu::barrier();
    softmax_block<kBackward>(in, part, chunk.first, 1, scores);
    gpu::barrier();
    load_scores(at, J, chunk, 0, scores.b, b);
    if constexpr (kBackward) load_scores(at, J, chunk, 0, scores.dc, dc);
  }
}

}  // namespace capsfast::cuda
