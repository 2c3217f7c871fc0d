// Passes whose lanes are input capsules (Lane::capsule), one sample after the other. Numbers of a sample are
// the same in all lanes, and arrays hold them once, as in the rows layout. This file copies them to lanes for the
// kernels.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "memory.h"
#include "kernels.h"
#include "samples.h"

namespace capsfast::driver {

// A tensor [1, I, ..] as [L, ceil(I / L), ..].
inline View across_lanes(View view, int64_t L) {
  view.stride[0] = view.stride[1];
  view.stride[1] *= L;
  return view;
}

// Sample b alone, as the kernels see it.
inline Problem across_lanes(const Problem& p, int64_t b, int64_t L) {
  Problem seen = slice(p, b, 1);
  for (View* view : {&seen.logits, &seen.activation, &seen.lse}) *view = across_lanes(*view, L);
  seen.mask.stride[0] = p.mask.stride[1];
  seen.mask.stride[1] = L * p.mask.stride[1];
  return seen;
}

template <class T>
class CapsuleLanes {
 public:
  CapsuleLanes(const Problem& problem, int64_t sample, int64_t lanes)
      : p(problem), b(sample), L(lanes), seen(across_lanes(problem, sample, lanes)) {}

  // The pass of a split, in which sums for each lane replace the sums of the split, [B][J D] and [B][J].
  AccumulatePass<T> begin(const AccumulatePass<T>& split) {
    AccumulatePass<T> pass = of_sample(split);
    for (const T** numbers : {&pass.in_max, &pass.in_scale, &pass.c_dc}) *numbers = spread(at(*numbers, p.J), p.J);
    for (View* view : {&pass.dcoupling, &pass.coupling, &pass.lse}) *view = across_lanes(samples(p, *view, b), L);
    open_sums(&pass);
    if (pass.max == nullptr) return pass;
    const Sum<T> norm = at(pass.norm, p.J);
    open(&pass.norm, 1);
    relative_ = !pass.unweighted;
    sample_max_ = pass.max + b * p.J;
    // The initial value of a softmax over the input capsules must count once, not in every lane.
    pass.max = lane_max_ = take(p.J);
    std::fill_n(pass.max, p.J * L, std::numeric_limits<T>::lowest());
    for (int64_t j = 0; j < p.J; ++j) {
      pass.max[j * L] = sample_max_[j];
      std::swap(pass.norm.high[j * L], norm.high[j]);
      std::swap(pass.norm.low[j * L], norm.low[j]);
    }
    return pass;
  }

  // Adds the sums of the lanes to the sums of the split.
  void finish(const Kernels<T>& kernels) {
    const T* factor = nullptr;
    if (relative_) {
      // Each lane has its own maximum, and its sums are relative to it.
      T* factors = take(p.J);
      for (int64_t j = 0; j < p.J; ++j) {
        const T* max = lane_max_ + j * L;
        T most = std::numeric_limits<T>::lowest();
        for (int64_t l = 0; l < L; ++l) most = max[l] > most || max[l] != max[l] ? max[l] : most;
        for (int64_t l = 0; l < L; ++l) factors[j * L + l] = std::exp(max[l] - most);
        sample_max_[j] = most;
      }
      factor = factors;
    }
    for (const Opened& sum : sums_) kernels.small_batch.fold(sum.lanes, factor, p.J, sum.size, sum.of_split);
  }

  GradientPass<T> begin(const GradientPass<T>& split) {
    GradientPass<T> pass = of_sample(split);
    if (p.softmax_in()) {
      for (const T** numbers : {&pass.in_max, &pass.in_scale, &pass.c_dc}) *numbers = spread_iterations(*numbers);
      pass.in_dlse = spread(at(pass.in_dlse, p.J), p.J);
    }
    for (View* view : {&pass.dcoupling, &pass.dlse, &pass.dactivation, &pass.dlse_given, &pass.dlogits_sample})
      *view = across_lanes(samples(p, *view, b), L);
    pass.dvotes = samples(p, pass.dvotes, b);
    open_sums(&pass);
    return pass;
  }

 private:
  // Sets the fields that both passes have. In arrays with all iterations, iterations stay as far apart as before.
  template <class Pass>
  Pass of_sample(Pass pass) {
    pass.problem = &seen;
    for (const T** vectors :
         {&pass.center, &pass.score.linear, &pass.score.square, &pass.gradient.linear, &pass.gradient.square})
      *vectors = at(*vectors, p.J * p.D);
    for (const T** numbers : {&pass.score.constant, &pass.gradient.constant, &pass.valid_out})
      *numbers = spread(at(*numbers, p.J), p.J);
    return pass;
  }

  // A sum of a split, [J][size], for which the kernels have a sum for each lane.
  struct Opened {
    Sum<T> lanes, of_split;
    int64_t size;
  };
  // Replaces a sum of a split, [B][J][size], by sums for each lane that begin with 0.
  void open(Sum<T>* sum, int64_t size) {
    if (sum->high == nullptr) return;
    const int64_t count = p.J * size;
    const Sum<T> lanes{take(count), take(count)};
    std::fill_n(lanes.high, count * L, T(0));
    std::fill_n(lanes.low, count * L, T(0));
    sums_.push_back({lanes, at(*sum, count), size});
    *sum = lanes;
  }
  template <class Pass>
  void open_sums(Pass* pass) {
    open(&pass->first, p.D);
    open(&pass->second, p.D);
    open(&pass->mass, 1);
  }

  T* take(int64_t count) { return memory_.emplace_back(count * L).get(); }

  const T* at(const T* array, int64_t size) const { return array == nullptr ? nullptr : array + b * size; }
  Sum<T> at(const Sum<T>& sum, int64_t size) const { return {sum.high + b * size, sum.low + b * size}; }

  // Copies each number to all lanes.
  const T* spread(const T* numbers, int64_t count) {
    if (numbers == nullptr) return nullptr;
    T* lanes = take(count);
    for (int64_t n = 0; n < count; ++n) std::fill_n(lanes + n * L, L, numbers[n]);
    return lanes;
  }

  // Copies numbers of every iteration, [r][B][J], to lanes [r][tiles][J][L], where the kernels read the first tile.
  const T* spread_iterations(const T* numbers) {
    T* lanes = take(p.iterations * p.B * p.J);
    for (int64_t t = 0; t < p.iterations; ++t) {
      for (int64_t j = 0; j < p.J; ++j)
        std::fill_n(lanes + (t * p.B * p.J + j) * L, L, numbers[(t * p.B + b) * p.J + j]);
    }
    return lanes;
  }

  const Problem& p;
  int64_t b, L;
  const Problem seen;
  std::vector<Buffer<T>> memory_;
  std::vector<Opened> sums_;
  bool relative_ = false;  // each lane has its own maximum, lane_max_, and the sample has sample_max_
  T *lane_max_ = nullptr, *sample_max_ = nullptr;
};

}  // namespace capsfast::driver
