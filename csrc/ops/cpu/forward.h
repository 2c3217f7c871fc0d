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
      if (context.plan.lanes) {
        parallel(context.plan.tiles, context.tile_grain(),
                 [&](int64_t begin, int64_t end) { finish_tiles(pass.unweighted, t, begin, end); });
      } else {
        parallel(p.B, context.grain(), [&](int64_t begin, int64_t end) {
          for (int64_t b = begin; b < end; ++b) finish(pass.unweighted, t, b);
        });
      }
      if (wants_coupling && p.softmax_in()) write_coupling(t);
    }
  }

 private:
  // The factors with which the sums of the splits add up to s of sample b. Output capsule j of split n has factor[(n J
  // + j) stride]. Saves the normalisers of the softmax over the input capsules.
  void factors(bool unweighted, int64_t t, int64_t b, T* factor, int64_t stride) const {
    const Place at = context.layout.of(b);
    const int64_t splits = context.plan.splits;
    const int64_t counted = !unweighted      ? 0
                            : p.softmax_in() ? valid_count(p.mask, b, p.I)
                                             : valid_count(p.out_mask, b, p.J);
    const T entries = static_cast<T>(counted + (p.leaky ? 1 : 0));
    for (int64_t j = 0; j < p.J; ++j) {
      const int64_t scalar = at.scalar + j * at.stride;
      // With softmax "in" c is exp(b - in_max) scale. Else c is the coefficient that the pass used, times scale.
      T scale = unweighted ? (context.is_valid(b, j) && entries > 0 ? 1 / entries : T(0)) : T(1), in_max = 0;
      if (p.softmax_in()) {
        if (!unweighted) {
          const auto [max, norm] = norms.combined(scalar);
          in_max = max;
          scale = norm == 0 ? T(0) : 1 / norm;
        }
        T* to = static_cast<T*>(out.norm) + (t * out.batch + b) * p.J + j;
        to[0] = in_max;
        to[p.iterations * out.batch * p.J] = scale;
      }
      for (int64_t split = 0; split < splits; ++split) {
        T& to = factor[(split * p.J + j) * stride];
        to = scale;
        if (p.softmax_in() && !unweighted) to *= norms.rescaling(split, scalar, in_max);
      }
    }
  }

  // s_t, v_t and V_t of one sample from the partial sums.
  void finish(bool unweighted, int64_t t, int64_t b) {
    const Place at = context.layout.of(b);
    const int64_t splits = context.plan.splits, pitch = context.layout.vectors();
    std::vector<T> factor(static_cast<size_t>(splits * p.J));
    factors(unweighted, t, b, factor.data(), 1);
    T* s = static_cast<T*>(out.s) + (t * out.batch + b) * p.J * p.D;
    for (int64_t j = 0; j < p.J; ++j) {
      for (int64_t d = 0; d < p.D; ++d) s[j * p.D + d] = 0;
      for (int64_t split = 0; split < splits; ++split) {
        const T f = factor[static_cast<size_t>(split * p.J + j)];
        const int64_t part = split * pitch + at.vector + j * p.D * at.stride;
        for (int64_t d = 0; d < p.D; ++d) s[j * p.D + d] += f * sums.total(part + d * at.stride);
      }
      add_output(s + j * p.D, j, context.is_valid(b, j), V.get() + at.vector + j * p.D * at.stride, at.stride,
                 t + 1 == p.iterations ? b : -1);
    }
  }

  // The same in lanes, for tiles of samples.
  void finish_tiles(bool unweighted, int64_t t, int64_t begin, int64_t end) {
    const int64_t L = context.plan.L, size = context.plan.splits * p.J * L;
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
      for (int64_t b = tile * L; b < std::min(p.B, (tile + 1) * L); ++b)
        factors(unweighted, t, b, factor.get() + b % L, L);
      context.kernel_table.lanes_outputs(at, tile);
    }
  }

  // Squashes s + bias of output capsule j to v. In the last iteration v is the result of sample last_of_sample. Before,
  // last_of_sample is -1 and v is added to V_t.
  void add_output(const T* s, int64_t j, bool valid, T* V_t, int64_t stride, int64_t last_of_sample) const {
    const T* bias_j = bias.data() + j * p.D;
    T n = 0;
    for (int64_t d = 0; d < p.D; ++d) n += (s[d] + bias_j[d]) * (s[d] + bias_j[d]);
    const T f = p.squash.factor(last_of_sample >= 0, n);
    for (int64_t d = 0; d < p.D; ++d) {
      const T v = valid ? f * (s[d] + bias_j[d]) : T(0);
      if (last_of_sample >= 0) {
        write<T>(out.v, last_of_sample * out.v.stride[0] + j * out.v.stride[1] + d * out.v.stride[2], v);
      } else {
        V_t[d * stride] += v;
      }
    }
  }

  // With softmax "in" the coupling takes a pass of its own, with the V that the last iteration scored with.
  void write_coupling(int64_t t) {
    InNormArrays<T> in_norm(context.layout, 1);
    for (int64_t b = 0; b < p.B; ++b) {
      in_norm.restore(static_cast<const T*>(out.norm), p, out.batch, t, b, context.layout.of(b), 0);
    }
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
