// The backward of a routing or of a routing_pass.
//
// A routing runs an accumulate pass for each iteration from the last to the second. These passes give the gradients of
// the sums of every iteration; for a routing_pass these gradients are arguments. Then one gradient pass serves all
// iterations. For a routing_pass the gradient pass also sums over the input capsules, which gives the gradients of
// output capsules. These sums may take a separate pass: a gradient pass without other gradients.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "forward.h"

namespace capsfast::driver {

// The tensors of a backward. A routing_pass has `in`, `saved` and `out`. A routing has dv, s and out.common; of `saved`
// it has batch, norm, and weights and dweights for its coupling.
template <class T>
struct BackwardCall {
  PassInputs in;
  PassSaved saved;
  PassGradients out;
  View dv;                  // [B, J, D]
  const void* s = nullptr;  // [r, B, J, D]

  BackwardOutputs& gradients() { return out.common; }
  BackwardCall from(const Problem& p, int64_t n) const {
    BackwardCall part = *this;
    PassSaved& kept = part.saved;
    PassGradients& g = part.out;
    g.common = samples(p, out.common, n);
    begin_at(p, n, {&part.in.query, &part.in.precision, &part.in.center, &part.in.prior, &kept.dmass,
                    &kept.dfirst,   &kept.dsecond,      &kept.dweights,  &kept.dlse,     &kept.mass,
                    &kept.first,    &kept.second,       &kept.weights,   &g.dquery,      &g.dprecision,
                    &g.dcenter,     &g.dprior,          &g.dactivation,  &g.dlse,        &part.dv});
    if (!p.moments && p.has_positions()) return part;
    if (!p.moments) part.s = static_cast<const T*>(s) + n * p.J * p.D;
    if (p.softmax_in()) kept.norm = static_cast<const T*>(saved.norm) + n * p.J;
    return part;
  }
  Parts parts(const Problem& p) const { return parts_of<T>(p, num_threads(), out.common); }
  void run(const Problem& p, const Totals<T>& totals) const;
};

template <class T>
class Backward {
 public:
  Backward(const Problem& problem, const BackwardCall<T>& tensors, const Totals<T>& sums_of_parts)
      : context(problem, sums_of_parts.threads),
        p(problem),
        call(tensors),
        out(tensors.out),
        saved(tensors.saved),
        totals(sums_of_parts),
        since(problem.gradient_last ? problem.iterations - 1 : 0),
        score(context, tensors.in, p.iterations),
        gradient(context, saved.dfirst, saved.dsecond, T(1), saved.dmass, p.iterations),
        sums(p.moments ? 0 : context.plan.splits * context.layout.vectors()),
        in_norm(p, context.layout, saved.norm, saved.batch, 0, p.softmax_in() ? p.iterations : 0),
        c_dc(p.softmax_in() ? p.iterations * context.layout.scalars() : 0),
        db(p.softmax_in() && !p.moments ? context.plan.splits * context.layout.scalars() : 0),
        in_dlse(p.softmax_in() && saved.dlse.data != nullptr ? context.layout.scalars() : 0),
        bias(bias_of<T>(p)) {}

  void run() {
    const BackwardOutputs& common = out.common;
    const bool outputs = out.dquery.data != nullptr || out.dprecision.data != nullptr || out.dcenter.data != nullptr ||
                         out.dprior.data != nullptr;
    const bool inputs = common.du.data != nullptr || common.dweight.data != nullptr || common.dlogits.data != nullptr ||
                        out.dactivation.data != nullptr || out.dlse.data != nullptr;
    if (p.softmax_in()) std::fill_n(c_dc.get(), p.iterations * context.layout.scalars(), T(0));
    if (!p.moments) {
      differentiate_iterations();
      if (totals.dbias != nullptr) sum_bias();
    } else if (p.softmax_in() && (outputs || inputs)) {
      mean_gradients();
      if (saved.dlse.data != nullptr) context.load(saved.dlse, p.J, 1, T(1), in_dlse.get());
    }
    if (outputs || inputs) gradient_pass(outputs, inputs);
  }

 private:
  // ---- A routing: from dv to ds of every iteration. ----

  void differentiate_iterations() {
    const int64_t r = p.iterations, vectors = context.layout.vectors(), scalars = context.layout.scalars();
    context.over_tiles([&](int64_t begin, int64_t end) {
      restore(begin, end);
      differentiate(r - 1, begin, end);
    });
    // Iteration `since` needs no gradient of V. If the logits need a gradient, it still takes a pass, which corrects
    // c_dc.
    const bool corrects_since = p.softmax_in() && out.common.dlogits.data != nullptr;
    for (int64_t t = r - 1; t > since || (t == since && corrects_since); --t) {
      AccumulatePass<T> pass;
      if (score.scores(t)) pass.score.linear = score.V() + t * vectors;
      pass.gradient.linear = ds(t);
      if (p.softmax_in()) {
        pass.in_max = in_norm.max() + t * scalars;
        pass.in_scale = in_norm.scale() + t * scalars;
        pass.c_dc = c_dc.get() + t * scalars;
        pass.mass = db.sum();
        db.clear();
      }
      if (t == r - 1) pass.dcoupling = saved.dweights;
      // If each v is part of every later V, its gradient G is the sum over all passes so far, so the sums are not
      // cleared.
      if (t == r - 1 || !p.squash.accumulate) sums.clear();
      if (t > since) pass.first = sums.sum();
      context.accumulate(pass);
      if (p.softmax_in()) correct(t);
      if (t == since) break;
      context.over_tiles([&](int64_t begin, int64_t end) { differentiate(t - 1, begin, end); });
    }
  }

  T* ds(int64_t t) const { return gradient.linear() + t * context.layout.vectors(); }

  // Computes V of every iteration from the saved s, in the layout of the passes.
  void restore(int64_t begin, int64_t end) {
    for (int64_t tile = begin; tile < end; ++tile) {
      for (int64_t t = 0; t + 1 < p.iterations; ++t) context.tiles().restore(update(t), tile);
    }
  }

  Update<T> update(int64_t t) {
    Update<T> at = context.update(bias);
    at.V = score.V() + t * context.layout.vectors();
    at.s = const_cast<T*>(static_cast<const T*>(call.s) + t * saved.batch * p.J * p.D);
    return at;
  }

  // Computes ds_t from dv_t. In the last iteration dv_t is the gradient of the output, else the sum of the accumulate
  // passes.
  void differentiate(int64_t t, int64_t begin, int64_t end) {
    const bool last = t + 1 == p.iterations;
    Update<T> at = update(t);
    at.sum = sums.high();
    at.low = sums.low();
    at.ds = ds(t);
    if (last) at.dv = call.dv;
    if (p.softmax_in()) at.c_dc = c_dc.get() + t * context.layout.scalars();
    const Buffer<T> scratch((last ? 2 : 1) * p.J * p.D * context.layout.lanes());
    for (int64_t tile = begin; tile < end; ++tile) {
      context.tiles().differentiate(at, tile, scratch.get());
      if (!p.softmax_in() || !last || saved.dweights.data == nullptr) continue;
      for (int64_t b = tile * context.layout.lanes(); b < std::min(p.B, (tile + 1) * context.layout.lanes()); ++b) {
        // sum_i c dc = ds . s, because dc = votes . ds and s = sum_i c votes. dcoupling adds its own term to dc.
        const Place place = context.layout.of(b);
        for (int64_t j = 0; j < p.J; ++j)
          at.c_dc[place.scalar + j * place.stride] += sum_of_products<T>(saved.weights, saved.dweights, b, j, p.I, 1);
      }
    }
  }

  // With the softmax over the input capsules, db = c (dc - c_dc) adds up to 0 over i if c_dc = sum_i c dc. But c_dc is
  // computed from rounded sums, as ds . s, and the difference cancels where c is nearly 1. So the pass also sums db:
  // c_dc is too small by this sum, and G is too large by s times this sum. The leaky entry has a coupling, too, but no
  // db.
  void correct(int64_t t) const {
    const Layout& layout = context.layout;
    const T* const s = static_cast<const T*>(call.s) + t * saved.batch * p.J * p.D;
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
        if (t == since) continue;
        for (int64_t d = 0; d < p.D; ++d) sums.low()[vector + d * at.stride] -= rest * s[n * p.D + d];
      }
    });
  }

  void sum_bias() {
    for (int64_t t = since; t < p.iterations; ++t) {
      for (int64_t b = 0; b < p.B; ++b) {
        const Place at = context.layout.of(b);
        const T* from = ds(t) + at.vector;
        for (int64_t n = 0; n < p.J * p.D; ++n) totals.dbias[n] += from[n * at.stride];
      }
    }
  }

  // ---- A pass. ----

  // For a softmax over the input capsules: sum_i R dR. It is the sum of the moments times their gradients, so no pass
  // is needed. The sum is in double, because its terms are later subtracted from it.
  void mean_gradients() {
    for (int64_t b = 0; b < p.B; ++b) {
      const Place at = context.layout.of(b);
      for (int64_t j = 0; j < p.J; ++j) {
        c_dc.get()[at.scalar + j * at.stride] = static_cast<T>(
            sum_of_products<double>(saved.mass, saved.dmass, b, j, 1, 2) +
            sum_of_products<double>(saved.first, saved.dfirst, b, j, p.D, 2) +
            sum_of_products<double>(saved.second, saved.dsecond, b, j, p.D, 2) +
            sum_of_products<double>(saved.weights, saved.dweights, b, j, p.I, 1));
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
  void add(int64_t splits, const Sums<T>& sums_of_splits, int64_t size, T factor) const {
    parallel(size, 4096, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) {
        T total = 0;
        for (int64_t split = 0; split < splits; ++split) total += sums_of_splits.total(split * size + n);
        sums_of_splits.high()[n] = factor * total;
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
      if (score.scores(0)) total += b.linear[n] * dprior[scalar] + 2 * b.square[n] * dquery[n];
      result.get()[n] = -total;
    }
    context.save(result.get(), p.J, p.D, out.dcenter);
  }

  // ---- Both. ----

  // The sum of x dx over `size` elements along an axis of [B, J, D] (2) or [B, I, J] (1); 0 without dx.
  template <class Wide>
  static Wide sum_of_products(const View& x, const View& dx, int64_t b, int64_t j, int64_t size, int64_t axis) {
    Wide total = 0;
    if (dx.data == nullptr) return total;
    const int64_t from = b * x.stride[0] + j * x.stride[3 - axis], dfrom = b * dx.stride[0] + j * dx.stride[3 - axis];
    for (int64_t n = 0; n < size; ++n)
      total += Wide(read<T>(x, from + n * x.stride[axis])) * Wide(read<T>(dx, dfrom + n * dx.stride[axis]));
    return total;
  }

  // outputs: gradients of output capsules are wanted; inputs: gradients of input capsules are wanted.
  void gradient_pass(bool outputs, bool inputs) {
    GradientPass<T> pass;
    pass.since = since;
    pass.center = score.center(p);
    if (!p.moments || score.scores(0)) pass.score = score.form();
    pass.scored = score.scores(0) ? 0 : 1;
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
    for (const Sums<T>* of_outputs : {&mass, &first, &second}) of_outputs->clear();
    if (outputs) pass.mass = mass.sum(), pass.first = first.sum();
    if (out.dprecision.data != nullptr) pass.second = second.sum();
    if (apart) {
      WeightSums<T> none;
      context.gradient(cut, pass, BackwardOutputs{}, nullptr, &none);
      pass.mass = pass.first = pass.second = Sum<T>{};
    }
    pass.dactivation = out.dactivation;
    pass.dlse_given = out.dlse;
    if (inputs || !apart) context.gradient(context.plan, pass, out.common, totals.dlogits, totals.weights);
    if (outputs) write_outputs(splits, mass, first, second);
  }

  Context<T> context;
  const Problem& p;
  const BackwardCall<T>& call;
  const PassGradients& out;
  const PassSaved& saved;
  const Totals<T>& totals;
  int64_t since;  // iterations from `since` on have gradients
  Score<T> score;
  FormArrays<T> gradient;  // of the sums: ds_t in a routing
  Sums<T> sums;            // of an accumulate pass
  InNormArrays<T> in_norm;
  Buffer<T> c_dc;
  Sums<T> db;  // of an accumulate pass, summed over the input capsules
  Buffer<T> in_dlse;
  std::vector<T> bias;
};

template <class T>
void BackwardCall<T>::run(const Problem& p, const Totals<T>& totals) const {
  BackwardCall part = *this;
  const Intermediate<T> intermediate(p);
  intermediate.route();
  intermediate.replace(&part.saved, &part.s);
  Backward<T>(p, part, totals).run();
}

}  // namespace capsfast::driver
