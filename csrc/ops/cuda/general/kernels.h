// The general kernels (any J, D and K, every option, every type): how their work is cut, and how they are launched.
#pragma once

#include <algorithm>

#include "accumulate.h"
#include "gradient.h"

namespace capsfast::cuda {

struct GeneralPlan {
  int64_t tiles;            // parts of the samples, in the accumulating passes
  int64_t splits;           // parts of the input capsules, in the accumulating passes
  int64_t out_tiles;        // parts of the output capsules and of their components, in the accumulating passes
  int64_t input_tiles;      // parts of the input capsules, in the sweep
  int64_t gradient_blocks;  // parts of the input capsules, in the gradient pass
  int64_t gradient_splits;  // parts of the samples, in the gradient pass
  // Whether the softmax over the output capsules needs a sweep (row_norm_kernel), because a tile does not hold all of
  // them.
  bool row_norm_apart;
};

template <class T>
GeneralPlan plan_general(const Problem& p, int64_t multiprocessors) {
  const TileShape<T> shape = TileShape<T>::of(p.J, p.D);
  // More splits would only give more partial sums.
  const int64_t wanted = kAccumulateBlocks * multiprocessors;
  GeneralPlan plan;
  plan.tiles = divide_up(p.B, kSamples);
  plan.out_tiles = std::max<int64_t>(1, divide_up(p.J, shape.outputs)) * shape.pieces;
  plan.row_norm_apart = !p.softmax_in() && shape.outputs < p.J;
  plan.input_tiles = divide_up(p.I, shape.inputs);
  const int64_t others = std::max<int64_t>(1, plan.tiles * plan.out_tiles);
  plan.splits =
      std::clamp<int64_t>(divide_up(wanted, others), std::min<int64_t>(1, plan.input_tiles), plan.input_tiles);
  // With a shared weight every block has a sum of dweight, so there are only as many blocks as the device needs.
  plan.gradient_blocks = p.shared_weight ? std::min(plan.input_tiles, wanted) : plan.input_tiles;
  plan.gradient_splits =
      std::clamp<int64_t>(wanted / std::max<int64_t>(1, plan.gradient_blocks), 1, std::max<int64_t>(1, plan.tiles));
  return plan;
}

template <class T>
struct GeneralKernels {
  gpu::Kernel<AccumulateArgs<T>> accumulate;
  gpu::Kernel<RowNormArgs<T>> row_norm;
  gpu::Kernel<GradientArgs<T>> gradient;
  // Bytes of shared memory. row_norm takes as much as accumulate; a softmax over the input capsules takes
  // bytes_to_follow more.
  int accumulate_bytes, bytes_to_follow, gradient_bytes;
};

// The kernels for inputs of type E. kVotes: votes are given. Each type has a file in ../instantiations, so that types
// compile in parallel.
template <class T, class E, bool kVotes>
constexpr GeneralKernels<T> kGeneral = {
    accumulate_kernel<T, E, kVotes>,
    row_norm_kernel<T, E, kVotes>,
    gradient_kernel<T, E, kVotes>,
    Accumulation<T, E, kVotes>::bytes,
    Accumulation<T, E, kVotes>::bytes_to_follow,
    Gradient<T, E, kVotes>::bytes};

template <class E>
const GeneralKernels<Wide<E>>& general_kernels(bool votes) {
  return votes ? kGeneral<Wide<E>, E, true> : kGeneral<Wide<E>, E, false>;
}

extern template const GeneralKernels<float>& general_kernels<float>(bool);
extern template const GeneralKernels<double>& general_kernels<double>(bool);
extern template const GeneralKernels<float>& general_kernels<BFloat16>(bool);
extern template const GeneralKernels<float>& general_kernels<Float16>(bool);

}  // namespace capsfast::cuda
