// A small batch makes its votes once, keeps them and routes them. So the forward reads the weight once, and the
// backward twice (for the votes and for du), instead of once an iteration.
#pragma once

#include <cstdint>

#include "context.h"
#include "routing.h"

namespace capsfast::driver {

template <class T>
class SmallBatch {
 public:
  explicit SmallBatch(const Problem& problem)
      : p(problem), kernels_(kernels<T>(isa())), row(p.J * p.D * p.K), votes(p.B * p.I * p.J * p.D) {
    const Buffer<T> scratch(num_threads() * (row + p.K));
    over_capsules([&](int64_t task, int64_t i0, int64_t i1) {
      kernels_.small_votes(p, i0, i1, votes.get(), scratch.get() + task * (row + p.K));
    });
  }

  // The same problem as route_votes poses it, for the votes that were made.
  Problem routed() const {
    Problem q = p;
    q.votes_given = true;
    q.shared_weight = false;
    q.K = 1;
    q.u = q.weight = View{};
    q.votes = View{votes.get(), kStorage<T>, {p.I * p.J * p.D, p.J * p.D, p.D, 1}};
    return q;
  }

  // Computes du and dW from dvotes, which the gradient pass has written over the votes. If `add`, dW is added to.
  void finish(const BackwardOutputs& out, bool add) const {
    if (out.du.data == nullptr && out.dweight.data == nullptr) return;
    const int64_t adders = p.shared_weight && out.dweight.data != nullptr ? num_threads() : 0;
    const Sums<T> sums(adders * row);
    sums.clear();
    const Buffer<T> scratch(num_threads() * (2 * row + 3 * p.K));
    over_capsules([&](int64_t task, int64_t i0, int64_t i1) {
      SmallBatchGradients<T> gradients{votes.get(), add, out.du, out.dweight, nullptr, nullptr};
      if (adders > 0) {
        gradients.dweight_sum = sums.high() + task * row;
        gradients.dweight_low = sums.low() + task * row;
      }
      kernels_.small_gradients(gradients, p, i0, i1, scratch.get() + task * (2 * row + 3 * p.K));
    });
    sums.join();
    add_up<T>(sums.high(), adders, row, out.dweight);
  }

 private:
  template <class F>
  void over_capsules(const F& f) const {
    const int64_t tasks = num_threads();
    for_tasks(tasks, [&](int64_t task, int64_t) { f(task, p.I * task / tasks, p.I * (task + 1) / tasks); });
  }

  const Problem& p;
  const Kernels<T>& kernels_;
  int64_t row;
  Buffer<T> votes;
};

}  // namespace capsfast::driver
