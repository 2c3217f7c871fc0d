// What happens between the passes, on arrays without an axis of input capsules: sums of parts, squash and its
// derivative. A warp has an output capsule of a sample. Each step is a function that all blocks of a grid call,
// however many there are, and a kernel of its own.
#pragma once

#include <type_traits>

#include "coupling.h"
#include "general_plan.h"

namespace capsfast::cuda {

struct Squashing {
  Squash kind;
  double eps;
  Operand bias;  // [J, D]

  template <class T>
  CAPSFAST_DEVICE T biased(T s, int64_t j, int64_t d) const {
    return bias.data ? s + bias.template read<T>(j * bias.stride[0] + d * bias.stride[1]) : s;
  }
};

// Partial sums of the reducing pass. With max and total each split has its own maximum over its input capsules.
template <class T>
struct Parts {
  int64_t splits;
  Global<double> sum;      // [splits, B, J, D], from the general kernels
  Global<float> sum_tile;  // the same from the tile kernels, whose sums are shorter
  Global<T> max;           // [splits, B, J]
  Global<double> total;

  CAPSFAST_DEVICE double part(int64_t n) const {
    return sum ? static_cast<double>(sum[n]) : static_cast<double>(sum_tile[n]);
  }
};

// An output capsule of a sample, and this lane of its warp: one of `lanes` along the components, one of `slices` along
// what is summed up. The sums end in slice 0, which goes on with them.
struct Place {
  int64_t b, j, row;
  int lane, lanes, slice, slices;
};

// f(place) for every output capsule, dealt out to the warps of the grid. width: components of a lane.
template <class F>
CAPSFAST_DEVICE void for_outputs(const Inputs& in, int width, const F& f) {
  const int warps = gpu::threads() / 32, thread = gpu::thread_anew(), lane = thread % 32;
  const int64_t block = gpu::block_x() + gpu::blocks_x() * gpu::block_y(), blocks = gpu::blocks_x() * gpu::blocks_y();
  Place at;
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

// c = exp(b - max) scale of one output capsule, from the parts of the splits.
template <class T>
struct ColumnNorm {
  T max, scale;

  static CAPSFAST_DEVICE ColumnNorm of(const Inputs& in, const Parts<T>& parts, int64_t row) {
    const int64_t rows = in.B * in.J, lane = gpu::thread() % 32;
    T max = in.leaky ? T(0) : Extreme<T>::lowest;
    for (int64_t split = lane; split < parts.splits; split += 32) max = larger<T>(max, parts.max[split * rows + row]);
    for (int mask = 16; mask > 0; mask /= 2) max = larger<T>(max, gpu::shuffle_xor(max, mask));
    double total = parts.splits == 0 && in.leaky && lane == 0 ? 1.0 : 0.0;
    for (int64_t split = lane; split < parts.splits; split += 32) {
      total += parts.total[split * rows + row] *
               static_cast<double>(std::exp(static_cast<T>(parts.max[split * rows + row]) - max));
    }
    total = lane_sum(total, 32);
    return {max, total == 0 ? T(0) : static_cast<T>(1 / total)};
  }
};

// Components [d, d + kWidth) of the sum over the splits, in slice 0. Where the splits follow maxima of their own,
// they are brought to this one.
template <int kWidth, class T>
CAPSFAST_DEVICE void add_parts(const Inputs& in, const Parts<T>& parts, const Place& at, int64_t d, bool follows, T max,
                               double (&sum)[kWidth]) {
  const int64_t rows = in.B * in.J;
#pragma unroll
  for (int n = 0; n < kWidth; ++n) sum[n] = 0;
#pragma unroll 8
  for (int64_t split = at.slice; split < parts.splits && d < in.D; split += at.slices) {
    const int64_t row = split * rows + at.row, from = row * in.D + d;
    const double factor = follows ? static_cast<double>(std::exp(static_cast<T>(parts.max[row]) - max)) : 1.0;
    if constexpr (kWidth > 1) {
      const auto run = parts.sum_tile.template vector<Run<float, kWidth>>(from);
#pragma unroll
      for (int n = 0; n < kWidth; ++n) sum[n] += factor * static_cast<double>(run.value[n]);
    } else {
      sum[0] += factor * parts.part(from);
    }
  }
  for (int mask = at.lanes; mask < 32; mask *= 2) {
#pragma unroll
    for (int n = 0; n < kWidth; ++n) sum[n] += gpu::shuffle_xor(sum[n], mask);
  }
}

// f(integral constant): components of a lane. Sums of the tile kernels are read four at a time.
constexpr int kPartWidth = 4;
template <class T, class F>
CAPSFAST_DEVICE void with_width(const Parts<T>& parts, const F& f) {
  if constexpr (std::is_same_v<T, float>) {
    if (parts.sum_tile) return f(std::integral_constant<int, kPartWidth>());
  }
  f(std::integral_constant<int, 1>());
}

// The coupling where all logits are 0 and all input capsules count, of an output capsule that is valid or not.
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

// s_t, its normaliser, v_t and V_t.
template <class T>
struct OutputArgs {
  Inputs in;
  Squashing squash;
  Parts<T> parts;
  bool unweighted, first;
  Global<T> s;           // [B, J, D] of this iteration
  Global<T> max, scale;  // [B, J] of this iteration, softmax over the input capsules
  Global<T> V;           // [B, J, D]; not in the last iteration
  Operand v;             // [B, J, D]; in the last iteration
};

template <class T, int kWidth>
CAPSFAST_DEVICE void make_output(const OutputArgs<T>& a, const Place& at) {
  const Inputs& in = a.in;
  const bool valid = in.out_mask.at(at.b, at.j), first = at.slice == 0, follows = in.softmax_in && !a.unweighted;
  ColumnNorm<T> norm{T(0), T(1)};
  if (a.unweighted) norm.scale = uniform<T>(in, at.b, valid);
  if (follows) norm = ColumnNorm<T>::of(in, a.parts, at.row);
  if (first && at.lane == 0 && in.softmax_in) {
    a.max[at.row] = norm.max;
    a.scale[at.row] = norm.scale;
  }
  T n = T(0);
  for (int64_t d0 = 0; d0 < in.D; d0 += at.lanes * kWidth) {
    const int64_t d = d0 + at.lane * kWidth;
    double sum[kWidth];
    add_parts<kWidth, T>(in, a.parts, at, d, follows, norm.max, sum);
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
      if (a.V) a.V[element] = a.first ? v : a.V[element] + v;
      if (a.v.data) a.v.template write<T>(element, v);
    }
  }
}

template <class T>
CAPSFAST_DEVICE void make_outputs(const OutputArgs<T>& a) {
  with_width(a.parts, [&](auto width) {
    for_outputs(a.in, decltype(width)::value, [&](const Place& at) { make_output<T, decltype(width)::value>(a, at); });
  });
}

template <class T>
CAPSFAST_KERNEL(kThreads, 4)
output_kernel(OutputArgs<T> a) {
  make_outputs(a);
}

// V_t of every iteration from the saved s: V[0] = 0.
template <class T>
struct RestoreArgs {
  Inputs in;
  Squashing squash;
  int64_t iterations;
  Global<const T> s;  // [r, B, J, D]
  Global<T> V;        // [r, B, J, D]
};

template <class T>
CAPSFAST_DEVICE void restore_output(const RestoreArgs<T>& a, const Place& at) {
  const Inputs& in = a.in;
  const bool valid = in.out_mask.at(at.b, at.j);
  const int64_t vectors = in.B * in.J * in.D, row = at.row * in.D, end = at.slice == 0 ? in.D : 0;
  for (int64_t d = at.lane; d < end; d += at.lanes) a.V[row + d] = T(0);
  for (int64_t t = 0; t + 1 < a.iterations; ++t) {
    T n = T(0);
    for (int64_t d = at.lane; d < end; d += at.lanes) {
      const T s = a.squash.biased(static_cast<T>(a.s[t * vectors + row + d]), at.j, d);
      n += s * s;
    }
    const T f = radial<T>(a.squash.kind, lane_sum(n, 32), static_cast<T>(a.squash.eps));
    for (int64_t d = at.lane; d < end; d += at.lanes) {
      const T s = a.squash.biased(static_cast<T>(a.s[t * vectors + row + d]), at.j, d);
      a.V[(t + 1) * vectors + row + d] = a.V[t * vectors + row + d] + (valid ? f * s : T(0));
    }
  }
}

template <class T>
CAPSFAST_DEVICE void restore(const RestoreArgs<T>& a) {
  for_outputs(a.in, 1, [&](const Place& at) { restore_output(a, at); });
}

template <class T>
CAPSFAST_KERNEL(kThreads, 4)
restore_kernel(RestoreArgs<T> a) {
  restore(a);
}

// ds_t from dv_t: what the caller gave for the last iteration, else the sum of the reducing passes so far.
template <class T>
struct DifferentiateArgs {
  Inputs in;
  Squashing squash;
  Operand dv;                   // [B, J, D], in the last iteration
  Operand coupling, dcoupling;  // [B, I, J], in the last iteration
  Parts<T> parts;
  bool first;         // the parts are the first ones
  Global<T> G;        // [B, J, D], what the passes summed up
  Global<const T> s;  // [B, J, D] of this iteration, and below
  Global<T> ds;
  Global<T> mean;  // [B, J]: sum_i c dc, softmax over the input capsules
};

template <class T, int kWidth>
CAPSFAST_DEVICE void differentiate_output(const DifferentiateArgs<T>& a, const Place& at) {
  const Inputs& in = a.in;
  const bool valid = in.out_mask.at(at.b, at.j), first = at.slice == 0;
  T n = T(0), s_dv = T(0);
  for (int64_t d0 = 0; d0 < in.D; d0 += at.lanes * kWidth) {
    const int64_t d = d0 + at.lane * kWidth;
    double sum[kWidth] = {};
    if (!a.dv.data) add_parts<kWidth, T>(in, a.parts, at, d, false, T(0), sum);
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
      a.ds[element] = ds;
      mean += ds * s;
    }
  }
  if (!in.softmax_in) return;
  // sum_i c dc = ds . sum_i c votes, and what the gradient of the coupling adds.
  if (a.dcoupling.data) {
    const int64_t *c = a.coupling.stride, *dc = a.dcoupling.stride;
    for (int64_t i = gpu::thread() % 32; i < in.I; i += 32) {
      mean += a.coupling.template read<T>(at.b * c[0] + i * c[1] + at.j * c[2]) *
              a.dcoupling.template read<T>(at.b * dc[0] + i * dc[1] + at.j * dc[2]);
    }
  }
  mean = lane_sum(mean, 32);
  if (first && at.lane == 0) a.mean[at.row] = mean;
}

template <class T>
CAPSFAST_DEVICE void differentiate(const DifferentiateArgs<T>& a) {
  with_width(a.parts, [&](auto width) {
    for_outputs(
        a.in, decltype(width)::value, [&](const Place& at) { differentiate_output<T, decltype(width)::value>(a, at); });
  });
}

template <class T>
CAPSFAST_KERNEL(kThreads, 4)
differentiate_kernel(DifferentiateArgs<T> a) {
  differentiate(a);
}

// dbias = sum over iterations and samples of ds. A block has some rows (j, d), each shared by kSumLanes threads.
constexpr int kSumLanes = 8;

template <class T>
struct BiasArgs {
  int64_t count, rows;  // iterations times samples, J times D
  Global<const T> ds;   // [count, rows]
  Operand dbias;
};

template <class T>
CAPSFAST_KERNEL(kThreads, 4)
bias_kernel(BiasArgs<T> a) {
  constexpr int kRows = kThreads / kSumLanes;
  const gpu::Shared<double> sums = gpu::shared<double>(0, kThreads);
  const int64_t row = gpu::block_x() * kRows + gpu::thread() % kRows;
  double sum = 0;
  for (int64_t n = gpu::thread() / kRows; n < a.count && row < a.rows; n += kSumLanes)
    sum += static_cast<double>(a.ds[n * a.rows + row]);
  sums[gpu::thread()] = sum;
  gpu::barrier();
  if (gpu::thread() >= kRows || row >= a.rows) return;
  sum = 0;
  for (int lane = 0; lane < kSumLanes; ++lane) sum += sums[lane * kRows + gpu::thread()];
  a.dbias.template write<double>(row, sum);
}

// to[n] = sum over the parts, in their order.
template <class N>
struct JoinArgs {
  int64_t parts, size;
  Global<const N> from;  // [parts, size]
  Operand to;            // contiguous
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
