// The passes over a block's votes: sum_i c votes in the forward, sum_i db votes in the backward.
#pragma once

#include "given_scores.h"
#include "given_votes.h"

namespace capsfast::cuda {

// What a pass has summed up. If the normaliser is not known yet, `value` is weighted with exp(b - max), where max is
// the largest logit so far, and total = sum_i exp(b - max).
template <int kNumbers>
struct Sum {
  Vector<kNumbers> value = {};
  float max = Extreme<float>::lowest, total = 0.0f;
};

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

// Replaces b by exp(b - max), where max is the largest so far of this thread's votes, and rescales `sum` if max grows.
template <int kNumbers, int kCount>
CAPSFAST_DEVICE void follow_maximum(float (&b)[kCount], Sum<kNumbers>* sum) {
  float m = sum->max, here = 0.0f;
#pragma unroll
  for (int n = 0; n < kCount; ++n) m = std::fmax(m, b[n]);
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    b[n] = exponential(b[n] - m);
    here += b[n];
  }
  const float factor = exponential(sum->max - m);
  sum->value = scaled(factor, sum->value);
  sum->total = sum->total * factor + here;
  sum->max = m;
}

// sum += sum_n c[n] votes[n]. More than two are added to each other first: the rounding error of a sum of sums is
// smaller.
template <int kNumbers, int kCount>
CAPSFAST_DEVICE void add_votes(const float (&c)[kCount], const Vector<kNumbers> (&votes)[kCount],
                               Vector<kNumbers>* sum) {
  if constexpr (kCount > 2) {
    Vector<kNumbers> here = scaled(c[0], votes[0]);
#pragma unroll
    for (int n = 1; n < kCount; ++n) add(c[n], votes[n], &here);
    add(1.0f, here, sum);
  } else {
#pragma unroll
    for (int n = 0; n < kCount; ++n) add(c[n], votes[n], sum);
  }
}

// Replaces b = votes . V by c and, in the backward, dc = votes . ds by db. Adds the logits to b and dcoupling to dc
// before.
template <class Tr, bool kBackward, int kCount>
CAPSFAST_DEVICE void softmax(const Inputs& in, const Spot<Tr>& at, const Part& part, const Chunk& chunk,
                             const Operand& dcoupling, const Column& column, const GivenScores& scores,
                             float (&b)[kCount], float (&dc)[kCount]) {
  exclude(chunk, b);
  if constexpr (Tr::exchange != Exchange::block) {
    if (in.logits.data) add_elements(in.logits, at, part, chunk, b);
    if (kBackward && dcoupling.data) add_elements(dcoupling, at, part, chunk, dc);
  }
  if constexpr (Tr::exchange == Exchange::none) {
    softmax_known<kBackward>(column, b, dc);
  } else if constexpr (Tr::exchange == Exchange::warp) {
    softmax_warp<kBackward>(in, at, b, dc);
  } else {
    gpu::warp_barrier();  // all lanes have read what is overwritten now
    const int J = static_cast<int>(in.J);
    put(at, J, part, chunk, 0, b, in.logits, scores.b);
    if constexpr (kBackward) put(at, J, part, chunk, 0, dc, dcoupling, scores.dc);
    gpu::barrier();
    softmax_block<kBackward>(in, part, chunk.first, 1, scores);
    gpu::barrier();
    take(at, J, chunk, 0, scores.b, b);
    if constexpr (kBackward) take(at, J, chunk, 0, scores.dc, dc);
  }
}

template <class Tr>
struct ForwardPass {
  bool unweighted;  // every coefficient is 1
  bool with_V;
  typename Tr::Numbers V;
  bool follow;       // softmax over the input capsules whose normaliser is not known yet
  Column column;     // the normaliser if it is known: then only the coupling is wanted
  Operand coupling;  // [B, I, J], written
};

template <class Tr>
CAPSFAST_DEVICE Sum<Tr::numbers> forward_pass(const Inputs& in, const Spot<Tr>& at, const Part& part,
                                              SharedVotes<Tr>& from, const ForwardPass<Tr>& pass,
                                              const GivenScores& scores) {
  using E = typename Tr::Type;
  constexpr int kCount = Tr::forward;
  const bool valid = in.out_mask.at(part.b, at.j);
  Sum<Tr::numbers> sum;
  for (int first = 0; first < part.count; first += kCount * at.rows) {
    const Chunk chunk = chunk_at<kCount>(in, at, part, valid, first);
    typename Tr::Numbers votes[kCount];
    from.fetch(at, chunk, votes);
    clear(chunk, votes);
    float c[kCount];
#pragma unroll
    for (int n = 0; n < kCount; ++n) c[n] = pass.unweighted ? 1.0f : 0.0f;
    if (pass.unweighted) {
      // The maximum and the total of logits that are all 0.
      sum.max = 0.0f;
#pragma unroll
      for (int n = 0; n < kCount; ++n) sum.total += chunk.counts >> n & 1 ? 1.0f : 0.0f;
    } else {
      if (pass.with_V) dots(at, votes, pass.V, c);
      if (Tr::in && pass.follow) {
        exclude(chunk, c);
        if (in.logits.data) add_elements(in.logits, at, part, chunk, c);
        follow_maximum(c, &sum);
      } else {
        softmax<Tr, false>(in, at, part, chunk, {}, pass.column, scores, c, c);
        if (pass.coupling.data && at.leads()) {
          const Global<E> to = pass.coupling.data.template as<E>();
          each_element<kCount>(
              pass.coupling, at, part, first, chunk.inside, [&](int n, int64_t m) { narrow(c[n], &to[m]); });
        }
        if (Tr::in) continue;
      }
    }
    add_votes(c, votes, &sum.value);
  }
  return sum;
}

// sum_i db votes of one iteration.
template <class Tr>
CAPSFAST_DEVICE Sum<Tr::numbers> backward_pass(
    const Inputs& in, const Spot<Tr>& at, const Part& part, SharedVotes<Tr>& from, const typename Tr::Numbers& V,
    const typename Tr::Numbers& ds, const Operand& dcoupling, const Column& column, const GivenScores& scores) {
  constexpr int kCount = Tr::backward;
  const bool valid = in.out_mask.at(part.b, at.j);
  Sum<Tr::numbers> sum;
  for (int first = 0; first < part.count; first += kCount * at.rows) {
    const Chunk chunk = chunk_at<kCount>(in, at, part, valid, first);
    typename Tr::Numbers votes[kCount];
    from.fetch(at, chunk, votes);
    clear(chunk, votes);
    float b[kCount], dc[kCount];
    dots(at, votes, V, b);
    dots(at, votes, ds, dc);
    softmax<Tr, true>(in, at, part, chunk, dcoupling, column, scores, b, dc);
    add_votes(dc, votes, &sum.value);
  }
  return sum;
}

}  // namespace capsfast::cuda
