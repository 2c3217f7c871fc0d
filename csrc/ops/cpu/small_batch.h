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
      : p(problem),
        kernels_(kernels<T>(isa())),
        blocks((p.I + kernels_.L - 1) / kernels_.L),
        scratch_size(SmallBatchScratch<T>(p, kernels_.L, nullptr).size),
        votes(p.B * sample()) {
    over_blocks([&](int64_t, int64_t n0, int64_t n1, T* scratch) {
      kernels_.small_votes(p, n0, n1, votes.get(), scratch);
    });
  }

  // The problem that routes these votes, with input capsules in the lanes.
  Problem routed() const {
    Problem q = p;
    q.votes_given = true;
    q.capsule_lanes = true;
    q.shared_weight = false;
    q.K = q.P = 1;
    q.u = q.weight = View{};
    q.votes = View{votes.get(), kStorage<T>, {sample()}};
    return q;
  }

  // Computes du and dW from dvotes, which the gradient pass has written over the votes. If `add`, dW is added to.
  void finish(const BackwardOutputs& out, bool add) const {
    if (out.du.data == nullptr && out.dweight.data == nullptr) return;
    const int64_t row = p.weight_size(), adders = p.shared_weight && out.dweight.data != nullptr ? num_threads() : 0;
    const Sums<T> sums(adders * row);
    sums.clear();
    over_blocks([&](int64_t task, int64_t n0, int64_t n1, T* scratch) {
      SmallBatchGradients<T> gradients{votes.get(), add, out.du, out.dweight, nullptr, nullptr};
      if (adders > 0) {
        gradients.dweight_sum = sums.high() + task * row;
        gradients.dweight_low = sums.low() + task * row;
      }
      kernels_.small_gradients(gradients, p, n0, n1, scratch);
    });
    sums.join();
    add_up<T>(sums.high(), adders, row, out.dweight);
  }

 private:
  int64_t sample() const { return blocks * p.J * p.D * kernels_.L; }

  // Calls f(task, n0, n1, scratch) for blocks [n0, n1) of input capsules.
  template <class F>
  void over_blocks(const F& f) const {
    const int64_t tasks = num_threads();
    const Buffer<T> scratch(members() * scratch_size);
    for_tasks(
        tasks,
        [&](int64_t task, int64_t member) {
          f(task, blocks * task / tasks, blocks * (task + 1) / tasks, scratch.get() + member * scratch_size);
        },
        true);
  }

  const Problem& p;
  const Kernels<T>& kernels_;
  int64_t blocks, scratch_size;
  LastingBuffer<T> votes;
};

}  // namespace capsfast::driver
