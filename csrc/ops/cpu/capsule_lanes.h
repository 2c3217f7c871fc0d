// Passes whose lanes are input capsules of one sample (Problem::capsule_lanes). What belongs to the sample is the same in
// all lanes and so stands once, as in the rows layout; here it meets what the passes have in lanes.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "memory.h"
#include "passes.h"

namespace capsfast::driver {

// A tensor [1, I, ..] as [L, ceil(I / L), ..].
inline View across_lanes(View view, int64_t L) {
  view.stride[0] = view.stride[1];
  view.stride[1] *= L;
  return view;
}

// The problem as the passes see it.
inline Problem across_lanes(const Problem& p, int64_t L) {
  Problem seen = p;
  for (View* view : {&seen.logits, &seen.activation, &seen.lse}) *view = across_lanes(*view, L);
  seen.mask.stride[0] = p.mask.stride[1];
  seen.mask.stride[1] = L * p.mask.stride[1];
  return seen;
}

template <class T>
class CapsuleLanes {
 public:
  CapsuleLanes(const Problem& problem, const Plan& plan) : p(problem), L(plan.L), rows(plan.splits * p.J) {}

  // The pass with sums for each lane, which begin with what its own have.
  AccumulatePass<T> begin(const AccumulatePass<T>& given) {
    pass_ = given;
    AccumulatePass<T> pass = given;
    for (View* view : {&pass.dcoupling, &pass.dlse, &pass.coupling, &pass.lse}) *view = across_lanes(*view, L);
    for (const T** numbers : {&pass.score.constant, &pass.gradient.constant, &pass.valid_out, &pass.in_max,
                              &pass.in_scale, &pass.c_dc})
      *numbers = spread(*numbers, p.J);
    for (Sum<T>* sum : {&pass.first, &pass.second}) *sum = lanes_of(*sum, p.D);
    for (Sum<T>* sum : {&pass.mass, &pass.norm}) *sum = lanes_of(*sum, 1);
    if (pass.max != nullptr) {
      // What a softmax over the input capsules begins with counts once.
      pass.max = take(rows);
      std::fill_n(pass.max, rows * L, std::numeric_limits<T>::lowest());
      for (int64_t row = 0; row < rows; ++row) {
        pass.max[row * L] = given.max[row];
        std::swap(pass.norm.high[row * L], given.norm.high[row]);
        std::swap(pass.norm.low[row * L], given.norm.low[row]);
      }
    }
    lanes_ = pass;
    return pass;
  }

  // Adds the sums of the lanes to those of the pass.
  void finish(const Kernels<T>& kernels) {
    const T* factor = nullptr;
    if (lanes_.max != nullptr && !lanes_.unweighted) {
      // Each lane has its own maximum, which its sums are about.
      T* factors = take(rows);
      for (int64_t row = 0; row < rows; ++row) {
        const T* max = lanes_.max + row * L;
        T most = std::numeric_limits<T>::lowest();
        for (int64_t l = 0; l < L; ++l) most = max[l] > most || max[l] != max[l] ? max[l] : most;
        for (int64_t l = 0; l < L; ++l) factors[row * L + l] = std::exp(max[l] - most);
        pass_.max[row] = most;
      }
      factor = factors;
    }
    const auto add = [&](const Sum<T>& lanes, int64_t size, const Sum<T>& to) {
      if (to.high != nullptr) kernels.fold_capsules(lanes, factor, rows, size, to);
    };
    add(lanes_.first, p.D, pass_.first);
    add(lanes_.second, p.D, pass_.second);
    add(lanes_.mass, 1, pass_.mass);
    if (pass_.max != nullptr) add(lanes_.norm, 1, pass_.norm);
  }

  GradientPass<T> begin(const GradientPass<T>& given) {
    GradientPass<T> pass = given;
    for (View* view : {&pass.dcoupling, &pass.dlse, &pass.dactivation, &pass.dlse_given, &pass.dlogits_sample})
      *view = across_lanes(*view, L);
    for (const T** numbers : {&pass.score.constant, &pass.gradient.constant, &pass.valid_out})
      *numbers = spread(*numbers, p.J);
    if (!p.softmax_in()) return pass;
    for (const T** numbers : {&pass.in_max, &pass.in_scale, &pass.c_dc}) *numbers = spread(*numbers, p.iterations * p.J);
    return pass;
  }

 private:
  T* take(int64_t count) { return memory_.emplace_back(count * L).get(); }

  // Numbers, each of which goes to all lanes.
  const T* spread(const T* numbers, int64_t count) {
    if (numbers == nullptr) return nullptr;
    T* lanes = take(count);
    for (int64_t n = 0; n < count; ++n) std::fill_n(lanes + n * L, L, numbers[n]);
    return lanes;
  }

  // Sums that begin with 0.
  Sum<T> lanes_of(const Sum<T>& sum, int64_t size) {
    if (sum.high == nullptr) return {};
    const Sum<T> lanes{take(rows * size), take(rows * size)};
    std::fill_n(lanes.high, rows * size * L, T(0));
    std::fill_n(lanes.low, rows * size * L, T(0));
    return lanes;
  }

  const Problem& p;
  int64_t L, rows;  // a row is an output capsule of a split
  std::vector<Buffer<T>> memory_;
  AccumulatePass<T> pass_, lanes_;
};

}  // namespace capsfast::driver
