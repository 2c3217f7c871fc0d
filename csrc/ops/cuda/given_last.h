// The last pass over a block's votes, for all iterations at once: dvotes = sum_t c_t ds_t + db_t V_{t-1} and
// dlogits = sum_t db_t. Its Source (given_passes.h) also has `V(t)`, what iteration t scored with, `ds(t)` and the
// normaliser `column(t)`, of the thread's output capsule. t counts from 0.
#pragma once

#include "given_votes.h"

namespace capsfast::cuda {

// What the last pass has to compute.
struct LastPass {
  const FinalArgs<float>& a;
  int together;            // iterations whose softmaxes share barriers
  Global<double> dlogits;  // [I, J], this block's own sum, or absent
  bool fresh;              // dlogits is not written yet

  CAPSFAST_DEVICE bool wants_logits() const { return a.dlogits_sample.data || a.dlogits; }
  // Whether dvotes have the term db V(t): not in the first iteration, where V(0) = 0, and not with gradient="last".
  CAPSFAST_DEVICE bool with_db(int64_t t) const { return t > 0 && !a.gradient_last; }
  CAPSFAST_DEVICE Operand dcoupling(int64_t t) const { return t + 1 == a.iterations ? a.dcoupling : Operand{}; }
};

// Gradients of kCount votes and of their logits, summed over the iterations so far.
template <int kNumbers, int kCount>
struct Gradients {
  Vector<kNumbers> votes[kCount];
  float logits[kCount];
};

// Adds the terms of iteration t.
template <int kNumbers, int kCount, class Source>
CAPSFAST_DEVICE void add_iteration(const LastPass& pass, int64_t t, const float (&c)[kCount], const float (&db)[kCount],
                                   const Source& source, Gradients<kNumbers, kCount>* to) {
  const Vector<kNumbers> ds = source.ds(t);
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    add(c[n], ds, &to->votes[n]);
    to->logits[n] += db[n];
  }
  if (!pass.with_db(t)) return;
  const Vector<kNumbers> V = source.V(t);
#pragma unroll
  for (int n = 0; n < kCount; ++n) add(db[n], V, &to->votes[n]);
}

// b = votes . V(t) and dc = votes . ds(t), or 0 if they are not needed.
template <class Tr, int kCount, class Source>
CAPSFAST_DEVICE void agree(const Spot<Tr>& at, const typename Tr::Numbers (&votes)[kCount], const LastPass& pass,
                           int64_t t, const Source& source, float (&b)[kCount], float (&dc)[kCount]) {
#pragma unroll
  for (int n = 0; n < kCount; ++n) b[n] = dc[n] = 0.0f;
  if (t > 0) dots(at, votes, source.V(t), b);
  if (pass.with_db(t) || pass.wants_logits()) dots(at, votes, source.ds(t), dc);
}

template <class Tr, int kCount>
CAPSFAST_DEVICE void write_gradients(const Inputs& in, const Spot<Tr>& at, const Part& part, const Chunk& chunk,
                                     const LastPass& pass, const Gradients<Tr::numbers, kCount>& gradients) {
  if (pass.a.dvotes.data) write_votes(pass.a.dvotes, at, part, chunk, gradients.votes);
  if (!at.leads()) return;
  const Operand& sample = pass.a.dlogits_sample;
  if (sample.data)
    each_element<kCount>(sample, at, part, chunk.first, chunk.inside, [&](int n, int64_t m) {
      sample.write<float>(m, gradients.logits[n]);
    });
  if (!pass.dlogits) return;
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    if (!(chunk.inside >> n & 1)) continue;
    double& to = pass.dlogits[(part.begin + chunk.first + n * at.rows + at.row) * in.J + at.j];
    to = (pass.fresh ? 0.0 : to) + static_cast<double>(gradients.logits[n]);
  }
}

template <class Tr, class Source>
CAPSFAST_DEVICE void last_pass(const Inputs& in, const Spot<Tr>& at, const Part& part, Source& source,
                               const LastPass& pass, const GivenScores& scores) {
  constexpr int kCount = Tr::backward;
  const int J = static_cast<int>(in.J), size = scores.slots * J;
  const bool valid = in.out_mask.at(part.b, at.j);
  for (int first = 0; first < part.count; first += kCount * at.rows) {
    const Chunk chunk = chunk_at<kCount>(in, at, part, valid, first);
    typename Tr::Numbers votes[kCount];
    source.fetch(at, chunk, votes);
    clear(chunk, votes);
    Gradients<Tr::numbers, kCount> gradients = {};
    float b[kCount], dc[kCount];
    for (int64_t t = pass.a.first; t < pass.a.iterations; t += pass.together) {
      if constexpr (Tr::exchange != Exchange::block) {
        agree(at, votes, pass, t, source, b, dc);
        softmax<Tr, true>(in, at, part, chunk, pass.dcoupling(t), source.column(t), scores, b, dc);
        add_iteration(pass, t, b, dc, source, &gradients);
      } else {
        const int terms =
            pass.a.iterations - t < pass.together ? static_cast<int>(pass.a.iterations - t) : pass.together;
        gpu::warp_barrier();
        for (int term = 0; term < terms; ++term) {
          agree(at, votes, pass, t + term, source, b, dc);
          exclude(chunk, b);
          put(at, J, part, chunk, term * size, b, in.logits, scores.b);
          put(at, J, part, chunk, term * size, dc, pass.dcoupling(t + term), scores.dc);
        }
        gpu::barrier();
        softmax_block<true>(in, part, first, terms, scores);
        gpu::barrier();
        for (int term = 0; term < terms; ++term) {
          take(at, J, chunk, term * size, scores.b, b);
          take(at, J, chunk, term * size, scores.dc, dc);
          add_iteration(pass, t + term, b, dc, source, &gradients);
        }
      }
    }
    write_gradients(in, at, part, chunk, pass, gradients);
  }
}

}  // namespace capsfast::cuda
