// The passes over a block's votes: sum_i c votes in the forward, sum_i db votes in the backward.
#pragma once

#include "memory.h"
#include "scores.h"

namespace capsfast::cuda {

// What a pass has summed up. If the normaliser is not known yet, `value` is weighted with exp(b - max), where max is
// the largest logit so far, and total = sum_i exp(b - max).
template <int kElements>
struct Sum {
  Vector<kElements> value = {};
  float max = Extreme<float>::lowest, total = 0.0f;
};

// Replaces b by exp(b - max), where max is the largest so far of this thread's votes, and rescales `sum` if max grows.
template <int kElements, int kCount>
CAPSFAST_DEVICE void follow_maximum(float (&b)[kCount], Sum<kElements>* sum) {
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
template <int kElements, int kCount>
CAPSFAST_DEVICE void add_votes(const float (&c)[kCount], const Vector<kElements> (&votes)[kCount],
                               Vector<kElements>* sum) {
  if constexpr (kCount > 2) {
    Vector<kElements> here = scaled(c[0], votes[0]);
#pragma unroll
    for (int n = 1; n < kCount; ++n) add(c[n], votes[n], &here);
    add(1.0f, here, sum);
  } else {
#pragma unroll
    for (int n = 0; n < kCount; ++n) add(c[n], votes[n], sum);
  }
}

// Calls f(chunk, votes) for the chunks of a part, one after the other; votes that are not valid are 0.
template <int kCount, class Traits, class F>
CAPSFAST_DEVICE void for_each_chunk(const Inputs& in, const ThreadCoord<Traits>& at, const Part& part,
                                    SharedVotes<Traits>& from, const F& f) {
  const bool valid = in.out_mask.at(part.b, at.j);
  for (int first = 0; first < part.count; first += kCount * at.rows) {
    const Chunk chunk = chunk_at<kCount>(in, at, part, valid, first);
    typename Traits::Elements votes[kCount];
    from.fetch(at, chunk, votes);
    clear_invalid(chunk, votes);
    f(chunk, votes);
  }
}

template <class Traits>
struct ForwardPass {
  bool unweighted;  // every coefficient is 1
  bool with_V;
  typename Traits::Elements V;
  bool follow;       // softmax over the input capsules whose normaliser is not known yet
  Column column;     // the normaliser if it is known: then only the coupling is wanted
  Operand coupling;  // [B, I, J], written
};

template <class Traits>
CAPSFAST_DEVICE Sum<Traits::elements> forward_pass(const Inputs& in, const ThreadCoord<Traits>& at, const Part& part,
                                                   SharedVotes<Traits>& from, const ForwardPass<Traits>& pass,
                                                   const VotesScores& scores) {
  using E = typename Traits::Type;
  constexpr int kCount = Traits::forward;
  Sum<Traits::elements> sum;
  for_each_chunk<kCount>(in, at, part, from, [&](const Chunk& chunk, const auto& votes) {
    float c[kCount];
#pragma unroll
    for (int n = 0; n < kCount; ++n) c[n] = pass.unweighted ? 1.0f : 0.0f;
    if (pass.unweighted) {
      // The maximum and the total of logits that are all 0.
      sum.max = 0.0f;
#pragma unroll
      for (int n = 0; n < kCount; ++n) sum.total += chunk.valid >> n & 1 ? 1.0f : 0.0f;
    } else {
      if (pass.with_V) dots(at, votes, pass.V, c);
      if (Traits::in && pass.follow) {
        exclude_invalid(chunk, c);
        if (in.logits.data) add_elements(in.logits, at, part, chunk, c);
        follow_maximum(c, &sum);
      } else {
        softmax<Traits, false>(in, at, part, chunk, {}, pass.column, scores, c, c);
        if (pass.coupling.data && at.leads()) {
          const Global<E> to = pass.coupling.data.template as<E>();
          for_each_vote<kCount>(
              pass.coupling, at, part, chunk.first, chunk.inside, [&](int n, int64_t m) { narrow(c[n], &to[m]); });
        }
        if (Traits::in) return;
      }
    }
    add_votes(c, votes, &sum.value);
  });
  return sum;
}

// sum_i db votes of one iteration.
template <class Traits>
CAPSFAST_DEVICE Sum<Traits::elements> backward_pass(
    const Inputs& in, const ThreadCoord<Traits>& at, const Part& part, SharedVotes<Traits>& from,
    const typename Traits::Elements& V, const typename Traits::Elements& ds, const Operand& dcoupling,
    const Column& column, const VotesScores& scores) {
  constexpr int kCount = Traits::backward;
  Sum<Traits::elements> sum;
  for_each_chunk<kCount>(in, at, part, from, [&](const Chunk& chunk, const auto& votes) {
    float b[kCount], dc[kCount];
    dots(at, votes, V, b);
    dots(at, votes, ds, dc);
    softmax<Traits, true>(in, at, part, chunk, dcoupling, column, scores, b, dc);
    add_votes(dc, votes, &sum.value);
  });
  return sum;
}

}  // namespace capsfast::cuda
