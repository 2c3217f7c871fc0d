// The resident forward: a cluster keeps the votes of a sample in its shared memory and runs all iterations on them. So
// they are read from device memory once.
//
// A block has a part of the input capsules. After each pass every block reads the partial sums of all blocks of the
// cluster, adds them in the order of their ranks, and squashes the result itself. So an iteration takes one barrier of
// the cluster.
#pragma once

#include "given_outputs.h"

namespace capsfast::cuda {

struct GivenResidentArgs {
  Inputs in;
  Squashing squash;
  ResidentPlan resident;
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
CAPSFAST_DEVICE void each_sample(const Inputs& in, const ResidentPlan& resident, const F& f) {
  const int rank = gpu::cluster_rank(), size = gpu::cluster_size();
  for (int before = 0;; ++before) {
    const int64_t b = (gpu::block_x() + before * gpu::blocks_x()) / size;
    if (b >= in.B) return;
    if (before > 0) gpu::barrier();  // no thread still reads the votes of the sample before
    f(Part(in, b, rank, resident.capsules), before);
  }
}

// Writes s, the normaliser of iteration t and, in the last one, v.
template <class E>
CAPSFAST_DEVICE void write_outputs(const GivenResidentArgs& a, const Output& at, int64_t b, int t, const FourVector& s,
                                   const FourVector& v, const Column& column) {
  const Inputs& in = a.in;
  if (!at.mine || gpu::cluster_rank() != 0) return;
  a.s.as<Four>()[four_at(at, t * in.B + b)] = s.four(0);
  if (t + 1 == a.iterations) {
    Run<E, GivenSize::few> to;
#pragma unroll
    for (int n = 0; n < GivenSize::few; ++n) narrow(v.value[n], &to.value[n]);
    a.v.data.as<Run<E, GivenSize::few>>()[four_at(at, b)] = to;
  }
  if (!in.softmax_in || at.lane != 0) return;
  const int64_t row = (t * in.B + b) * in.J + at.j;
  a.norm[row] = column.max;
  a.norm[row + a.iterations * in.B * in.J] = column.scale;
}

template <class Tr>
CAPSFAST_KERNEL(Tr::forward_threads, 1)
given_resident_kernel(GivenResidentArgs a) {
  const Inputs& in = a.in;
  const ResidentPlan& resident = a.resident;
  const Spot<Tr> at(resident.shape, in);
  const GivenScores scores(in, resident.shape, at, resident.memory, 1, false);
  const Shared<Four> all_V = gpu::shared<Four>(resident.memory.V, static_cast<int>(in.J * in.D) / GivenSize::few);
  const Shared<float> norm = gpu::shared<float>(resident.memory.norm, Tr::in ? 2 * static_cast<int>(in.J) : 0);
  // With the softmax over the input capsules the coupling takes one more pass (`closing`), because the normaliser is
  // known only after the last iteration.
  const int passes = a.iterations + (Tr::in && a.coupling.data ? 1 : 0);
  each_sample(in, resident, [&](const Part& part, int before) {
    SharedVotes<Tr> votes(in, at, part, resident, before);
    for (int t = 0; t < passes; ++t) {
      const bool closing = t == a.iterations, last = t + 1 >= a.iterations;
      ForwardPass<Tr> pass{};
      pass.with_V = (closing ? t - 1 : t) > 0;
      if (pass.with_V) pass.V = read_vector(at, in, all_V, 0);
      if (Tr::in ? closing : last) pass.coupling = a.coupling;
      pass.follow = !closing;
      pass.unweighted = t == 0 && !in.logits.data &&
                        !(Tr::in ? static_cast<bool>(in.mask.data) : static_cast<bool>(pass.coupling.data));
      if (Tr::in && closing) pass.column = {norm[2 * at.j], norm[2 * at.j + 1], 0.0f};
      const Sum<Tr::numbers> mine = forward_pass(in, at, part, votes, pass, scores);
      if (closing) break;
      const Output output(resident.shape, in);
      const FourSum sum = join_cluster<Tr::in>(in, at, output, resident.memory, t % 2, mine);
      if (last) gpu::cluster_barrier();

      const bool valid = output.mine && in.out_mask.at(part.b, output.j);
      Column column{sum.max, 1.0f, 0.0f};
      if (Tr::in) {
        column.scale = inverse(sum.total);
      } else if (pass.unweighted && output.mine) {
        column.scale = uniform<float>(in, part.b, valid);
      }
      const FourVector s = scaled(column.scale, sum.value), v = squashed(a.squash, output, valid, s);
      write_outputs<typename Tr::Type>(a, output, part.b, t, s, v, column);
      if (output.mine && !last) {
        FourVector V = {};
        if (t > 0) V.set_four(0, all_V.vector<Four>(output.four));
        add(1.0f, v, &V);
        all_V[output.four] = V.four(0);
      }
      if (Tr::in && last && output.mine && output.lane == 0) {
        norm[2 * output.j] = column.max;
        norm[2 * output.j + 1] = column.scale;
      }
      gpu::barrier();
    }
  });
}

}  // namespace capsfast::cuda
