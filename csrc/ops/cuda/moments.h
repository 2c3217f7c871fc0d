// The steps before and after the accumulating pass of a pass op, on arrays [.., B, J, D]. As in update.h, half
// of a warp has one output capsule of a sample at a time.
#pragma once

#include "update.h"

namespace capsfast::cuda {

// Copies a lane's components of `from` to `to` [B, J, D]. Writes 0 if `from` is absent or the output capsule is masked.
template <class T>
CAPSFAST_DEVICE void load_output(const Inputs& in, const UpdateCoord& at, const Operand& from, const Global<T>& to) {
  const bool counts = from.data && in.out_mask.at(at.b, at.j);
  for (int64_t d = at.number(); d < in.D; d += UpdateCoord::kLanes)
    to[at.row * in.D + d] = counts ? from.template read<T>(from.at(at.b, at.j, d)) : T(0);
}

// The step that copies the query to V.
template <class T>
struct QueryArgs {
  Inputs in;
  Operand query;  // [B, J, D]
  Global<T> V;    // [B, J, D], written
};

template <class T>
CAPSFAST_KERNEL(kThreads, 4)
query_kernel(QueryArgs<T> a) {
  for_outputs(a.in, Share::of_grid(a.in), [&](const UpdateCoord& at) { load_output(a.in, at, a.query, a.V); });
}

// The step that copies the gradient of the first moment to ds. For the softmax over the input capsules it also computes
// the sum of c dc of every output capsule. This needs no pass: dc = dmass + votes . ds + dweights, and the moments are
// the sums of c and c votes.
template <class T>
struct MomentGradientArgs {
  Inputs in;
  Operand dfirst, first;      // [B, J, D]
  Operand dmass, mass;        // [B, J]
  Operand dweights, weights;  // [B, I, J]
  Global<T> ds;               // [B, J, D], written
  Global<T> mean;             // [B, J], written; absent for the softmax over the output capsules
};

template <class T>
CAPSFAST_DEVICE void differentiate_moments(const MomentGradientArgs<T>& a, const UpdateCoord& at) {
  const Inputs& in = a.in;
  load_output(in, at, a.dfirst, a.ds);
  if (!a.mean) return;
  const auto scalar = [&](const Operand& x) { return x.template read<T>(x.at(at.b, at.j)); };
  T mean = T(0);
  if (at.number() == 0 && a.dmass.data) mean += scalar(a.dmass) * scalar(a.mass);
  for (int64_t d = at.number(); d < in.D; d += UpdateCoord::kLanes)
    mean += a.ds[at.row * in.D + d] * a.first.template read<T>(a.first.at(at.b, at.j, d));
  mean = lane_sum(add_coupling<T>(in, at, a.weights, a.dweights, mean), UpdateCoord::kLanes);
  if (at.number() == 0) a.mean[at.row] = mean;
}

template <class T>
CAPSFAST_KERNEL(kThreads, 4)
moment_gradient_kernel(MomentGradientArgs<T> a) {
  for_outputs(a.in, Share::of_grid(a.in), [&](const UpdateCoord& at) { differentiate_moments(a, at); });
}

// The step that adds up the sums of an accumulating pass with mass: the moments, or dquery and dprior.
template <class T>
struct MomentArgs {
  Inputs in;
  Parts<T> parts;
  bool unweighted;       // the pass took every coefficient as 1
  Operand first, mass;   // [B, J, D], [B, J], written
  Global<T> max, scale;  // [B, J], written: in the forward with softmax over the input capsules
  Operand lse;           // [B, J], written as well
};

template <class T>
CAPSFAST_DEVICE void add_moments(const MomentArgs<T>& a, const UpdateCoord& at) {
  const Inputs& in = a.in;
  const bool valid = in.out_mask.at(at.b, at.j), follows = a.max && !a.unweighted;
  const ColumnNorm<T> norm = norm_of_sums<T>(in, a.parts, at, valid, a.unweighted, follows);
  if (at.slice == 0 && at.lane == 0 && a.max) {
    a.max[at.row] = norm.max;
    a.scale[at.row] = norm.scale;
    a.lse.put(log_sum(norm.max, norm.scale), at.b, at.j);
  }
  for_sums<T>(in, in.D + 1, a.parts, at, follows, norm.max, [&](int64_t d, double sum) {
    const T value = static_cast<T>(sum * static_cast<double>(norm.scale));
    if (d < in.D) {
      a.first.put(value, at.b, at.j, d);
    } else {
      a.mass.put(value, at.b, at.j);
    }
  });
}

template <class T>
CAPSFAST_KERNEL(kThreads, 4)
moment_kernel(MomentArgs<T> a) {
  for_outputs(a.in, Share::of_grid(a.in), [&](const UpdateCoord& at) { add_moments(a, at); });
}

}  // namespace capsfast::cuda
