// The gradient pass over a block's votes, for all iterations at once: dvotes = sum_t c_t ds_t + db_t V_{t-1} and
// dlogits = sum_t db_t.
#pragma once

#include "../update.h"
#include "accumulate.h"

namespace capsfast::cuda {

struct VotesBackwardArgs {
  Inputs in;
  Squashing squash;
  VotesPlan plan;
  int first, iterations;  // iterations [first, iterations) have gradients
  bool gradient_last;
  Operand dv;                   // [B, J, D]
  Operand coupling, dcoupling;  // [B, I, J]; without dcoupling no coupling is needed
  Global<const float> s;        // [r, B, J, D]
  Global<const float> norm;     // [2, r, B, J], softmax over the input capsules
  Global<float> ds;             // [r, B, J, D], written if dbias is wanted, else absent
  Operand dvotes;               // [B, I, J, D], contiguous
  Operand dlogits_sample;       // [B, I, J], if the logits are [B, I, J]
  Global<double> dlogits;       // [clusters, I, J], if the logits are [I, J]
};

// V, ds and the normalisers of the iterations that have gradients, in shared memory. V of iteration t is what it scored
// with; t counts from 0.
struct Terms {
  const Inputs& in;
  int first, J, quads;
  Shared<Quad> V, ds;
  Shared<float> norm;

  CAPSFAST_DEVICE Terms(const VotesBackwardArgs& a, const VotesMemory& memory)
      : in(a.in),
        first(a.first),
        J(static_cast<int>(a.in.J)),
        quads(static_cast<int>(a.in.J * a.in.D) / VotesSize::few),
        V(gpu::shared<Quad>(memory.V, count(a) * quads)),
        ds(gpu::shared<Quad>(memory.ds, count(a) * quads)),
        norm(gpu::shared<float>(memory.norm, a.in.softmax_in ? 3 * count(a) * J : 0)) {}

  CAPSFAST_DEVICE int at(int t) const { return t - first; }
  template <class Traits>
  CAPSFAST_DEVICE typename Traits::Elements V_of(const ThreadCoord<Traits>& thread, int t) const {
    return read_vector(thread, in, V, at(t) * J);
  }
  template <class Traits>
  CAPSFAST_DEVICE typename Traits::Elements ds_of(const ThreadCoord<Traits>& thread, int t) const {
    return read_vector(thread, in, ds, at(t) * J);
  }
  // For the softmax over the input capsules, else nothing.
  template <class Traits>
  CAPSFAST_DEVICE Column column_of(const ThreadCoord<Traits>& thread, int t) const {
    if constexpr (!Traits::in) return {};
    const int n = 3 * (at(t) * J + thread.j);
    return {norm[n], norm[n + 1], norm[n + 2]};
  }
  CAPSFAST_DEVICE void set_column(int t, int j, const Column& column) const {
    const int n = 3 * (at(t) * J + j);
    norm[n] = column.max;
    norm[n + 1] = column.scale;
    norm[n + 2] = column.mean;
  }

 private:
  static CAPSFAST_DEVICE int count(const VotesBackwardArgs& a) { return a.iterations - a.first; }
};

// What the gradient pass has to compute.
struct GradientPass {
  const VotesBackwardArgs& a;
  const Terms& terms;
  Global<double> dlogits;  // [I, J], this block's own sum, or absent
  bool fresh;              // dlogits is not written yet

  CAPSFAST_DEVICE bool wants_logits() const { return a.dlogits_sample.data || a.dlogits; }
  // Whether dvotes have the term db V(t): not in the first iteration, where V(0) = 0, and not with gradient="last".
  CAPSFAST_DEVICE bool with_db(int t) const { return t > 0 && !a.gradient_last; }
  CAPSFAST_DEVICE Operand dcoupling(int t) const { return t + 1 == a.iterations ? a.dcoupling : Operand{}; }
};

// Gradients of kCount votes and of their logits, summed over the iterations so far.
template <int kElements, int kCount>
struct Gradients {
  Vector<kElements> votes[kCount];
  float logits[kCount];
};

// Adds the terms of iteration t.
template <class Traits, int kCount>
CAPSFAST_DEVICE void add_iteration_gradients(const ThreadCoord<Traits>& at, const GradientPass& pass, int t,
                                             const float (&c)[kCount], const float (&db)[kCount],
                                             Gradients<Traits::elements, kCount>* to) {
  const typename Traits::Elements ds = pass.terms.ds_of(at, t);
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    add(c[n], ds, &to->votes[n]);
    to->logits[n] += db[n];
  }
  if (!pass.with_db(t)) return;
  const typename Traits::Elements V = pass.terms.V_of(at, t);
#pragma unroll
  for (int n = 0; n < kCount; ++n) add(db[n], V, &to->votes[n]);
}

// b = votes . V(t) and dc = votes . ds(t), or 0 if they are not needed.
template <class Traits, int kCount>
CAPSFAST_DEVICE void score_iteration(const ThreadCoord<Traits>& at, const typename Traits::Elements (&votes)[kCount],
                                     const GradientPass& pass, int t, float (&b)[kCount], float (&dc)[kCount]) {
#pragma unroll
  for (int n = 0; n < kCount; ++n) b[n] = dc[n] = 0.0f;
  if (t > 0) dots(at, votes, pass.terms.V_of(at, t), b);
  if (pass.with_db(t) || pass.wants_logits()) dots(at, votes, pass.terms.ds_of(at, t), dc);
}

template <class Traits, int kCount>
CAPSFAST_DEVICE void write_gradients(const Inputs& in, const ThreadCoord<Traits>& at, const Part& part,
                                     const Chunk& chunk, const GradientPass& pass,
                                     const Gradients<Traits::elements, kCount>& gradients) {
  if (pass.a.dvotes.data) write_votes(pass.a.dvotes, at, part, chunk, gradients.votes);
  if (!at.leads()) return;
  const Operand& sample = pass.a.dlogits_sample;
  if (sample.data)
    for_each_vote<kCount>(sample, at, part, chunk.first, chunk.inside, [&](int n, int64_t m) {
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

template <class Traits>
CAPSFAST_DEVICE void gradient_pass(const Inputs& in, const ThreadCoord<Traits>& at, const Part& part,
                                   SharedVotes<Traits>& from, const GradientPass& pass, const VotesScores& scores) {
  constexpr int kCount = Traits::backward;
  const int J = static_cast<int>(in.J), size = scores.slots * J, together = pass.a.plan.together;
  for_each_chunk<kCount>(in, at, part, from, [&](const Chunk& chunk, const auto& votes) {
    Gradients<Traits::elements, kCount> gradients = {};
    float b[kCount], dc[kCount];
    for (int t = pass.a.first; t < pass.a.iterations; t += together) {
      if constexpr (Traits::exchange != Exchange::block) {
        score_iteration(at, votes, pass, t, b, dc);
        softmax<Traits, true>(in, at, part, chunk, pass.dcoupling(t), pass.terms.column_of(at, t), scores, b, dc);
        add_iteration_gradients(at, pass, t, b, dc, &gradients);
      } else {
        const int left = pass.a.iterations - t, terms = left < together ? left : together;
        gpu::warp_barrier();
        for (int term = 0; term < terms; ++term) {
          score_iteration(at, votes, pass, t + term, b, dc);
          exclude_invalid(chunk, b);
          store_scores(at, J, part, chunk, term * size, b, in.logits, scores.b);
          store_scores(at, J, part, chunk, term * size, dc, pass.dcoupling(t + term), scores.dc);
        }
        gpu::barrier();
        softmax_block<true>(in, part, chunk.first, terms, scores);
        gpu::barrier();
        for (int term = 0; term < terms; ++term) {
          load_scores(at, J, chunk, term * size, scores.b, b);
          load_scores(at, J, chunk, term * size, scores.dc, dc);
          add_iteration_gradients(at, pass, t + term, b, dc, &gradients);
        }
      }
    }
    write_gradients(in, at, part, chunk, pass, gradients);
  });
}

}  // namespace capsfast::cuda
