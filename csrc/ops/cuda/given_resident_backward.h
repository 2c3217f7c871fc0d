// The resident backward: a cluster keeps the votes of a sample in its shared memory, so that they are read from device
// memory once. It restores V, runs the passes from the last iteration to the second, and then the last pass, which
// writes dvotes.
#pragma once

#include "given_last.h"
#include "given_resident.h"

namespace capsfast::cuda {

// This thread's components of the saved s_t.
CAPSFAST_DEVICE FourVector saved(const GivenResidentBackwardArgs& a, const Output& at, int64_t b, int t) {
  FourVector s = {};
  if (at.mine) s.set_four(0, a.s.vector<Four>(GivenSize::few * four_at(at, t * a.in.B + b)));
  return s;
}

// Computes V of the iterations that have gradients from the saved s.
CAPSFAST_DEVICE void restore(const GivenResidentBackwardArgs& a, const Output& at, int64_t b, bool valid,
                             const Terms& terms) {
  FourVector V = {};
  for (int t = 0; t < a.iterations; ++t) {
    if (at.mine && t >= a.first) terms.V[terms.at(t) * terms.fours + at.four] = V.four(0);
    if (t + 1 < a.iterations) add(1.0f, squashed(a.squash, at, valid, saved(a, at, b, t)), &V);
  }
}

// sum_i c dcoupling over this block's input capsules. A Sum has room for vectors only, so it is component 0 of one.
template <class Tr>
CAPSFAST_DEVICE Sum<Tr::numbers> agreement_given(const GivenResidentBackwardArgs& a, const Spot<Tr>& at,
                                                 const Part& part) {
  Sum<Tr::numbers> sum;
  const int64_t *c = a.coupling.stride, *dc = a.dcoupling.stride;
  for (int capsule = at.row; capsule < part.count && at.leads(); capsule += at.rows) {
    const int64_t i = part.begin + capsule;
    const float here = a.coupling.read<float>(part.b * c[0] + i * c[1] + at.j * c[2]) *
                       a.dcoupling.read<float>(part.b * dc[0] + i * dc[1] + at.j * dc[2]);
    // Component 0 is not always the first of this thread's (Spot::four).
#pragma unroll
    for (int n = 0; n < Tr::Numbers::fours; ++n) sum.value.value[GivenSize::few * n] += at.four(n) == 0 ? here : 0.0f;
  }
  return sum;
}

// Computes ds_t from g, the gradient of v_t, and the normaliser of iteration t. Other threads can read them after a
// barrier. given: what dcoupling adds to sum_i c dc.
CAPSFAST_DEVICE void differentiate(const GivenResidentBackwardArgs& a, const Output& at, int64_t b, bool valid,
                                   const Terms& terms, int t, const FourVector& g, float given) {
  const Inputs& in = a.in;
  const FourVector s = saved(a, at, b, t), ds = differentiated(a.squash, at, valid, s, g);
  const float mean = in.softmax_in ? lane_sum(product(ds, s) + given, at.lanes) : 0.0f;
  if (!at.mine) return;
  terms.ds[terms.at(t) * terms.fours + at.four] = ds.four(0);
  if (in.softmax_in && at.lane == 0) {
    const int64_t row = (t * in.B + b) * in.J + at.j;
    terms.set_column(t, at.j, {a.norm[row], a.norm[row + a.iterations * in.B * in.J], mean});
  }
  if (a.ds && gpu::cluster_rank() == 0) a.ds.as<Four>()[four_at(at, t * in.B + b)] = ds.four(0);
}

template <class Tr>
CAPSFAST_KERNEL(Tr::backward_threads, 1)
given_resident_backward_kernel(GivenResidentBackwardArgs a) {
  const Inputs& in = a.in;
  const ResidentPlan& resident = a.resident;
  const Spot<Tr> at(resident.shape, in);
  const GivenScores scores(in, resident.shape, at, resident.memory, resident.together, true);
  const Terms terms(a, resident.memory);
  each_sample(in, resident, [&](const Part& part, int before) {
    SharedVotes<Tr> votes(in, at, part, resident, before);
    const Output output(resident.shape, in);
    const bool valid = output.mine && in.out_mask.at(part.b, output.j);
    int joined = 0;
    restore(a, output, part.b, valid, terms);
    float given = 0.0f;
    if (Tr::in && a.dcoupling.data)
      given = join_cluster<false>(in, at, output, resident.memory, joined++ % 2, agreement_given(a, at, part))
                  .value.value[0];
    FourVector g = {};
    for (int n = 0; n < GivenSize::few; ++n) {
      const int64_t* stride = a.dv.stride;
      if (output.mine)
        g.value[n] = a.dv.read<float>(
            part.b * stride[0] + output.j * stride[1] + (GivenSize::few * output.lane + n) * stride[2]);
    }
    for (int t = a.iterations - 1;; --t) {
      const bool last = t + 1 == a.iterations;
      differentiate(a, output, part.b, valid, terms, t, g, last ? given : 0.0f);
      if (t == a.first) break;
      gpu::barrier();
      const Operand dcoupling = last ? a.dcoupling : Operand{};
      const Sum<Tr::numbers> mine = backward_pass(
          in, at, part, votes, terms.V_of(at, t), terms.ds_of(at, t), dcoupling, terms.column_of(at, t), scores);
      // v is part of V of all later iterations, so g is the sum over the passes of all of them.
      if (last) g = {};
      add(1.0f, join_cluster<false>(in, at, output, resident.memory, joined++ % 2, mine).value, &g);
    }
    gpu::cluster_barrier();
    Global<double> dlogits;
    if (a.dlogits) dlogits = a.dlogits.from(gpu::block_x() / gpu::cluster_size() * in.I * in.J, in.I * in.J);
    const LastPass last{a, terms, dlogits, before == 0};
    if (a.dvotes.data || last.wants_logits()) last_pass(in, at, part, votes, last, scores);
  });
}

}  // namespace capsfast::cuda
