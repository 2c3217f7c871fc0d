// The steps of a pass op (see steps.h): one iteration of routing without a squash, with the query as V. The
// accumulating pass also sums the coefficients (mass).
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

// Adds up the sums of a pass and writes them to `first` [B, J, D] and `mass` [B, J]. unweighted, follows: as in
// norm_of_sums().
template <class T>
CAPSFAST_DEVICE ColumnNorm<T> put_sums(const Inputs& in, const Parts<T>& parts, const UpdateCoord& at, bool unweighted,
                                       bool follows, const Operand& first, const Operand& mass) {
  const ColumnNorm<T> norm = norm_of_sums<T>(in, parts, at, in.out_mask.at(at.b, at.j), unweighted, follows);
  for_sums<T>(in, in.D + 1, parts, at, follows, norm.max, [&](int64_t d, double sum) {
    const T value = static_cast<T>(sum * static_cast<double>(norm.scale));
    if (d < in.D) {
      first.put(value, at.b, at.j, d);
    } else {
      mass.put(value, at.b, at.j);
    }
  });
  return norm;
}

template <class T>
struct PassForwardSteps {
  static constexpr bool routing = false;
  static constexpr int64_t begin = -1;
  Inputs in;
  Parts<T> parts;
  Operand query;         // [B, J, D]
  Global<T> V;           // [B, J, D], the query; absent if there is none
  Operand first, mass;   // written: [B, J, D], [B, J]
  Operand weights, lse;  // written: [B, I, J], and [B, I] or, for a softmax over the input capsules, [B, J]
  Global<T> max, scale;  // [B, J], written, for a softmax over the input capsules

  // The softmax over the input capsules knows its normaliser only after a pass. So one more pass writes the weights.
  CAPSFAST_HOST_DEVICE int64_t passes() const { return 1 + (weights.data && in.softmax_in); }
  CAPSFAST_HOST_DEVICE AccumulateArgs<T> pass(int64_t n) const {
    AccumulateArgs<T> args{};
    args.in = in;
    args.scoring.V = V;
    args.mass = true;
    if (n > 0) args.norm = {max, scale, {}};
    if (n > 0 || !in.softmax_in) args.coupling = weights;
    if (n > 0) return args;
    args.unweighted = unweighted();
    args.to = parts;
    if (args.unweighted) args.to.max = {};
    if (!in.softmax_in) args.lse = lse;
    return args;
  }
  CAPSFAST_HOST_DEVICE int64_t row_norm(int64_t) const { return 0; }

  CAPSFAST_HOST_DEVICE bool updates(int64_t n) const { return n < 0 ? static_cast<bool>(V) : n == 0; }
  CAPSFAST_DEVICE void after(int64_t n) const {
    for_outputs(in, [&](const UpdateCoord& at) {
      if (n < 0) return load_output(in, at, query, V);
      const ColumnNorm<T> norm = put_sums(in, parts, at, unweighted(), max && !unweighted(), first, mass);
      if (at.slice > 0 || at.lane > 0 || !max) return;
      max[at.row] = norm.max;
      scale[at.row] = norm.scale;
      lse.put(log_sum(norm.max, norm.scale), at.b, at.j);
    });
  }

 private:
  CAPSFAST_HOST_DEVICE bool unweighted() const {
    return !query.data && !in.prior.data && !in.logits.data && !weights.data && !lse.data &&
           !(in.softmax_in && in.mask.data);
  }
};

template <class T>
struct PassBackwardSteps {
  static constexpr bool routing = false;
  static constexpr int64_t begin = -1;
  Inputs in;
  Parts<T> parts;
  Operand query, dfirst;   // [B, J, D]
  Global<T> V, ds;         // copies of them; V is absent if there is no query
  Operand first, mass;     // [B, J, D], [B, J]
  Operand weights;         // [B, I, J]; needed only with its gradient
  Scoring<T> scoring;      // with V and ds
  Normaliser<T> columns;   // [B, J], softmax over the input capsules
  Global<T> mean;          // the memory of columns.mean, which the first step writes
  Operand dquery, dprior;  // written: [B, J, D], [B, J]

  CAPSFAST_HOST_DEVICE int64_t passes() const { return dquery.data || dprior.data; }
  CAPSFAST_HOST_DEVICE AccumulateArgs<T> pass(int64_t) const {
    AccumulateArgs<T> args{};
    args.in = in;
    args.scoring = scoring;
    args.norm = columns;
    args.mass = true;
    args.to = parts;
    return args;
  }
  CAPSFAST_HOST_DEVICE int64_t row_norm(int64_t) const { return 0; }

  CAPSFAST_HOST_DEVICE bool updates(int64_t) const { return true; }
  CAPSFAST_DEVICE void after(int64_t n) const {
    for_outputs(in, [&](const UpdateCoord& at) {
      if (n < 0) return load(at);
      put_sums(in, parts, at, false, false, dquery, dprior);
    });
  }

 private:
  // Copies query and dfirst. For the softmax over the input capsules also computes the sum of c dc of every output
  // capsule. This needs no pass: dc = dmass + votes . ds + dweights, and the moments are the sums of c and c votes.
  CAPSFAST_DEVICE void load(const UpdateCoord& at) const {
    if (V) load_output(in, at, query, V);
    load_output(in, at, dfirst, ds);
    if (!mean) return;
    T sum = T(0);
    if (at.number() == 0 && scoring.dmass.data) {
      mass.add_to(&sum, at.b, at.j);
      sum *= scoring.dmass.template read<T>(scoring.dmass.at(at.b, at.j));
    }
    for (int64_t d = at.number(); d < in.D; d += UpdateCoord::kLanes)
      sum += ds[at.row * in.D + d] * first.template read<T>(first.at(at.b, at.j, d));
    sum = lane_sum(add_coupling<T>(in, at, weights, scoring.dcoupling, sum), UpdateCoord::kLanes);
    if (at.number() == 0) mean[at.row] = sum;
  }
};

}  // namespace capsfast::cuda
