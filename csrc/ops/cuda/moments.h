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

// Takes a step of a pass, step(at), for every output capsule. The steps follow.
template <class Args>
CAPSFAST_KERNEL(kThreads, 4)
step_kernel(Args a) {
  for_outputs(a.in, Share::of_grid(a.in), [&](const UpdateCoord& at) { a.step(at); });
}

// Copies the query to V.
template <class T>
struct QueryArgs {
  Inputs in;
  Operand query;  // [B, J, D]
  Global<T> V;    // [B, J, D], written

  CAPSFAST_DEVICE void step(const UpdateCoord& at) const { load_output(in, at, query, V); }
};

// Copies the gradient of the first moment to ds. For the softmax over the input capsules it also computes the sum of c
// dc of every output capsule. This needs no pass: dc = dmass + votes . ds + dweights, and the moments are the sums of c
// and c votes.
template <class T>
struct MomentGradientArgs {
  Inputs in;
  Operand dfirst, first;      // [B, J, D]
  Operand dmass, mass;        // [B, J]
  Operand dweights, weights;  // [B, I, J]
  Global<T> ds;               // [B, J, D], written
  Global<T> mean;             // [B, J], written; absent for the softmax over the output capsules

  CAPSFAST_DEVICE void step(const UpdateCoord& at) const {
    load_output(in, at, dfirst, ds);
    if (!mean) return;
    T sum = T(0);
    if (at.number() == 0 && dmass.data) {
      mass.add_to(&sum, at.b, at.j);
      sum *= dmass.template read<T>(dmass.at(at.b, at.j));
    }
    for (int64_t d = at.number(); d < in.D; d += UpdateCoord::kLanes)
      sum += ds[at.row * in.D + d] * first.template read<T>(first.at(at.b, at.j, d));
    sum = lane_sum(add_coupling<T>(in, at, weights, dweights, sum), UpdateCoord::kLanes);
    if (at.number() == 0) mean[at.row] = sum;
  }
};

// Adds up the sums of an accumulating pass with mass: the moments, or dquery and dprior.
template <class T>
struct MomentArgs {
  Inputs in;
  Parts<T> parts;
  bool unweighted;       // the pass took every coefficient as 1
  Operand first, mass;   // [B, J, D], [B, J], written
  Global<T> max, scale;  // [B, J], written: in the forward with softmax over the input capsules
  Operand lse;           // [B, J], written as well

  CAPSFAST_DEVICE void step(const UpdateCoord& at) const {
    const bool valid = in.out_mask.at(at.b, at.j), follows = max && !unweighted;
    const ColumnNorm<T> norm = norm_of_sums<T>(in, parts, at, valid, unweighted, follows);
    if (at.slice == 0 && at.lane == 0 && max) {
      max[at.row] = norm.max;
      scale[at.row] = norm.scale;
      lse.put(log_sum(norm.max, norm.scale), at.b, at.j);
    }
    for_sums<T>(in, in.D + 1, parts, at, follows, norm.max, [&](int64_t d, double sum) {
      const T value = static_cast<T>(sum * static_cast<double>(norm.scale));
      if (d < in.D) {
        first.put(value, at.b, at.j, d);
      } else {
        mass.put(value, at.b, at.j);
      }
    });
  }
};

}  // namespace capsfast::cuda
