// The building blocks of the updates between the passes (steps.h, pass_steps.h), on arrays [.., B, J, D]: adding up
// partial sums, the squash. Half of a warp has one output capsule of a sample at a time. Also the kernels that add up
// gradients.
#pragma once

#include <type_traits>

#include "warp.h"

namespace capsfast::cuda {

// The squash of a sum plus a bias.
struct BiasedSquashing : Squashing {
  Operand bias;  // [J, D]

  template <class T>
  CAPSFAST_DEVICE T biased(T s, int64_t j, int64_t d) const {
    return bias.data ? s + bias.template read<T>(bias.at(j, d)) : s;
  }
};

// Output capsule j of sample b, row = b J + j, and this lane's share of the work of half a warp. The lane is number
// `lane` of `lanes` along the components, kWidth components at a time, and number `slice` of `slices` along the
// segments. Only the lanes of slice 0 get the sums over all segments and go on.
struct UpdateCoord {
  static constexpr int kWidth = 4;   // 16 bytes of float: one load
  static constexpr int kLanes = 16;  // of an output capsule
  int64_t b, j, row;
  int lane, lanes, slice, slices;

  CAPSFAST_DEVICE int number() const { return slice * lanes + lane; }

  // Calls f(d) for this lane's components.
  template <class F>
  CAPSFAST_DEVICE void for_components(int64_t D, const F& f) const {
    for (int64_t d = lane * kWidth; d < D && slice == 0; d += lanes * kWidth) {
#pragma unroll
      for (int m = 0; m < kWidth; ++m) {
        if (d + m < D) f(d + m);
      }
    }
  }
};

// The slice of a lane without an output capsule, beyond all segments and input capsules.
constexpr int kNoSlice = 1 << 26;

// Calls f(at) for every output capsule of every sample. The warps of the grid share the output capsules; each half of a
// warp takes one at a time. If the second half has none, it goes along with the row of the first half, as a slice that
// neither reads nor writes.
template <class F>
CAPSFAST_DEVICE void for_outputs(const Inputs& in, const F& f) {
  const int warps = gpu::threads() / 32, thread = gpu::reread_thread_idx();
  const int lane = thread % 32, half = lane / UpdateCoord::kLanes;
  const int64_t block = gpu::block_x() + gpu::blocks_x() * gpu::block_y(), rows = in.B * in.J,
                step = gpu::blocks_x() * gpu::blocks_y() * warps;
  const int wanted = lanes_for((in.D + UpdateCoord::kWidth - 1) / UpdateCoord::kWidth);
  UpdateCoord at;
  at.lanes = wanted < UpdateCoord::kLanes ? wanted : UpdateCoord::kLanes;
  at.lane = lane % at.lanes;
  at.slices = UpdateCoord::kLanes / at.lanes;
  for (int64_t at_row = block * warps + thread / 32; at_row < rows; at_row += 2 * step) {
    const bool present = at_row + half * step < rows;
    at.row = present ? at_row + half * step : at_row;
    at.slice = present ? lane % UpdateCoord::kLanes / at.lanes : kNoSlice;
    at.b = at.row / in.J;
    at.j = at.row % in.J;
    f(at);
  }
}

// The normaliser of c = exp(b - max) scale for one output capsule, combined from the segments.
template <class T>
struct ColumnNorm {
  T max, scale;

  static CAPSFAST_DEVICE ColumnNorm of(const Inputs& in, const Parts<T>& parts, const UpdateCoord& at) {
    const Work& work = parts.work;
    const int64_t lane = at.number(), first = work.first_segment(at.b), end = work.end_segment(at.b);
    T max = in.leaky ? T(0) : Extreme<T>::lowest;
    for (int64_t n = first + lane; n < end; n += UpdateCoord::kLanes)
      max = larger<T>(max, parts.max[work.row(n, at.b, at.j, in.J)]);
    for (int mask = UpdateCoord::kLanes / 2; mask > 0; mask /= 2) max = larger<T>(max, gpu::shuffle_xor(max, mask));
    double total = first == end && in.leaky && lane == 0 ? 1.0 : 0.0;
    for (int64_t n = first + lane; n < end; n += UpdateCoord::kLanes) {
      const int64_t row = work.row(n, at.b, at.j, in.J);
      total += parts.total[row] * static_cast<double>(std::exp(static_cast<T>(parts.max[row]) - max));
    }
    total = lane_sum(total, UpdateCoord::kLanes);
    return {max, total == 0 ? T(0) : static_cast<T>(1 / total)};
  }
};

// Calls f(d, sum) for this lane's components of the sum over the segments. If `follows`, each segment has its own
// maximum, and its part is rescaled to the common maximum `max`. elements: size of a sum, D or D + 1.
template <class T, class F>
CAPSFAST_DEVICE void for_sums(const Inputs& in, int64_t elements, const Parts<T>& parts, const UpdateCoord& at,
                              bool follows, T max, const F& f) {
  constexpr int kWidth = UpdateCoord::kWidth;
  const Work& work = parts.work;
  const int64_t end = work.end_segment(at.b);
  for (int64_t d0 = 0; d0 < elements; d0 += at.lanes * kWidth) {
    const int64_t d = d0 + at.lane * kWidth;
    double sum[kWidth] = {};
#pragma unroll 4
    for (int64_t n = work.first_segment(at.b) + at.slice; n < end && d < elements; n += at.slices) {
      const int64_t row = work.row(n, at.b, at.j, in.J), from = row * elements + d;
      const double factor = follows ? static_cast<double>(std::exp(static_cast<T>(parts.max[row]) - max)) : 1.0;
      Run<float, kWidth> run = {};
      const bool together = parts.sum_rows && elements % kWidth == 0;
      if (together) run = parts.sum_rows.template vector<Run<float, kWidth>>(from);
#pragma unroll
      for (int m = 0; m < kWidth; ++m) {
        if (d + m < elements) sum[m] += factor * (together ? static_cast<double>(run.value[m]) : parts.part(from + m));
      }
    }
    for (int mask = at.lanes; mask < UpdateCoord::kLanes; mask *= 2) {
#pragma unroll
      for (int m = 0; m < kWidth; ++m) sum[m] += gpu::shuffle_xor(sum[m], mask);
    }
#pragma unroll
    for (int m = 0; m < kWidth; ++m) {
      if (at.slice == 0 && d + m < elements) f(d + m, sum[m]);
    }
  }
}

// The coupling if all logits are 0 and no input capsule is masked. valid: whether out_mask keeps the output capsule.
template <class T>
CAPSFAST_DEVICE T uniform(const Inputs& in, int64_t b, bool valid) {
  int64_t entries = in.I;
  if (!in.softmax_in) {
    entries = in.J;
    if (in.out_mask.data) {
      entries = 0;
      for (int64_t j = 0; j < in.J; ++j) entries += in.out_mask.at(b, j);
    }
  }
  entries += in.leaky;
  return valid && entries > 0 ? T(1) / static_cast<T>(entries) : T(0);
}

// The factor that the sums of an accumulating pass still need, and the maximum that the sums are relative to.
// unweighted: the pass took every coefficient as 1. follows: the pass took every coefficient as exp(b - max).
template <class T>
CAPSFAST_DEVICE ColumnNorm<T> norm_of_sums(const Inputs& in, const Parts<T>& parts, const UpdateCoord& at, bool valid,
                                           bool unweighted, bool follows) {
  if (follows) return ColumnNorm<T>::of(in, parts, at);
  return {T(0), unweighted ? uniform<T>(in, at.b, valid) : T(1)};
}

// `mean` plus this lane's terms of sum_i coupling dcoupling.
template <class T>
CAPSFAST_DEVICE T add_coupling(const Inputs& in, const UpdateCoord& at, const Operand& coupling,
                               const Operand& dcoupling, T mean) {
  if (!dcoupling.data) return mean;
  for (int64_t i = at.number(); i < in.I; i += UpdateCoord::kLanes)
    mean +=
        coupling.template read<T>(coupling.at(at.b, i, at.j)) * dcoupling.template read<T>(dcoupling.at(at.b, i, at.j));
  return mean;
}

// to[n] = sum of from[part, n] over the parts, n < size. `lanes` neighbouring lanes share a sum. With `order` a part is
// a sample of an iteration, whose n-th component (j, d) lies as `order` says.
template <class N>
struct JoinArgs {
  int64_t parts, size;
  Global<const N> from;  // [parts, size]
  Operand to;            // [size], contiguous
  int lanes = 1;
  int64_t B = 0;  // samples of an iteration
  VectorOrder order = {};

  CAPSFAST_DEVICE int64_t place(int64_t part, int64_t n) const {
    if (order.tiles == 0) return part * size + n;
    return part / B * order.size(B) + order.at(part % B, n / order.D, n % order.D);
  }
};

template <class N>
CAPSFAST_KERNEL(kThreads, 4)
join_kernel(JoinArgs<N> a) {
  const int lane = gpu::thread() % a.lanes, rows = gpu::threads() / a.lanes;
  for (int64_t n0 = gpu::block_x() * rows; n0 < a.size; n0 += gpu::blocks_x() * rows) {
    const int64_t n = n0 + gpu::thread() / a.lanes;
    double sum = 0;
    for (int64_t part = lane; part < a.parts && n < a.size; part += a.lanes)
      sum += static_cast<double>(a.from[a.place(part, n)]);
    sum = lane_sum(sum, a.lanes);
    if (lane == 0 && n < a.size) a.to.template write<double>(n, sum);
  }
}

}  // namespace capsfast::cuda
