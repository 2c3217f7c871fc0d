// The backward: an accumulate pass for each iteration from the last to the second, then one gradient pass for all of
// them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "context.h"
#include "parts.h"
#include "routing.h"

namespace capsfast::driver {

template <class T>
class Backward {
 public:
  Backward(const Problem& problem, const BackwardInputs& inputs, const BackwardOutputs& outputs,
           const Totals<T>& sums_of_parts)
      : context(problem, sums_of_parts.threads),
        p(problem),
        in(inputs),
        out(outputs),
        totals(sums_of_parts),
        first(problem.gradient_last ? problem.iterations - 1 : 0),
        V(p.iterations * context.layout.vectors()),
        ds(p.iterations * context.layout.vectors()),
        sums(context.plan.splits * context.layout.vectors()),
        in_norm(p, context.layout, in.norm, in.batch, 0, p.softmax_in() ? p.iterations : 0),
        c_dc(p.softmax_in() ? p.iterations * context.layout.scalars() : 0),
        db(p.softmax_in() ? context.plan.splits * context.layout.scalars() : 0),
        bias(static_cast<size_t>(p.J * p.D), T(0)) {
    // Lanes without a sample hold zeros, so that they add nothing to any sum.
    std::fill_n(V.get(), p.iterations * context.layout.vectors(), T(0));
    std::fill_n(ds.get(), p.iterations * context.layout.vectors(), T(0));
    if (p.bias.data != nullptr)
      gather<T>(p.bias, 0, {1, p.J, p.D}, {0, p.bias.stride[0], p.bias.stride[1]}, bias.data());
    if (p.softmax_in()) { std::fill_n(c_dc.get(), p.iterations * context.layout.scalars(), T(0)); }
  }

  void run() {
    const int64_t r = p.iterations, pitch = context.layout.vectors();
    context.over_tiles([&](int64_t begin, int64_t end) {
      restore(begin, end);
      differentiate(r - 1, begin, end, true);
    });
    // A pass for the iteration without a G corrects c_dc, which the gradient of the logits alone needs there.
    const bool corrects_first = p.softmax_in() && out.dlogits.data != nullptr;
    for (int64_t t = r - 1; t > first || (t == first && corrects_first); --t) {
      AccumulatePass<T> pass;
      if (t > 0) pass.score.linear = V.get() + t * pitch;
      pass.gradient.linear = ds.get() + t * pitch;
      if (p.softmax_in()) {
        pass.in_max = in_norm.max() + t * context.layout.scalars();
        pass.in_scale = in_norm.scale() + t * context.layout.scalars();
        pass.c_dc = c_dc.get() + t * context.layout.scalars();
        pass.mass = db.sum();
        db.clear();
      }
      if (t == r - 1) pass.dcoupling = in.dcoupling;
      // If each v is part of every later V, its gradient G is the sum over all passes so far: the sums go on.
      if (t == r - 1 || !p.squash.accumulate) sums.clear();
      if (t > first) pass.first = sums.sum();
      context.accumulate(pass);
      if (p.softmax_in()) correct(t);
      if (t == first) break;
      context.over_tiles([&](int64_t begin, int64_t end) { differentiate(t - 1, begin, end, false); });
    }
    if (totals.dbias != nullptr) sum_bias();
    if (out.du.data != nullptr || out.dweight.data != nullptr || out.dlogits.data != nullptr) gradient_pass();
  }

 private:
  // Computes V of every iteration from the saved s, in the layout of the passes.
  void restore(int64_t begin, int64_t end) {
    for (int64_t tile = begin; tile < end; ++tile) {
      for (int64_t t = 0; t + 1 < p.iterations; ++t) context.tiles().restore(update(t), tile);
    }
  }

  Update<T> update(int64_t t) {
    Update<T> at = context.update(bias);
    at.V = V.get() + t * context.layout.vectors();
    at.s = const_cast<T*>(static_cast<const T*>(in.s)) + t * in.batch * p.J * p.D;
    return at;
  }

  // Computes ds_t from dv_t: if `given`, dv_t is the gradient of the output, else the sum of the accumulate passes.
  void differentiate(int64_t t, int64_t begin, int64_t end, bool given) {
    Update<T> at = update(t);
    at.sum = sums.high();
    at.low = sums.low();
    at.ds = ds.get() + t * context.layout.vectors();
    if (given) at.dv = in.dv;
    if (p.softmax_in()) at.c_dc = c_dc.get() + t * context.layout.scalars();
    const Buffer<T> scratch((given ? 2 : 1) * p.J * p.D * context.layout.lanes());
    for (int64_t tile = begin; tile < end; ++tile) {
      context.tiles().differentiate(at, tile, scratch.get());
      if (!p.softmax_in() || !given || in.dcoupling.data == nullptr) continue;
      for (int64_t b = tile * context.layout.lanes(); b < std::min(p.B, (tile + 1) * context.layout.lanes()); ++b) {
        // sum_i c dc = ds . s, because dc = votes . ds and s = sum_i c votes. dcoupling adds its own term to dc.
        const Place place = context.layout.of(b);
        for (int64_t j = 0; j < p.J; ++j) at.c_dc[place.scalar + j * place.stride] += coupling_gradient(b, j);
      }
    }
  }

  // With the softmax over the input capsules, db = c (dc - c_dc) adds up to 0 over i if c_dc = sum_i c dc. But c_dc is
  // computed from rounded sums, as ds . s, and the difference cancels where c is nearly 1. So the sum of db that the
  // pass found is what c_dc lacks, and s times that sum is what G has too much. The leaky entry has c too, but no db.
  void correct(int64_t t) const {
    const Layout& layout = context.layout;
    const T* const s = static_cast<const T*>(in.s) + t * in.batch * p.J * p.D;
    const int64_t scalars = t * layout.scalars();
    parallel(p.B, context.grain(), [&](int64_t begin, int64_t end) {
      for (int64_t n = begin * p.J; n < end * p.J; ++n) {
        const Place at = layout.of(n / p.J);
        const int64_t scalar = at.scalar + n % p.J * at.stride, vector = at.vector + n % p.J * p.D * at.stride;
        T rest = 0;
        for (int64_t split = 0; split < context.plan.splits; ++split)
          rest += db.total(split * layout.scalars() + scalar);
        T& mean = c_dc.get()[scalars + scalar];
        if (p.leaky) rest -= std::exp(-in_norm.max()[scalars + scalar]) * in_norm.scale()[scalars + scalar] * mean;
        mean += rest;
        if (t == first) continue;
        for (int64_t d = 0; d < p.D; ++d) sums.low()[vector + d * at.stride] -= rest * s[n * p.D + d];
      }
    });
  }

  T coupling_gradient(int64_t b, int64_t j) const {
    T total = 0;
    const View &c = in.coupling, &dc = in.dcoupling;
    for (int64_t i = 0; i < p.I; ++i) {
      total += read<T>(c, b * c.stride[0] + i * c.stride[1] + j * c.stride[2]) *
               read<T>(dc, b * dc.stride[0] + i * dc.stride[1] + j * dc.stride[2]);
    }
    return total;
  }

  void sum_bias() {
    for (int64_t t = first; t < p.iterations; ++t) {
      for (int64_t b = 0; b < p.B; ++b) {
        const Place at = context.layout.of(b);
        const T* from = ds.get() + t * context.layout.vectors() + at.vector;
        for (int64_t n = 0; n < p.J * p.D; ++n) totals.dbias[n] += from[n * at.stride];
      }
    }
  }

  void gradient_pass() {
    GradientPass<T> pass;
    pass.since = first;
    pass.score.linear = V.get();
    pass.gradient.linear = ds.get();
    pass.in_max = in_norm.max();
    pass.in_scale = in_norm.scale();
    pass.c_dc = c_dc.get();
    pass.dcoupling = in.dcoupling;
    context.gradient(context.plan, pass, out, totals.dlogits, totals.weights);
  }

  Context<T> context;
  const Problem& p;
  const BackwardInputs& in;
  const BackwardOutputs& out;
  const Totals<T>& totals;
  int64_t first;
  Buffer<T> V, ds;
  Sums<T> sums;
  InNormArrays<T> in_norm;
  Buffer<T> c_dc;
  Sums<T> db;  // of a pass, summed over the input capsules
  std::vector<T> bias;
};

}  // namespace capsfast::driver
