// A weight that is not contiguous, or stored in 16 bits, is copied once a call instead of once a pass.
#pragma once

#include <cstdint>

#include "context.h"

namespace capsfast::driver {

template <class T>
class PackedWeight {
 public:
  explicit PackedWeight(const Problem& problem)
      : packed_(wanted(problem)), p_(problem), memory_(packed_ ? p_.I * p_.weight_size() : 0) {
    if (!packed_) return;
    const int64_t size = p_.weight_size();
    parallel(p_.I, 16, [&](int64_t begin, int64_t end) {
      kernels<T>(isa()).copy_weights(problem, begin, end, memory_.get() + begin * size);
    });
    p_.weight = View{memory_.get(), kStorage<T>, {size, p_.R() * p_.K, p_.K, 1}};
  }

  // The problem with the packed weight, if there is one.
  const Problem& problem() const { return p_; }

 private:
  // The most bytes of a copy. If it would be larger, passes copy the weights of a few input capsules at a time.
  static constexpr double kMost = 256.0 * 1024 * 1024;

  // Whether it pays: a small batch reads the weight once a call, and a shared weight is small.
  static bool wanted(const Problem& p) {
    if (p.votes_given || p.shared_weight || p.empty()) return false;
    const int64_t* stride = p.weight.stride;
    if (is_run<T>(p.weight, {p.J, p.R(), p.K}, {stride[1], stride[2], stride[3]})) return false;
    const double bytes = double(sizeof(T)) * double(p.I) * double(p.weight_size());
    return bytes <= kMost && make_plan(p, kernels<T>(isa()).L, num_threads(), sizeof(T)).lanes;
  }

  bool packed_;
  Problem p_;
  Buffer<T> memory_;
};

}  // namespace capsfast::driver
