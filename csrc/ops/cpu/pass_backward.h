// The backward of a pass: a gradient pass, whose sums give the gradients of output capsules. If the sums take a pass of
// their own, it is the same pass without other gradients.
#pragma once

#include <algorithm>
#include <cstdint>

#include "parts.h"
#include "pass_score.h"

namespace capsfast::driver {

template <class T>
class PassBackward {
 public:
  PassBackward(const Problem& problem, const PassInputs& inputs, const PassSaved& saved_, const PassGradients& outputs,
               const Totals<T>& sums_of_parts)
      : context(problem, sums_of_parts.threads),
        p(problem),
        saved(saved_),
        out(outputs),
        totals(sums_of_parts),
        score(context, inputs),
        gradient(context, saved.dfirst, saved.dsecond, T(1), saved.dmass),
        in_norm(p, context.layout, saved.norm, saved.batch, 0, p.softmax_in() ? 1 : 0),
        c_dc(p.softmax_in() ? context.layout.scalars() : 0),
        in_dlse(p.softmax_in() && saved.dlse.data != nullptr ? context.layout.scalars() : 0) {
    if (!p.softmax_in()) return;
    mean_gradients();
    if (saved.dlse.data != nullptr) context.load(saved.dlse, p.J, 1, T(1), in_dlse.get());
  }

  void run() {
    const BackwardOutputs& common = out.common;
    const bool outputs = out.dquery.data != nullptr || out.dprecision.data != nullptr || out.dcenter.data != nullptr ||
                         out.dprior.data != nullptr;
    const bool inputs = common.du.data != nullptr || common.dweight.data != nullptr || common.dlogits.data != nullptr ||
                        out.dactivation.data != nullptr || out.dlse.data != nullptr;
    if (!outputs && !inputs) return;
    GradientPass<T> pass;
    pass.center = score.center(p);
    pass.score = score.form();
    pass.scored = score.scored() ? 0 : 1;
    pass.gradient = gradient.form();
    pass.dcoupling = saved.dweights;
    if (p.normalize == Normalize::out) pass.dlse = saved.dlse;
    if (p.softmax_in()) {
      pass.in_max = in_norm.max();
      pass.in_scale = in_norm.scale();
      pass.c_dc = c_dc.get();
      if (saved.dlse.data != nullptr) pass.in_dlse = in_dlse.get();
    }
    Plan cut = context.plan;
    const bool apart = outputs && cut.sums_apart;
    if (apart) cut.gradient_groups = cut.tile_groups, cut.gradient_splits = cut.splits;
    const int64_t splits = outputs ? cut.gradient_splits : 0;
    const Sums<T> mass(splits * context.layout.scalars()), first(splits * context.layout.vectors()),
        second(out.dprecision.data != nullptr ? splits * context.layout.vectors() : 0);
    for (const Sums<T>* sums : {&mass, &first, &second}) sums->clear();
    if (outputs) pass.mass = mass.sum(), pass.first = first.sum();
    if (out.dprecision.data != nullptr) pass.second = second.sum();
    if (apart) {
      WeightSums<T> none;
      context.gradient(cut, pass, BackwardOutputs{}, nullptr, &none);
      pass.mass = pass.first = pass.second = Sum<T>{};
    }
    pass.dactivation = out.dactivation;
    pass.dlse_given = out.dlse;
    if (inputs || !apart) context.gradient(context.plan, pass, common, totals.dlogits, totals.weights);
    if (outputs) write_outputs(splits, mass, first, second);
  }

 private:
  // For a softmax over the input capsules: sum_i R dR. No pass is needed: it is the sum of the moments times their
  // gradients.
  void mean_gradients() {
    std::fill_n(c_dc.get(), context.layout.scalars(), T(0));
    const auto product = [&](const View& x, const View& dx, int64_t b, int64_t j, int64_t size, int64_t axis) {
      double total = 0;  // in double, because its terms are later subtracted from it
      if (dx.data == nullptr) return total;
      const int64_t from = b * x.stride[0] + j * x.stride[3 - axis], dfrom = b * dx.stride[0] + j * dx.stride[3 - axis];
      for (int64_t n = 0; n < size; ++n) {
        total += double(read<T>(x, from + n * x.stride[axis])) * double(read<T>(dx, dfrom + n * dx.stride[axis]));
      }
      return total;
    };
    for (int64_t b = 0; b < p.B; ++b) {
      const Place at = context.layout.of(b);
      for (int64_t j = 0; j < p.J; ++j) {
        const double total =
            product(saved.mass, saved.dmass, b, j, 1, 2) + product(saved.first, saved.dfirst, b, j, p.D, 2) +
            product(saved.second, saved.dsecond, b, j, p.D, 2) + product(saved.weights, saved.dweights, b, j, p.I, 1);
        c_dc.get()[at.scalar + j * at.stride] = static_cast<T>(total);
      }
    }
  }

  // dprior, dquery and dprecision are the pass's sums; dcenter follows from them and the moments:
  //   dcenter = -sum_i dx = -(query dprior + 2 square dquery + mass dfirst + 2 first dsecond), square = -precision / 2
  void write_outputs(int64_t splits, const Sums<T>& mass, const Sums<T>& first, const Sums<T>& second) const {
    add(splits, mass, context.layout.scalars(), T(1));
    add(splits, first, context.layout.vectors(), T(1));
    context.save(mass.high(), p.J, 1, out.dprior);
    context.save(first.high(), p.J, p.D, out.dquery);
    if (out.dprecision.data != nullptr) {
      add(splits, second, context.layout.vectors(), T(-0.5));
      context.save(second.high(), p.J, p.D, out.dprecision);
    }
    if (out.dcenter.data != nullptr) write_dcenter(mass.high(), first.high());
  }

  // Adds up the splits, times `factor`.
  void add(int64_t splits, const Sums<T>& sums, int64_t size, T factor) const {
    parallel(size, 4096, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) {
        T total = 0;
        for (int64_t split = 0; split < splits; ++split) total += sums.total(split * size + n);
        sums.high()[n] = factor * total;
      }
    });
  }

  void write_dcenter(const T* dprior, const T* dquery) const {
    const int64_t vectors = context.layout.vectors(), L = context.layout.lanes();
    const Buffer<T> mass(context.layout.scalars()), first(vectors), result(vectors);
    context.load(saved.mass, p.J, 1, T(1), mass.get());
    context.load(saved.first, p.J, p.D, T(1), first.get());
    const Form<T> b = score.form(), g = gradient.form();
    for (int64_t n = 0; n < vectors; ++n) {
      const int64_t scalar = n / (p.D * L) * L + n % L;
      T total = mass.get()[scalar] * g.linear[n] + 2 * first.get()[n] * g.square[n];
      if (score.scored()) total += b.linear[n] * dprior[scalar] + 2 * b.square[n] * dquery[n];
      result.get()[n] = -total;
    }
    context.save(result.get(), p.J, p.D, out.dcenter);
  }

  Context<T> context;
  const Problem& p;
  const PassSaved& saved;
  const PassGradients& out;
  const Totals<T>& totals;
  Score<T> score;
  FormArrays<T> gradient;
  InNormArrays<T> in_norm;
  Buffer<T> c_dc, in_dlse;
};

}  // namespace capsfast::driver
