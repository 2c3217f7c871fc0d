// The steps between the passes, on arrays [.., B, J, D]: they add up partial sums and compute the squash or its
// derivative. A warp has one output capsule of a sample at a time. Each step is a function that all blocks of a grid of
// any size call, and also a kernel.
#pragma once

#include <type_traits>

#include "warp.h"

namespace capsfast::cuda {

struct Squashing {
  Squash kind, last;  // last: of the last iteration
  double eps;
  Operand bias;  // [J, D]

  CAPSFAST_HOST_DEVICE Squashing of(bool last_iteration) const {
    return {last_iteration ? last : kind, last, eps, bias};
  }

  template <class T>
  CAPSFAST_DEVICE T biased(T s, int64_t j, int64_t d) const {
    return bias.data ? s + bias.template read<T>(j * bias.stride[0] + d * bias.stride[1]) : s;
  }
};

// Partial sums of an accumulating pass, one for each segment of `work`. If max and total are there, each segment has
// weighted its input capsules with exp(b - max), where the largest logit b of that segment exceeds max by 8 at most,
// and total is the sum of these weights.
template <class T>
struct Parts {
  Work work;
  Global<double> sum;      // [segments, group, J, D or, with mass, D + 1], of the general kernels
  Global<float> sum_rows;  // the same of the rows family, whose sums are short enough for float
  Global<T> max;           // [segments, group, J]
  Global<double> total;    // [segments, group, J]

  CAPSFAST_DEVICE double part(int64_t n) const {
    return sum ? static_cast<double>(sum[n]) : static_cast<double>(sum_rows[n]);
  }
};

// Output capsule j of sample b, row = b J + j, and what this lane of its warp does: it is number `lane` of `lanes`
// along the components, and number `slice` of `slices` among the lanes that share the segments. The lanes of slice 0
// end with the sums over all segments and go on alone.
struct UpdateCoord {
  int64_t b, j, row;
  int lane, lanes, slice, slices;
};

// Calls f(at) for every output capsule of every sample, each on one warp of the grid. width: how many components a
// lane has at a time.
template <class F>
CAPSFAST_DEVICE void for_outputs(const Inputs& in, int width, const F& f) {
  const int warps = gpu::threads() / 32, thread = gpu::reread_thread_idx(), lane = thread % 32;
  const int64_t block = gpu::block_x() + gpu::blocks_x() * gpu::block_y(), blocks = gpu::blocks_x() * gpu::blocks_y();
  UpdateCoord at;
  at.lanes = lanes_for(in.D / width);
  at.lane = lane % at.lanes;
  at.slice = lane / at.lanes;
  at.slices = 32 / at.lanes;
  for (at.row = block * warps + thread / 32; at.row < in.B * in.J; at.row += blocks * warps) {
    at.b = at.row / in.J;
    at.j = at.row % in.J;
    f(at);
  }
}

// The normaliser of c = exp(b - max) scale for one output capsule, combined from those of the segments.
template <class T>
struct ColumnNorm {
  T max, scale;

  static CAPSFAST_DEVICE ColumnNorm of(const Inputs& in, const Parts<T>& parts, const UpdateCoord& at) {
    const Work& work = parts.work;
    const int64_t lane = gpu::thread() % 32, first = work.first(at.b), end = work.end(at.b);
    T max = in.leaky ? T(0) : Extreme<T>::lowest;
    for (int64_t n = first + lane; n < end; n += 32) max = larger<T>(max, parts.max[work.row(n, at.b, at.j, in.J)]);
    for (int mask = 16; mask > 0; mask /= 2) max = larger<T>(max, gpu::shuffle_xor(max, mask));
    double total = first == end && in.leaky && lane == 0 ? 1.0 : 0.0;
    for (int64_t n = first + lane; n < end; n += 32) {
      const int64_t row = work.row(n, at.b, at.j, in.J);
      total += parts.total[row] * static_cast<double>(std::exp(static_cast<T>(parts.max[row]) - max));
    }
    total = lane_sum(total, 32);
    return {max, total == 0 ? T(0) : static_cast<T>(1 / total)};
  }
};

// sum = components [d, d + kWidth) of the sum over the segments, in the lanes of slice 0. If `follows`, each segment
// has its own maximum, and its part is rescaled to the common one, `max`. elements: of a sum, D or D + 1.
template <int kWidth, class T>
CAPSFAST_DEVICE void add_parts(const Inputs& in, int64_t elements, const Parts<T>& parts, const UpdateCoord& at,
                               int64_t d, bool follows, T max, double (&sum)[kWidth]) {
  const Work& work = parts.work;
  const int64_t end = work.end(at.b);
#pragma unroll
  for (int n = 0; n < kWidth; ++n) sum[n] = 0;
#pragma unroll 8
  for (int64_t n = work.first(at.b) + at.slice; n < end && d < elements; n += at.slices) {
    const int64_t row = work.row(n, at.b, at.j, in.J), from = row * elements + d;
    const double factor = follows ? static_cast<double>(std::exp(static_cast<T>(parts.max[row]) - max)) : 1.0;
    if constexpr (kWidth > 1) {
      const auto run = parts.sum_rows.template vector<Run<float, kWidth>>(from);
#pragma unroll
      for (int m = 0; m < kWidth; ++m) sum[m] += factor * static_cast<double>(run.value[m]);
    } else {
      sum[0] += factor * parts.part(from);
    }
  }
  for (int mask = at.lanes; mask < 32; mask *= 2) {
#pragma unroll
    for (int n = 0; n < kWidth; ++n) sum[n] += gpu::shuffle_xor(sum[n], mask);
  }
}

// Calls f(width), an integral constant: how many components a lane has at a time. sum_rows is read four at a time.
constexpr int kPartWidth = 4;
template <class T, class F>
CAPSFAST_DEVICE void with_width(const Inputs& in, const Parts<T>& parts, const F& f) {
  if constexpr (std::is_same_v<T, float>) {
    if (parts.sum_rows && in.D % kPartWidth == 0) return f(std::integral_constant<int, kPartWidth>());
  }
  f(std::integral_constant<int, 1>());
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

// What the sums of an accumulating pass are still to be multiplied with, and the maximum that they are relative to.
// unweighted, follows: the pass took every coefficient as 1, or as exp(b - max).
template <class T>
CAPSFAST_DEVICE ColumnNorm<T> norm_of_sums(const Inputs& in, const Parts<T>& parts, const UpdateCoord& at, bool valid,
                                           bool unweighted, bool follows) {
  if (follows) return ColumnNorm<T>::of(in, parts, at);
  return {T(0), unweighted ? uniform<T>(in, at.b, valid) : T(1)};
}

// The step that computes s_t, its normaliser, v_t and V_t from the sums of pass t.
template <class T>
struct OutputArgs {
  Inputs in;
  Squashing squash;
  Parts<T> parts;
  bool unweighted, first;  // unweighted: the pass took every coefficient as 1. first: V so far is 0
  Global<T> s;             // [B, J, D] of this iteration
  Global<T> max, scale;    // [B, J] of this iteration, softmax over the input capsules
  VectorOrder order;       // of V
  Global<T> V;             // [B, J, D], added to; absent in the last iteration
  Operand v;               // [B, J, D], written; absent but in the last iteration
};

template <class T, int kWidth>
CAPSFAST_DEVICE void make_output(const OutputArgs<T>& a, const UpdateCoord& at) {
  const Inputs& in = a.in;
  const bool valid = in.out_mask.at(at.b, at.j), first = at.slice == 0, follows = in.softmax_in && !a.unweighted;
  const ColumnNorm<T> norm = norm_of_sums<T>(in, a.parts, at, valid, a.unweighted, follows);
  if (first && at.lane == 0 && in.softmax_in) {
    a.max[at.row] = norm.max;
    a.scale[at.row] = norm.scale;
  }
  T n = T(0);
  for (int64_t d0 = 0; d0 < in.D; d0 += at.lanes * kWidth) {
    const int64_t d = d0 + at.lane * kWidth;
    double sum[kWidth];
    add_parts<kWidth, T>(in, in.D, a.parts, at, d, follows, norm.max, sum);
    if (!first || d >= in.D) continue;
#pragma unroll
    for (int m = 0; m < kWidth; ++m) {
      const T s = static_cast<T>(in.softmax_in || a.unweighted ? sum[m] * static_cast<double>(norm.scale) : sum[m]);
      a.s[at.row * in.D + d + m] = s;
      const T biased = a.squash.biased(s, at.j, d + m);
      n += biased * biased;
    }
  }
  const T f = radial<T>(a.squash.kind, lane_sum(n, 32), static_cast<T>(a.squash.eps));
  for (int64_t d0 = at.lane * kWidth; d0 < in.D && first; d0 += at.lanes * kWidth) {
#pragma unroll
    for (int m = 0; m < kWidth; ++m) {
      const int64_t d = d0 + m, element = at.row * in.D + d;
      const T v = valid ? f * a.squash.biased(static_cast<T>(a.s[element]), at.j, d) : T(0);
      if (a.V) {
        T& V = a.V[a.order.at(at.b, at.j, d)];
        V = a.first ? v : V + v;
      }
      if (a.v.data) a.v.template write<T>(element, v);
    }
  }
}

template <class T>
CAPSFAST_DEVICE void make_outputs(const OutputArgs<T>& a) {
  with_width(a.in, a.parts, [&](auto width) {
    for_outputs(
        a.in, decltype(width)::value, [&](const UpdateCoord& at) { make_output<T, decltype(width)::value>(a, at); });
  });
}

template <class T>
CAPSFAST_KERNEL(kThreads, 4)
output_kernel(OutputArgs<T> a) {
  make_outputs(a);
}

// The step that computes V from the saved s. V[t] is what iteration t scored with (t from 0): the sum of the outputs of
// the iterations before.
template <class T>
struct RestoreArgs {
  Inputs in;
  Squashing squash;
  int64_t iterations;
  VectorOrder order;  // of V
  Global<const T> s;  // [r, B, J, D]
  Global<T> V;        // [r, B, J, D]
};

template <class T>
CAPSFAST_DEVICE void restore_output(const RestoreArgs<T>& a, const UpdateCoord& at) {
  const Inputs& in = a.in;
  const bool valid = in.out_mask.at(at.b, at.j);
  const int64_t vectors = in.B * in.J * in.D, row = at.row * in.D, end = at.slice == 0 ? in.D : 0;
  const auto V = [&](int64_t t, int64_t d) -> T& { return a.V[t * a.order.size(in.B) + a.order.at(at.b, at.j, d)]; };
  for (int64_t d = at.lane; d < end; d += at.lanes) V(0, d) = T(0);
  for (int64_t t = 0; t + 1 < a.iterations; ++t) {
    T n = T(0);
    for (int64_t d = at.lane; d < end; d += at.lanes) {
      const T s = a.squash.biased(static_cast<T>(a.s[t * vectors + row + d]), at.j, d);
      n += s * s;
    }
    const T f = radial<T>(a.squash.kind, lane_sum(n, 32), static_cast<T>(a.squash.eps));
    for (int64_t d = at.lane; d < end; d += at.lanes) {
      const T s = a.squash.biased(static_cast<T>(a.s[t * vectors + row + d]), at.j, d);
      V(t + 1, d) = V(t, d) + (valid ? f * s : T(0));
    }
  }
}

template <class T>
CAPSFAST_DEVICE void restore(const RestoreArgs<T>& a) {
  for_outputs(a.in, 1, [&](const UpdateCoord& at) { restore_output(a, at); });
}

template <class T>
CAPSFAST_KERNEL(kThreads, 4)
restore_kernel(RestoreArgs<T> a) {
  restore(a);
}

// `mean` and this lane's terms of sum_i coupling dcoupling.
template <class T>
CAPSFAST_DEVICE T add_coupling(const Inputs& in, const UpdateCoord& at, const Operand& coupling,
                               const Operand& dcoupling, T mean) {
  if (!dcoupling.data) return mean;
  const int64_t *c = coupling.stride, *dc = dcoupling.stride;
  for (int64_t i = gpu::thread() % 32; i < in.I; i += 32) {
    mean += coupling.template read<T>(at.b * c[0] + i * c[1] + at.j * c[2]) *
            dcoupling.template read<T>(at.b * dc[0] + i * dc[1] + at.j * dc[2]);
  }
  return mean;
}

// The step that computes ds_t from dv_t: the gradient of the output in the last iteration, else the sum G of the
// accumulating passes so far.
template <class T>
struct DifferentiateArgs {
  Inputs in;
  Squashing squash;
  Operand dv;                   // [B, J, D]; absent but in the last iteration
  Operand coupling, dcoupling;  // [B, I, J]; absent but in the last iteration
  Parts<T> parts;
  bool first;         // the parts are those of the first pass, before which G counts as 0
  Global<T> G;        // [B, J, D], the sum of all passes so far
  Global<const T> s;  // [B, J, D] of this iteration, without bias
  VectorOrder order;  // of ds
  Global<T> ds;       // [B, J, D] of this iteration, written
  Global<T> mean;     // [B, J], written: sum_i c dc, softmax over the input capsules
};

template <class T, int kWidth>
CAPSFAST_DEVICE void differentiate_output(const DifferentiateArgs<T>& a, const UpdateCoord& at) {
  const Inputs& in = a.in;
  const bool valid = in.out_mask.at(at.b, at.j), first = at.slice == 0;
  T n = T(0), s_dv = T(0);
  for (int64_t d0 = 0; d0 < in.D; d0 += at.lanes * kWidth) {
    const int64_t d = d0 + at.lane * kWidth;
    double sum[kWidth] = {};
    if (!a.dv.data) add_parts<kWidth, T>(in, in.D, a.parts, at, d, false, T(0), sum);
    if (!first || d >= in.D) continue;
#pragma unroll
    for (int m = 0; m < kWidth; ++m) {
      const int64_t element = at.row * in.D + d + m;
      T g;
      if (a.dv.data) {
        g = a.dv.template read<T>(at.b * a.dv.stride[0] + at.j * a.dv.stride[1] + (d + m) * a.dv.stride[2]);
      } else {
        g = static_cast<T>(a.first ? sum[m] : static_cast<double>(a.G[element]) + sum[m]);
      }
      a.G[element] = g;
      const T s = a.squash.biased(static_cast<T>(a.s[element]), at.j, d + m);
      n += s * s;
      s_dv += s * g;
    }
  }
  n = lane_sum(n, 32);
  s_dv = lane_sum(s_dv, 32);
  const T eps = static_cast<T>(a.squash.eps), f = radial<T>(a.squash.kind, n, eps),
          slope = 2 * radial_derivative<T>(a.squash.kind, n, eps) * s_dv;
  T mean = T(0);
  for (int64_t d0 = at.lane * kWidth; d0 < in.D && first; d0 += at.lanes * kWidth) {
#pragma unroll
    for (int m = 0; m < kWidth; ++m) {
      const int64_t d = d0 + m, element = at.row * in.D + d;
      const T s = a.s[element];
      const T ds = valid ? f * a.G[element] + slope * a.squash.biased(s, at.j, d) : T(0);
      a.ds[a.order.at(at.b, at.j, d)] = ds;
      mean += ds * s;
    }
  }
  if (!in.softmax_in) return;
  // sum_i c dc = ds . s, because dc = votes . ds and s = sum_i c votes. dcoupling adds its own term to dc.
  mean = lane_sum(add_coupling<T>(in, at, a.coupling, a.dcoupling, mean), 32);
  if (first && at.lane == 0) a.mean[at.row] = mean;
}

template <class T>
CAPSFAST_DEVICE void differentiate(const DifferentiateArgs<T>& a) {
  with_width(a.in, a.parts, [&](auto width) {
    for_outputs(a.in, decltype(width)::value,
                [&](const UpdateCoord& at) { differentiate_output<T, decltype(width)::value>(a, at); });
  });
}

template <class T>
CAPSFAST_KERNEL(kThreads, 4)
differentiate_kernel(DifferentiateArgs<T> a) {
  differentiate(a);
}

// dbias = sum of ds over iterations and samples. A block has some rows (j, d); kSumLanes threads share the sum of a
// row.
constexpr int kSumLanes = 8;

template <class T>
struct BiasArgs {
  int64_t iterations, B;
  VectorOrder order;   // of ds
  Global<const T> ds;  // [iterations, B, J, D]
  Operand dbias;       // [J D], written
};

template <class T>
CAPSFAST_KERNEL(kThreads, 4)
bias_kernel(BiasArgs<T> a) {
  constexpr int kRows = kThreads / kSumLanes;
  const gpu::Shared<double> sums = gpu::shared<double>(0, kThreads);
  const int64_t row = gpu::block_x() * kRows + gpu::thread() % kRows;
  double sum = 0;
  const int64_t rows = a.order.J * a.order.D, j = row / a.order.D, d = row % a.order.D;
  for (int64_t n = gpu::thread() / kRows; n < a.iterations * a.B && row < rows; n += kSumLanes)
    sum += static_cast<double>(a.ds[n / a.B * a.order.size(a.B) + a.order.at(n % a.B, j, d)]);
  sums[gpu::thread()] = sum;
  gpu::barrier();
  if (gpu::thread() >= kRows || row >= rows) return;
  sum = 0;
  for (int lane = 0; lane < kSumLanes; ++lane) sum += sums[lane * kRows + gpu::thread()];
  a.dbias.template write<double>(row, sum);
}

// to[n] = sum of from[part, n] over the parts, in their order.
template <class N>
struct JoinArgs {
  int64_t parts, size;
  Global<const N> from;  // [parts, size]
  Operand to;            // [size], contiguous
};

template <class N>
CAPSFAST_KERNEL(kThreads, 4)
join_kernel(JoinArgs<N> a) {
  for (int64_t n = gpu::block_x() * gpu::threads() + gpu::thread(); n < a.size; n += gpu::blocks_x() * gpu::threads()) {
    double sum = 0;
    for (int64_t part = 0; part < a.parts; ++part) sum += static_cast<double>(a.from[part * a.size + n]);
    a.to.template write<double>(n, sum);
  }
}

}  // namespace capsfast::cuda
