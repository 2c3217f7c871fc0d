// The forward of a pass: one accumulate pass; the sums of its splits add up to the moments.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "pass_score.h"

namespace capsfast::driver {

template <class T>
class PassForward {
 public:
  PassForward(const Problem& problem, const PassInputs& inputs, const PassOutputs& outputs, int64_t threads)
      : context(problem, threads),
        p(problem),
        out(outputs),
        score(context, inputs),
        first(context.plan.splits * context.layout.vectors()),
        second(p.quadratic && out.second.data != nullptr ? context.plan.splits * context.layout.vectors() : 0),
        mass(context.plan.splits * context.layout.scalars()),
        norms(p, context.plan, context.layout) {}

  void run() {
    AccumulatePass<T> pass;
    pass.center = score.center(p);
    pass.score = score.form();
    // With softmax "in" the weights are known only after the pass.
    if (!p.softmax_in()) pass.coupling = out.weights;
    if (p.normalize == Normalize::out) pass.lse = out.lse;
    // If all couplings of a sample are the same, the pass is a product of matrices.
    const bool masked = !p.votes_given && p.mask.data != nullptr;
    const bool softmax = p.normalize == Normalize::out || p.softmax_in();
    pass.unweighted = softmax && !score.scored() && !p.quadratic && p.logits.data == nullptr && !masked &&
                      p.activation.data == nullptr && out.weights.data == nullptr && out.lse.data == nullptr;
    first.clear();
    second.clear();
    mass.clear();
    pass.first = first.sum();
    if (out.second.data != nullptr) pass.second = second.sum();
    if (!pass.unweighted) pass.mass = mass.sum();
    norms.start(&pass);
    context.accumulate(pass);
    norms.finish();
    add_splits(pass.unweighted);
    context.save(mass.high(), p.J, 1, out.mass);
    context.save(first.high(), p.J, p.D, out.first);
    context.save(second.high(), p.J, p.D, out.second);
    if (p.softmax_in() && out.weights.data != nullptr) write_weights();
  }

 private:
  // Adds the sums of the other splits to the sums of the first. A row is an output capsule of a tile.
  void add_splits(bool unweighted) {
    const int64_t rows = context.plan.tiles * p.J, L = context.layout.lanes();
    parallel(rows, std::max<int64_t>(1, 4096 / std::max<int64_t>(1, p.D * L)), [&](int64_t begin, int64_t end) {
      std::vector<T> factors(static_cast<size_t>(context.plan.splits * L));
      for (int64_t row = begin; row < end; ++row) {
        for (int64_t l = 0; l < L; ++l) factor(unweighted, row, l, factors.data());
        add(first, row, p.D * L, factors);
        if (out.second.data != nullptr) add(second, row, p.D * L, factors);
        if (!unweighted) add(mass, row, L, factors);
      }
    });
  }

  // One split after the other, in loops that a compiler vectorises.
  void add(const Sums<T>& sums, int64_t row, int64_t size, const std::vector<T>& factors) const {
    const int64_t L = context.layout.lanes(), pitch = context.plan.tiles * p.J * size;
    T* const to = sums.high() + row * size;
    for (int64_t split = 0; split < context.plan.splits; ++split) {
      const T *high = to + split * pitch, *low = sums.low() + row * size + split * pitch,
              *f = factors.data() + split * L;
      const auto product = [&](int64_t n, int64_t l) { return f[l] * (high[n] + low[n]); };
      // Without lanes all numbers of a row have one factor.
      const int64_t step = L == 1 ? size : L;
      for (int64_t from = 0; from < size; from += step) {
        if (split == 0) {
          for (int64_t n = 0; n < step; ++n) to[from + n] = product(from + n, L == 1 ? 0 : n);
        } else {
          for (int64_t n = 0; n < step; ++n) to[from + n] += product(from + n, L == 1 ? 0 : n);
        }
      }
    }
  }

  // Computes the factors of the sums of every split, for lane l of a row. Saves the normalisers and the lse of the
  // softmax over the input capsules, and the mass if all couplings are the same.
  void factor(bool unweighted, int64_t row, int64_t l, T* factors) const {
    const int64_t L = context.layout.lanes(), tile = row / p.J, j = row % p.J, b = tile * L + l, scalar = row * L + l;
    const int64_t splits = context.plan.splits;
    for (int64_t split = 0; split < splits; ++split) factors[split * L + l] = 1;
    if (b >= p.B) return;
    const auto found = norms.factors(
        context, unweighted, b, j, static_cast<T*>(out.norm) + b * p.J + j, out.batch * p.J, factors + l, L);
    if (unweighted) mass.high()[scalar] = found.scale * static_cast<T>(valid_count(p.mask, b, p.I));
    if (out.lse.data == nullptr || !p.softmax_in()) return;
    const T lse = found.norm == 0 ? -std::numeric_limits<T>::infinity() : found.max + std::log(found.norm);
    write<T>(out.lse, b * out.lse.stride[0] + j * out.lse.stride[1], lse);
  }

  void write_weights() {
    const InNormArrays<T> in_norm(p, context.layout, out.norm, out.batch, 0, 1);
    AccumulatePass<T> pass;
    pass.center = score.center(p);
    pass.score = score.form();
    pass.in_max = in_norm.max();
    pass.in_scale = in_norm.scale();
    pass.coupling = out.weights;
    context.accumulate(pass);
  }

  Context<T> context;
  const Problem& p;
  const PassOutputs& out;
  Score<T> score;
  Sums<T> first, second, mass;
  InNorms<T> norms;
};

}  // namespace capsfast::driver
