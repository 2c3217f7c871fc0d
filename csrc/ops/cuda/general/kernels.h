// The general kernels (any J, D and K, every option, every type): how their work is cut, and how they are launched.
#pragma once

#include <algorithm>

#include "accumulate.h"
#include "gradient.h"

namespace capsfast::cuda {

struct GeneralPlan {
  int64_t tiles;            // parts of the samples, in the accumulating passes
  int64_t splits;           // parts of the input capsules, in the accumulating passes
  int64_t out_tiles;        // parts of the output capsules, in the accumulating passes
  int64_t gradient_blocks;  // parts of the input capsules, in the gradient pass
  int64_t gradient_splits;  // parts of the samples, in the gradient pass
  // Whether the softmax over the output capsules needs a sweep (row_norm_kernel), because a tile does not hold all of
  // them.
  bool row_norm_apart;           // in the accumulating passes of forward and backward
  bool gradient_row_norm_apart;  // in the gradient pass
};

// This many blocks hide latencies. More splits would only give more partial sums.
constexpr int64_t kBlocksPerMultiprocessor = 4;

template <class T>
GeneralPlan plan_general(const Problem& p, int64_t multiprocessors) {
  using Accumulate = AccumulateTile<T>;
  using Gradient = GradientTile<T>;
  const int64_t wanted = kBlocksPerMultiprocessor * multiprocessors;
  GeneralPlan plan;
  plan.tiles = divide_up(p.B, kSamples);
  plan.out_tiles = std::max<int64_t>(1, divide_up(p.J, Accumulate::outputs));
  plan.row_norm_apart = !p.softmax_in() && plan.out_tiles > 1;
  const int64_t chunks = divide_up(p.I, Accumulate::inputs), others = std::max<int64_t>(1, plan.tiles * plan.out_tiles);
  plan.splits = std::clamp<int64_t>(divide_up(wanted, others), std::min<int64_t>(1, chunks), chunks);

  plan.gradient_row_norm_apart = !p.softmax_in() && Gradient::outputs_for(p.J, p.D) < p.J;
  const int64_t gradient_chunks = divide_up(p.I, Gradient::inputs);
  // With a shared weight every block has a sum of dweight, so there are only as many blocks as the device needs.
  plan.gradient_blocks = p.shared_weight ? std::min(gradient_chunks, wanted) : gradient_chunks;
  plan.gradient_splits = std::clamp<int64_t>(
      wanted / std::max<int64_t>(1, plan.gradient_blocks), 1, std::max<int64_t>(1, divide_up(p.B, kSamples)));
  return plan;
}

template <class T>
struct GeneralKernels {
  gpu::Kernel<AccumulateArgs<T>> accumulate;
  gpu::Kernel<RowNormArgs<T>> row_norm;
  gpu::Kernel<GradientArgs<T>> gradient;
  int accumulate_bytes, gradient_bytes;  // of shared memory; row_norm takes as much as accumulate
};

// The kernels for inputs of type E. kVotes: votes are given. Each type has a file in ../instantiations, so that types
// compile in parallel.
template <class T, class E, bool kVotes>
constexpr GeneralKernels<T> kGeneral = {
    accumulate_kernel<T, E, kVotes>, row_norm_kernel<T, E, kVotes>, gradient_kernel<T, E, kVotes>,
    Accumulation<T, E, kVotes>::bytes, Gradient<T, E, kVotes>::bytes};

template <class E>
const GeneralKernels<Wide<E>>& general_kernels(bool votes) {
  return votes ? kGeneral<Wide<E>, E, true> : kGeneral<Wide<E>, E, false>;
}

extern template const GeneralKernels<float>& general_kernels<float>(bool);
extern template const GeneralKernels<double>& general_kernels<double>(bool);
extern template const GeneralKernels<float>& general_kernels<BFloat16>(bool);
extern template const GeneralKernels<float>& general_kernels<Float16>(bool);

}  // namespace capsfast::cuda
