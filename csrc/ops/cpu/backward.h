// The backward: an accumulate pass for each iteration from the last to the second, then one gradient pass for all of
// them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "context.h"
#include "routing.h"

namespace capsfast::driver {

template <class T>
class Backward {
 public:
  // Adds to dlogits_sum [I, J] and dbias_sum [J, D], each null if it is not wanted.
  Backward(const Problem& problem, const BackwardInputs& inputs, const BackwardOutputs& outputs, double* dlogits_sum,
           double* dbias_sum, int64_t threads)
      : context(problem, threads),
        p(problem),
        in(inputs),
        out(outputs),
        dlogits_sum_(dlogits_sum),
        dbias_sum_(dbias_sum),
        first(problem.gradient_last ? problem.iterations - 1 : 0),
        V(p.iterations * context.layout.vectors()),
        ds(p.iterations * context.layout.vectors()),
        sums(context.plan.splits * context.layout.vectors()),
        in_norm(context.layout, p.softmax_in() ? p.iterations : 0),
        c_dc(p.softmax_in() ? p.iterations * context.layout.scalars() : 0),
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
    if (context.plan.lanes) {
      parallel(context.plan.tiles, context.tile_grain(), [&](int64_t begin, int64_t end) {
        restore_tiles(begin, end);
        differentiate_tiles(r - 1, begin, end, true);
      });
    } else {
      parallel(p.B, context.grain(), [&](int64_t begin, int64_t end) {
        for (int64_t b = begin; b < end; ++b) {
          restore(b);
          differentiate(r - 1, b, true);
        }
      });
    }
    for (int64_t t = r - 1; t > first; --t) {
      AccumulatePass<T> pass;
      pass.score.linear = V.get() + t * pitch;
      pass.gradient.linear = ds.get() + t * pitch;
      if (p.softmax_in()) {
        pass.in_max = in_norm.max() + t * context.layout.scalars();
        pass.in_scale = in_norm.scale() + t * context.layout.scalars();
        pass.c_dc = c_dc.get() + t * context.layout.scalars();
      }
      if (t == r - 1) pass.dcoupling = in.dcoupling;
      pass.first = sums.sum();
      // The sums go on over the iterations: each v is part of every later V, so its gradient G is the sum over all
      // passes so far.
      if (t == r - 1) sums.clear();
      context.accumulate(pass);
      if (context.plan.lanes) {
        parallel(context.plan.tiles, context.tile_grain(),
                 [&](int64_t begin, int64_t end) { differentiate_tiles(t - 1, begin, end, false); });
      } else {
        parallel(p.B, context.grain(), [&](int64_t begin, int64_t end) {
          for (int64_t b = begin; b < end; ++b) differentiate(t - 1, b, false);
        });
      }
    }
    if (dbias_sum_ != nullptr) sum_bias();
    if (out.du.data != nullptr || out.dweight.data != nullptr || out.dlogits.data != nullptr) gradient_pass();
  }

 private:
  // Computes V of every iteration of sample b from the saved s, and copies the normalisers, in the layout of the
  // passes.
  void restore(int64_t b) {
    const Place at = context.layout.of(b);
    const int64_t pitch = context.layout.vectors();
    for (int64_t t = 0; t + 1 < p.iterations; ++t) {
      const T* s = saved_s(t, b);
      for (int64_t j = 0; j < p.J; ++j) {
        const bool valid = context.is_valid(b, j);
        T n = 0;
        for (int64_t d = j * p.D; d < (j + 1) * p.D; ++d) n += biased(s, d) * biased(s, d);
        const T f = p.squash.factor(false, n);
        for (int64_t d = j * p.D; d < (j + 1) * p.D; ++d) {
          const int64_t here = t * pitch + at.vector + d * at.stride;
          V.get()[here + pitch] = V.get()[here] + (valid ? f * biased(s, d) : T(0));
        }
      }
    }
    restore_norms(b);
  }

  void restore_norms(int64_t b) {
    if (!p.softmax_in()) return;
    for (int64_t t = 0; t < p.iterations; ++t)
      in_norm.restore(static_cast<const T*>(in.norm), p, in.batch, t, b, context.layout.of(b), t);
  }

  // The same in lanes, for tiles of samples.
  void restore_tiles(int64_t begin, int64_t end) {
    for (int64_t tile = begin; tile < end; ++tile) {
      for (int64_t t = 0; t + 1 < p.iterations; ++t) context.kernel_table.lanes_restore(update(t), tile);
    }
    for (int64_t b = begin * context.plan.L; b < std::min(p.B, end * context.plan.L); ++b) restore_norms(b);
  }

  Update<T> update(int64_t t) {
    Update<T> at = context.update(bias);
    at.V = V.get() + t * context.layout.vectors();
    at.s = const_cast<T*>(saved_s(t, 0));
    return at;
  }

  T biased(const T* s, int64_t row) const { return s[row] + bias[static_cast<size_t>(row)]; }
  const T* saved_s(int64_t t, int64_t b) const { return static_cast<const T*>(in.s) + (t * in.batch + b) * p.J * p.D; }

  // Computes ds_t from dv_t: if `given`, dv_t is the gradient of the output, else the sum of the accumulate passes.
  void differentiate(int64_t t, int64_t b, bool given) {
    const Place at = context.layout.of(b);
    const int64_t pitch = context.layout.vectors();
    const T* s = saved_s(t, b);
    std::vector<T> dv(static_cast<size_t>(p.D));
    for (int64_t j = 0; j < p.J; ++j) {
      T n = 0, s_dv = 0, total = 0;
      T* to = ds.get() + t * pitch + at.vector + j * p.D * at.stride;
      for (int64_t d = 0; d < p.D; ++d) {
        T& g = dv[static_cast<size_t>(d)];
        g = 0;
        if (given) {
          g = read<T>(in.dv, b * in.dv.stride[0] + j * in.dv.stride[1] + d * in.dv.stride[2]);
        } else {
          for (int64_t split = 0; split < context.plan.splits; ++split)
            g += sums.total(split * pitch + at.vector + (j * p.D + d) * at.stride);
        }
        n += biased(s, j * p.D + d) * biased(s, j * p.D + d);
        s_dv += biased(s, j * p.D + d) * g;
      }
      const bool valid = context.is_valid(b, j);
      const T f = p.squash.factor(given, n), slope = 2 * p.squash.derivative(given, n) * s_dv;
      for (int64_t d = 0; d < p.D; ++d) {
        const T value = valid ? f * dv[static_cast<size_t>(d)] + slope * biased(s, j * p.D + d) : T(0);
        to[d * at.stride] = value;
        total += value * s[j * p.D + d];
      }
      if (!p.softmax_in()) continue;
      // sum_i c dc = ds . s, because dc = votes . ds and s = sum_i c votes. dcoupling adds its own term to dc.
      if (given && in.dcoupling.data != nullptr) total += coupling_gradient(b, j);
      c_dc.get()[t * context.layout.scalars() + at.scalar + j * at.stride] = total;
    }
  }

  void differentiate_tiles(int64_t t, int64_t begin, int64_t end, bool given) {
    Update<T> at = update(t);
    at.sum = sums.high();
    at.low = sums.low();
    at.ds = ds.get() + t * context.layout.vectors();
    if (given) at.dv = in.dv;
    if (p.softmax_in()) at.c_dc = c_dc.get() + t * context.layout.scalars();
    const Buffer<T> scratch((given ? 2 : 1) * p.J * p.D * context.plan.L);
    for (int64_t tile = begin; tile < end; ++tile) {
      context.kernel_table.lanes_differentiate(at, tile, scratch.get());
      if (!p.softmax_in() || !given || in.dcoupling.data == nullptr) continue;
      for (int64_t b = tile * context.plan.L; b < std::min(p.B, (tile + 1) * context.plan.L); ++b) {
        const Place place = context.layout.of(b);
        for (int64_t j = 0; j < p.J; ++j) at.c_dc[place.scalar + j * place.stride] += coupling_gradient(b, j);
      }
    }
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
        for (int64_t n = 0; n < p.J * p.D; ++n) dbias_sum_[n] += from[n * at.stride];
      }
    }
  }

  void gradient_pass() {
    GradientPass<T> pass;
    pass.first = first;
    pass.score.linear = V.get();
    pass.gradient.linear = ds.get();
    pass.in_max = in_norm.max();
    pass.in_scale = in_norm.scale();
    pass.c_dc = c_dc.get();
    pass.dcoupling = in.dcoupling;
    WeightSums<T> weights;
    context.gradient(pass, out, dlogits_sum_, &weights);
  }

  Context<T> context;
  const Problem& p;
  const BackwardInputs& in;
  const BackwardOutputs& out;
  double *dlogits_sum_, *dbias_sum_;
  int64_t first;
  Buffer<T> V, ds;
  Sums<T> sums;
  InNormArrays<T> in_norm;
  Buffer<T> c_dc;
  std::vector<T> bias;
};

}  // namespace capsfast::driver
