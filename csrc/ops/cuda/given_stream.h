// The streaming passes, for samples that no cluster can hold: each pass reads the votes from device memory. A block has
// a split of the input capsules. The steps between the passes are those of between.h.
#pragma once

#include "given_last.h"
#include "given_outputs.h"
#include "given_votes.h"
#include "reduce.h"

namespace capsfast::cuda {

// The plan of a streaming kernel, as the kernel gets it.
struct Stream {
  GivenShape shape;
  GivenMemory memory;
  Access access;
  int capsules;  // input capsules of a block
  int together;  // iterations of the last pass whose softmaxes share barriers
};

// Calls f(part, first) for the samples of this block, one after the other. part: this block's input capsules of the
// sample. first: it is the block's first sample.
template <class F>
CAPSFAST_DEVICE void each_row(const Inputs& in, const Stream& stream, const F& f) {
  for (int64_t b = gpu::block_y(); b < in.B; b += gpu::blocks_y()) {
    f(Part(in, b, gpu::block_x(), stream.capsules), b < gpu::blocks_y());
  }
}

// This thread's components of `from` [.., J, D] at index n; 0 if `from` is absent or the thread has no place.
template <class Tr>
CAPSFAST_DEVICE typename Tr::Numbers vector_of(const Inputs& in, const Spot<Tr>& at, const Global<const float>& from,
                                               int64_t n) {
  typename Tr::Numbers to = {};
  if (!from || !at.mine) return to;
  const int64_t start = (n * in.J + at.j) * in.D;
#pragma unroll
  for (int k = 0; k < Tr::Numbers::fours; ++k) to.set_four(k, from.vector<Four>(start + GivenSize::few * at.four(k)));
  return to;
}

// The normaliser of output capsule j at index n of [.., J].
CAPSFAST_DEVICE Column column_of(const Inputs& in, int j, const Normaliser<float>& norm, int64_t n) {
  const int64_t row = n * in.J + j;
  return {norm.max[row], norm.scale[row], norm.mean ? norm.mean[row] : 0.0f};
}

struct GivenReduceArgs {
  ReduceArgs<float> pass;  // sum_tile is absent if only the coupling is wanted
  Stream stream;
};

CAPSFAST_DEVICE void write_sum(const GivenReduceArgs& a, const Output& at, int64_t b, const FourSum& sum) {
  if (!at.mine) return;
  const int64_t row = gpu::block_x() * a.pass.in.B + b;
  a.pass.sum_tile.as<Four>()[four_at(at, row)] = sum.value.four(0);
  if (!a.pass.max || at.lane != 0) return;  // max is absent in an unweighted pass
  a.pass.max[row * a.pass.in.J + at.j] = sum.max;
  a.pass.total[row * a.pass.in.J + at.j] = static_cast<double>(sum.total);
}

template <class Tr>
CAPSFAST_KERNEL(Tr::forward_threads, 1)
given_forward_kernel(GivenReduceArgs a) {
  const Inputs& in = a.pass.in;
  const Stream& stream = a.stream;
  const Spot<Tr> at(stream.shape, in);
  const Output output(stream.shape, in);
  const GivenScores scores(in, stream.shape, at, stream.memory, 1, false);
  each_row(in, stream, [&](const Part& part, bool) {
    MemoryVotes<Tr> votes(in, at, part, stream.access);
    ForwardPass<Tr> pass{};
    pass.unweighted = a.pass.unweighted;
    pass.follow = static_cast<bool>(a.pass.max);
    pass.with_V = static_cast<bool>(a.pass.scoring.V);
    pass.V = vector_of(in, at, a.pass.scoring.V, part.b);
    if (Tr::in && a.pass.norm.max) pass.column = column_of(in, at.j, a.pass.norm, part.b);
    pass.coupling = a.pass.coupling;
    const Sum<Tr::numbers> mine = forward_pass(in, at, part, votes, pass, scores);
    if (!a.pass.sum_tile) return;
    write_sum(
        a, output, part.b, join_rows<Tr::in>(in, at, output, stream.memory, in.leaky && gpu::block_x() == 0, mine));
    gpu::barrier();
  });
}

template <class Tr>
CAPSFAST_KERNEL(Tr::backward_threads, 1)
given_backward_kernel(GivenReduceArgs a) {
  const Inputs& in = a.pass.in;
  const Stream& stream = a.stream;
  const Spot<Tr> at(stream.shape, in);
  const Output output(stream.shape, in);
  const GivenScores scores(in, stream.shape, at, stream.memory, 1, true);
  each_row(in, stream, [&](const Part& part, bool) {
    MemoryVotes<Tr> votes(in, at, part, stream.access);
    const Scoring<float>& with = a.pass.scoring;
    Column column{};
    if (Tr::in) column = column_of(in, at.j, a.pass.norm, part.b);
    const Sum<Tr::numbers> mine = backward_pass(in, at, part, votes, vector_of(in, at, with.V, part.b),
                                                vector_of(in, at, with.ds, part.b), with.dcoupling, column, scores);
    write_sum(a, output, part.b, join_rows<false>(in, at, output, stream.memory, false, mine));
    gpu::barrier();
  });
}

struct GivenFinalArgs {
  FinalArgs<float> last;  // dlogits [blocks_y, I, J]
  Stream stream;
};

// The Source of the streaming last pass.
template <class Tr>
struct MemorySource : MemoryVotes<Tr> {
  CAPSFAST_DEVICE MemorySource(const GivenFinalArgs& with, const Spot<Tr>& spot, const Part& part)
      : MemoryVotes<Tr>(with.last.in, spot, part, with.stream.access), a(with.last), at(spot), b(part.b) {}
  CAPSFAST_DEVICE typename Tr::Numbers V(int64_t t) const { return vector_of(a.in, at, a.V, t * a.in.B + b); }
  CAPSFAST_DEVICE typename Tr::Numbers ds(int64_t t) const { return vector_of(a.in, at, a.ds, t * a.in.B + b); }
  CAPSFAST_DEVICE Column column(int64_t t) const {
    return Tr::in ? column_of(a.in, at.j, a.norm, t * a.in.B + b) : Column{};
  }

  const FinalArgs<float>& a;
  const Spot<Tr>& at;
  int64_t b;
};

template <class Tr>
CAPSFAST_KERNEL(Tr::backward_threads, 1)
given_final_kernel(GivenFinalArgs a) {
  const Inputs& in = a.last.in;
  const Stream& stream = a.stream;
  const Spot<Tr> at(stream.shape, in);
  const GivenScores scores(in, stream.shape, at, stream.memory, stream.together, true);
  each_row(in, stream, [&](const Part& part, bool fresh) {
    MemorySource<Tr> source(a, at, part);
    Global<double> dlogits;
    if (a.last.dlogits) dlogits = a.last.dlogits.from(gpu::block_y() * in.I * in.J, in.I * in.J);
    last_pass(in, at, part, source, {a.last, stream.together, dlogits, fresh}, scores);
  });
}

}  // namespace capsfast::cuda
