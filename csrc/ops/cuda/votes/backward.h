// The backward: a cluster keeps the votes of a sample in its shared memory, so that they are read from device memory
// once. It restores V, runs the passes from the last iteration to the second, and then the gradient pass, which writes
// dvotes.
#pragma once

#include "forward.h"
#include "gradient.h"

namespace capsfast::cuda {

// This thread's components of the saved s_t.
CAPSFAST_DEVICE QuadVector read_s(const VotesBackwardArgs& a, const OutputCoord& at, int64_t b, int t) {
  QuadVector s = {};
  if (at.mine) s.set_quad(0, a.s.vector<Quad>(VotesSize::few * quad_index(at, t * a.in.B + b)));
  return s;
}

// Computes V of the iterations that have gradients from the saved s.
CAPSFAST_DEVICE void restore_V(const VotesBackwardArgs& a, const OutputCoord& at, int64_t b, bool valid,
                               const Terms& terms) {
  QuadVector V = {};
  for (int t = 0; t < a.iterations; ++t) {
    if (at.mine && t >= a.first) terms.V[terms.at(t) * terms.quads + at.quad] = V.quad(0);
    if (t + 1 < a.iterations) add(1.0f, squash_output(a.squash, at, valid, read_s(a, at, b, t)), &V);
  }
}

// sum_i c dcoupling over this block's input capsules. A Sum has room for vectors only, so it is component 0 of one.
template <class Traits>
CAPSFAST_DEVICE Sum<Traits::elements> coupling_agreement(const VotesBackwardArgs& a, const ThreadCoord<Traits>& at,
                                                         const Part& part) {
  Sum<Traits::elements> sum;
  const int64_t *c = a.coupling.stride, *dc = a.dcoupling.stride;
  for (int capsule = at.row; capsule < part.count && at.leads(); capsule += at.rows) {
    const int64_t i = part.begin + capsule;
    const float here = a.coupling.read<float>(part.b * c[0] + i * c[1] + at.j * c[2]) *
                       a.dcoupling.read<float>(part.b * dc[0] + i * dc[1] + at.j * dc[2]);
    // Component 0 is not always the first of this thread's (ThreadCoord::quad).
#pragma unroll
    for (int n = 0; n < Traits::Elements::quads; ++n)
      sum.value.value[VotesSize::few * n] += at.quad(n) == 0 ? here : 0.0f;
  }
  return sum;
}

// Computes ds_t from g, the gradient of v_t, and the normaliser of iteration t. Other threads can read them after a
// barrier. agreement: what dcoupling adds to sum_i c dc.
CAPSFAST_DEVICE void differentiate(const VotesBackwardArgs& a, const OutputCoord& at, int64_t b, bool valid,
                                   const Terms& terms, int t, const QuadVector& g, float agreement) {
  const Inputs& in = a.in;
  const QuadVector s = read_s(a, at, b, t), ds = squash_gradient(a.squash.of(t + 1 == a.iterations), at, valid, s, g);
  const float mean = in.softmax_in ? lane_sum(product(ds, s) + agreement, at.lanes) : 0.0f;
  if (!at.mine) return;
  terms.ds[terms.at(t) * terms.quads + at.quad] = ds.quad(0);
  if (in.softmax_in && at.lane == 0) {
    const int64_t row = (t * in.B + b) * in.J + at.j;
    terms.set_column(t, at.j, {a.norm[row], a.norm[row + a.iterations * in.B * in.J], mean});
  }
  if (a.ds && gpu::cluster_rank() == 0) a.ds.as<Quad>()[quad_index(at, t * in.B + b)] = ds.quad(0);
}

template <class Traits>
CAPSFAST_KERNEL(Traits::backward_threads, 1)
votes_backward_kernel(VotesBackwardArgs a) {
  const Inputs& in = a.in;
  const VotesPlan& plan = a.plan;
  const ThreadCoord<Traits> at(plan.shape, in);
  const VotesScores scores(in, plan.shape, at, plan.memory, plan.together, true);
  const Terms terms(a, plan.memory);
  for_each_sample(in, plan, [&](const Part& part, int before) {
    SharedVotes<Traits> votes(in, at, part, plan, before);
    const OutputCoord output(plan.shape, in);
    const bool valid = output.mine && in.out_mask.at(part.b, output.j);
    int joined = 0;
    restore_V(a, output, part.b, valid, terms);
    float agreement = 0.0f;
    if (Traits::in && a.dcoupling.data)
      agreement = join_cluster<false>(in, at, output, plan.memory, joined++ % 2, coupling_agreement(a, at, part))
                      .value.value[0];
    QuadVector g = {};
    for (int n = 0; n < VotesSize::few; ++n) {
      const int64_t* stride = a.dv.stride;
      if (output.mine)
        g.value[n] = a.dv.read<float>(
            part.b * stride[0] + output.j * stride[1] + (VotesSize::few * output.lane + n) * stride[2]);
    }
    for (int t = a.iterations - 1;; --t) {
      const bool last = t + 1 == a.iterations;
      differentiate(a, output, part.b, valid, terms, t, g, last ? agreement : 0.0f);
      if (t == a.first) break;
      gpu::barrier();
      const Operand dcoupling = last ? a.dcoupling : Operand{};
      const Sum<Traits::elements> mine = backward_pass(
          in, at, part, votes, terms.V_of(at, t), terms.ds_of(at, t), dcoupling, terms.column_of(at, t), scores);
      // v is part of V of all later iterations, so g is the sum over the passes of all of them.
      if (last) g = {};
      add(1.0f, join_cluster<false>(in, at, output, plan.memory, joined++ % 2, mine).value, &g);
    }
    gpu::cluster_barrier();
    Global<double> dlogits;
    if (a.dlogits) dlogits = a.dlogits.from(gpu::block_x() / gpu::cluster_size() * in.I * in.J, in.I * in.J);
    const GradientPass last{a, terms, dlogits, before == 0};
    if (a.dvotes.data || last.wants_logits()) gradient_pass(in, at, part, votes, last, scores);
  });
}

}  // namespace capsfast::cuda
