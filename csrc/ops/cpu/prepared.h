// What a call prepares from its weight once, not in every pass: the votes of a small batch, or a packed weight.
#pragma once

#include <cstdint>

#include "context.h"

namespace capsfast::driver {

// A weight that is not contiguous, or stored in 16 bits, is copied.
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
    p_.weight = packed_view(p_, memory_.get());
  }

  // Whether a copy pays. It does not for a shared weight, which is small, or for given votes, which have no weight.
  static bool wanted(const Problem& p) {
    if (p.votes_given || p.shared_weight || p.empty()) return false;
    const int64_t* stride = p.weight.stride;
    if (is_run<T>(p.weight, {p.J, p.R(), p.K}, {stride[1], stride[2], stride[3]})) return false;
    return double(sizeof(T)) * double(p.I) * double(p.weight_size()) <= kMost;
  }
  static View packed_view(const Problem& p, T* memory) {
    return {memory, kStorage<T>, {p.weight_size(), p.R() * p.K, p.K, 1}};
  }

  // The problem with the packed weight, if there is one.
  const Problem& problem() const { return p_; }

 private:
  // The most bytes of a copy. For a larger weight, passes copy the weights of a few input capsules at a time.
  static constexpr double kMost = 256.0 * 1024 * 1024;

  bool packed_;
  Problem p_;
  Buffer<T> memory_;
};

// The problem that routes the votes of a small batch, with input capsules in the lanes.
inline Problem routed_votes(Problem p, const View& votes) {
  p.votes_given = true;
  p.lane = Lane::capsule;
  p.shared_weight = false;
  p.K = p.P = 1;
  p.u = p.weight = View{};
  p.votes = votes;
  return p;
}

// A small batch makes its votes once, keeps them and routes them. So the forward reads the weight once, and the
// backward twice (for the votes and for du), instead of once an iteration.
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
      kernels_.small_batch.votes(p, n0, n1, votes.get(), scratch);
    });
  }

  Problem routed() const { return routed_votes(p, View{votes.get(), kStorage<T>, {sample()}}); }

  // Computes du and dW from dvotes, which the gradient pass has written over the votes. If `add`, dW is added to.
  void finish(const BackwardOutputs& out, bool add) const {
    if (out.du.data == nullptr && out.dweight.data == nullptr) return;
    const int64_t size = p.weight_size(), adders = p.shared_weight && out.dweight.data != nullptr ? num_threads() : 0;
    const Sums<T> sums(adders * size);
    sums.clear();
    over_blocks([&](int64_t task, int64_t n0, int64_t n1, T* scratch) {
      SmallBatchGradients<T> gradients{votes.get(), add, out.du, out.dweight, nullptr, nullptr};
      if (adders > 0) {
        gradients.dweight_sum = sums.high() + task * size;
        gradients.dweight_low = sums.low() + task * size;
      }
      kernels_.small_batch.gradients(gradients, p, n0, n1, scratch);
    });
    sums.join();
    add_up<T>(sums.high(), adders, size, out.dweight);
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
