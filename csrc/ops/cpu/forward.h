// The forward: each iteration is an accumulate pass, after which s_t, v_t and V_t are computed from its sums.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "context.h"
#include "routing.h"

namespace capsfast::driver {

template <class T>
class Forward {
 public:
  Forward(const Problem& problem, const ForwardOutputs& outputs, int64_t threads)
      : context(problem, threads),
        p(problem),
        out(outputs),
        V(context.layout.vectors()),
        sums(context.plan.splits * context.layout.vectors()),
        norms(p, context.plan, context.layout),
        bias(static_cast<size_t>(p.J * p.D), T(0)) {
    std::fill_n(V.get(), context.layout.vectors(), T(0));
    if (p.bias.data != nullptr)
      gather<T>(p.bias, 0, {1, p.J, p.D}, {0, p.bias.stride[0], p.bias.stride[1]}, bias.data());
  }

  void run() {
    for (int64_t t = 0; t < p.iterations; ++t) {
      const bool last = t + 1 == p.iterations;
      const bool wants_coupling = last && out.coupling.data != nullptr;
      AccumulatePass<T> pass;
      pass.score.linear = t == 0 ? nullptr : V.get();
      // With softmax "in", c is known only after the pass.
      if (wants_coupling && !p.softmax_in()) pass.coupling = out.coupling;
      // The unweighted pass over the poses is a matrix product, which cannot leave out masked votes.
      const bool masked = !p.votes_given && p.mask.data != nullptr;
      pass.unweighted = t == 0 && p.logits.data == nullptr && pass.coupling.data == nullptr && !masked;
      sums.clear();
      pass.first = sums.sum();
      norms.start(&pass);
      context.accumulate(pass);
      norms.finish();
      context.over_tiles([&](int64_t begin, int64_t end) { finish(pass.unweighted, t, begin, end); });
      if (wants_coupling && p.softmax_in()) write_coupling(t);
    }
  }

 private:
  // s_t, v_t and V_t of tiles of samples from the partial sums.
  void finish(bool unweighted, int64_t t, int64_t begin, int64_t end) {
    const int64_t L = context.layout.lanes(), size = context.plan.splits * p.J * L;
    const Buffer<T> factor(size);
    std::fill_n(factor.get(), size, T(0));
    Update<T> at = context.update(bias);
    at.sum = sums.high();
    at.low = sums.low();
    if (t + 1 < p.iterations) at.V = V.get();
    at.s = static_cast<T*>(out.s) + t * out.batch * p.J * p.D;
    at.factor = factor.get();
    if (t + 1 == p.iterations) at.v = out.v;
    for (int64_t tile = begin; tile < end; ++tile) {
      for (int64_t b = tile * L; b < std::min(p.B, (tile + 1) * L); ++b) {
        T* const kept = static_cast<T*>(out.norm) + (p.softmax_in() ? (t * out.batch + b) * p.J : 0);
        for (int64_t j = 0; j < p.J; ++j)
          norms.factors(context, unweighted, b, j, kept + j, p.iterations * out.batch * p.J,
                        factor.get() + j * L + b % L, p.J * L);
      }
      context.tiles().outputs(at, tile);
    }
  }

  // With softmax "in" the coupling takes a pass of its own, with the V that the last iteration scored with.
  void write_coupling(int64_t t) {
    const InNormArrays<T> in_norm(p, context.layout, out.norm, out.batch, t, 1);
    AccumulatePass<T> pass;
    pass.score.linear = t == 0 ? nullptr : V.get();
    pass.in_max = in_norm.max();
    pass.in_scale = in_norm.scale();
    pass.coupling = out.coupling;
    context.accumulate(pass);
  }

  Context<T> context;
  const Problem& p;
  const ForwardOutputs& out;
  Buffer<T> V;
  Sums<T> sums;
  InNorms<T> norms;
  std::vector<T> bias;
};

}  // namespace capsfast::driver
