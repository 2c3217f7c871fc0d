// The forward: a cluster keeps the votes of a sample in its shared memory and runs all iterations on them. So they
// are read from device memory once.
//
// A block has a part of the input capsules. After each pass every block reads the partial sums of all blocks of the
// cluster, adds them in the order of their ranks, and squashes the result itself. So an iteration takes one barrier of
// the cluster.
#pragma once

#include "join.h"

namespace capsfast::cuda {

struct VotesForwardArgs {
  Inputs in;
  Squashing squash;
  VotesPlan plan;
  int iterations;
  Operand v;           // [B, J, D], contiguous
  Operand coupling;    // [B, I, J], written
  Global<float> s;     // [r, B, J, D]
  Global<float> norm;  // [2, r, B, J], softmax over the input capsules
};

// Calls f(part, before) for the samples of a cluster, one after the other. part: this block's input capsules. before:
// how many samples came before. f must have a barrier of the cluster after its last join_cluster(): no block may leave
// or begin another sample while others still read its sums.
template <class F>
CAPSFAST_DEVICE void for_each_sample(const Inputs& in, const VotesPlan& plan, const F& f) {
  const int rank = gpu::cluster_rank(), size = gpu::cluster_size();
  for (int before = 0;; ++before) {
    const int64_t b = (gpu::block_x() + before * gpu::blocks_x()) / size;
    if (b >= in.B) return;
    if (before > 0) gpu::barrier();  // no thread still reads the votes of the sample before
    f(Part(in, b, rank, plan.capsules), before);
  }
}

// Writes s, the normaliser of iteration t and, in the last one, v.
template <class E>
CAPSFAST_DEVICE void write_outputs(const VotesForwardArgs& a, const OutputCoord& at, int64_t b, int t,
                                   const QuadVector& s, const QuadVector& v, const Column& column) {
  const Inputs& in = a.in;
  if (!at.mine || gpu::cluster_rank() != 0) return;
  a.s.as<Quad>()[quad_index(at, t * in.B + b)] = s.quad(0);
  if (t + 1 == a.iterations) {
    Run<E, VotesSize::few> to;
#pragma unroll
    for (int n = 0; n < VotesSize::few; ++n) narrow(v.value[n], &to.value[n]);
    a.v.data.as<Run<E, VotesSize::few>>()[quad_index(at, b)] = to;
  }
  if (!in.softmax_in || at.lane != 0) return;
  const int64_t row = (t * in.B + b) * in.J + at.j;
  a.norm[row] = column.max;
  a.norm[row + a.iterations * in.B * in.J] = column.scale;
}

template <class Traits>
CAPSFAST_KERNEL(Traits::forward_threads, 1)
votes_forward_kernel(VotesForwardArgs a) {
  const Inputs& in = a.in;
  const VotesPlan& plan = a.plan;
  const ThreadCoord<Traits> at(plan.shape, in);
  const VotesScores scores(in, plan.shape, at, plan.memory, 1, false);
  const Shared<Quad> all_V = gpu::shared<Quad>(plan.memory.V, static_cast<int>(in.J * in.D) / VotesSize::few);
  const Shared<float> norm = gpu::shared<float>(plan.memory.norm, Traits::in ? 2 * static_cast<int>(in.J) : 0);
  // With the softmax over the input capsules the coupling takes one more pass (`closing`), because the normaliser is
  // known only after the last iteration.
  const int passes = a.iterations + (Traits::in && a.coupling.data ? 1 : 0);
  for_each_sample(in, plan, [&](const Part& part, int before) {
    SharedVotes<Traits> votes(in, at, part, plan, before);
    for (int t = 0; t < passes; ++t) {
      const bool closing = t == a.iterations, last = t + 1 >= a.iterations;
      ForwardPass<Traits> pass{};
      pass.with_V = (closing ? t - 1 : t) > 0;
      if (pass.with_V) pass.V = read_vector(at, in, all_V, 0);
      if (Traits::in ? closing : last) pass.coupling = a.coupling;
      pass.follow = !closing;
      pass.unweighted = t == 0 && !in.logits.data &&
                        !(Traits::in ? static_cast<bool>(in.mask.data) : static_cast<bool>(pass.coupling.data));
      if (Traits::in && closing) pass.column = {norm[2 * at.j], norm[2 * at.j + 1], 0.0f};
      const Sum<Traits::elements> mine = forward_pass(in, at, part, votes, pass, scores);
      if (closing) break;
      const OutputCoord output(plan.shape, in);
      const QuadSum sum = join_cluster<Traits::in>(in, at, output, plan.memory, t % 2, mine);
      if (last) gpu::cluster_barrier();

      const bool valid = output.mine && in.out_mask.at(part.b, output.j);
      Column column{sum.max, 1.0f, 0.0f};
      if (Traits::in) {
        column.scale = inverse(sum.total);
      } else if (pass.unweighted && output.mine) {
        column.scale = uniform<float>(in, part.b, valid);
      }
      const QuadVector s = scaled(column.scale, sum.value), v = squash_output(a.squash.of(last), output, valid, s);
      write_outputs<typename Traits::Type>(a, output, part.b, t, s, v, column);
      if (output.mine && !last) {
        QuadVector V = {};
        if (t > 0) V.set_quad(0, all_V.vector<Quad>(output.quad));
        add(1.0f, v, &V);
        all_V[output.quad] = V.quad(0);
      }
      if (Traits::in && last && output.mine && output.lane == 0) {
        norm[2 * output.j] = column.max;
        norm[2 * output.j + 1] = column.scale;
      }
      gpu::barrier();
    }
  });
}

}  // namespace capsfast::cuda
