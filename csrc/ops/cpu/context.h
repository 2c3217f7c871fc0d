// What forward and backward share: the layout of per-sample arrays, and how passes are run.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "../../cpu/isa.h"
#include "../../cpu/parallel.h"
#include "../../math/half.h"
#include "memory.h"
#include "passes.h"
#include "plan.h"
#include "scratch.h"

namespace capsfast::driver {

#include "gather.inl"

// Where sample b stands in the arrays of a pass (see passes.h for the two layouts). An array with J D numbers a sample
// has element (j, d) at `vector` + (j D + d) `stride`; one with J numbers has element j at `scalar` + j `stride`.
struct Place {
  int64_t vector;
  int64_t scalar;
  int64_t stride;
};

class Layout {
 public:
  Layout(const Problem& p, const Plan& plan) : lanes_(plan.lanes), L_(plan.L), JD_(p.J * p.D), J_(p.J) {
    samples_ = lanes_ ? plan.tiles * L_ : p.B;
  }
  Place of(int64_t b) const {
    if (!lanes_) return {b * JD_, b * J_, 1};
    return {b / L_ * JD_ * L_ + b % L_, b / L_ * J_ * L_ + b % L_, L_};
  }
  int64_t vectors() const { return samples_ * JD_; }
  int64_t scalars() const { return samples_ * J_; }

 private:
  bool lanes_;
  int64_t L_, JD_, J_, samples_;
};

inline Range share(const Problem& p, const Plan& plan, int64_t task, int64_t groups, int64_t splits) {
  const int64_t group = task / splits, split = task % splits;
  return {
      plan.tiles * group / groups, plan.tiles * (group + 1) / groups, p.I * split / splits, p.I * (split + 1) / splits};
}

inline int64_t valid_count(const MaskView& mask, int64_t b, int64_t size) {
  if (mask.data == nullptr) return size;
  int64_t count = 0;
  for (int64_t n = 0; n < size; ++n) count += mask.at(b, n);
  return count;
}

// Adds parts [count][size] up and writes them to `to`. The order is fixed, so that for a number of threads the result
// is always the same. Overwrites the first part.
template <class T>
void add_up(T* parts, int64_t count, int64_t size, const View& to) {
  if (count == 0) return;
  parallel(size, 4096, [&](int64_t begin, int64_t end) {
    for (int64_t part = 1; part < count; ++part) {
      for (int64_t n = begin; n < end; ++n) parts[n] += parts[part * size + n];
    }
    scatter<T>(to, begin, {1, 1, end - begin}, {0, 0, 1}, parts + begin);
  });
}

// The plan of a call, its layout, its kernels, and the output mask in that layout.
template <class T>
struct Context {
  const Problem& p;
  const Kernels<T>& kernel_table;
  Plan plan;
  Layout layout;
  Buffer<T> valid_out;

  Context(const Problem& problem, int64_t threads)
      : p(problem),
        kernel_table(kernels<T>(isa())),
        plan(make_plan(problem, kernel_table.L, threads, sizeof(T))),
        layout(problem, plan),
        valid_out(problem.out_mask.data == nullptr ? 0 : layout.scalars()) {
    const int64_t *votes = p.votes.stride, *weight = p.weight.stride;
    // Votes are also copied if there is a mask: those of a masked capsule are replaced by zeros.
    plan.gather_rows =
        p.votes_given ? !is_run<T>(p.votes, {1, p.J, p.D}, {0, votes[2], votes[3]}) || p.mask.data != nullptr
                      : !is_run<T>(p.weight, {p.J, p.D, p.K}, {weight[1], weight[2], weight[3]});
    // Copied rows of the weight take the place of those of dW in the scratch.
    if (plan.gather_rows && plan.weight_in_place) plan.gradient_chunk = (plan.gradient_chunk + 1) / 2;
    if (p.out_mask.data == nullptr) return;
    std::fill_n(valid_out.get(), layout.scalars(), T(0));
    for (int64_t b = 0; b < p.B; ++b) {
      const Place at = layout.of(b);
      for (int64_t j = 0; j < p.J; ++j) valid_out.get()[at.scalar + j * at.stride] = p.out_mask.at(b, j) ? T(1) : T(0);
    }
  }

  const T* valid() const { return p.out_mask.data == nullptr ? nullptr : valid_out.get(); }
  bool is_valid(int64_t b, int64_t j) const { return p.out_mask.data == nullptr || p.out_mask.at(b, j); }

  // The fewest samples a task gets for the work between passes: with fewer, starting it would cost more than it does.
  int64_t grain() const { return std::max<int64_t>(1, 4096 / std::max<int64_t>(1, p.J * p.D)); }

  int64_t tile_grain() const { return std::max<int64_t>(1, grain() / plan.L); }

  // What the kernels between passes need of every call.
  Update<T> update(const std::vector<T>& bias) const {
    Update<T> at;
    at.problem = &p;
    at.plan = &plan;
    at.bias = bias.data();
    at.valid_out = valid();
    return at;
  }

  // Runs an accumulate pass. Split k of the input capsules adds to the k-th part of sum and low, [splits][vectors()], and
  // of max, norm and norm_low, [splits][scalars()].
  void accumulate(AccumulatePass<T> pass) const {
    pass.problem = &p;
    pass.plan = &plan;
    pass.valid_out = valid();
    const int64_t tasks = plan.tile_groups * plan.splits;
    const int64_t size =
        plan.lanes ? LanesAccumulateScratch<T>(p, plan, nullptr).size : RowsAccumulateScratch<T>(p, plan, nullptr).size;
    const Buffer<T> scratch(tasks * size);
    parallel(tasks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task) {
        AccumulatePass<T> mine = pass;
        const int64_t split = task % plan.splits;
        if (mine.sum != nullptr) {
          mine.sum += split * layout.vectors();
          mine.low += split * layout.vectors();
        }
        if (mine.max != nullptr) {
          mine.max += split * layout.scalars();
          mine.norm += split * layout.scalars();
          mine.norm_low += split * layout.scalars();
        }
        const Range range = share(p, plan, task, plan.tile_groups, plan.splits);
        T* memory = scratch.get() + task * size;
        plan.lanes ? kernel_table.lanes_accumulate(mine, range, memory)
                   : kernel_table.rows_accumulate(mine, range, memory);
      }
    });
  }
};

// The saved normalisers of the softmax over the input capsules, [iterations][scalars()], in the layout of the passes.
// Lanes without a sample get the maximum inf, which makes their c zero whatever their logits.
template <class T>
class InNormArrays {
 public:
  InNormArrays(const Layout& layout, int64_t iterations)
      : scalars_(layout.scalars()), count_(iterations * scalars_), memory_(2 * count_) {
    std::fill_n(max(), count_, std::numeric_limits<T>::infinity());
    std::fill_n(scale(), count_, T(0));
  }
  T* max() const { return memory_.get(); }
  T* scale() const { return memory_.get() + count_; }
  // Copies iteration t of sample b of `saved` [2, r, batch, J] to iteration `to` of these arrays.
  void restore(const T* saved, const Problem& p, int64_t batch, int64_t t, int64_t b, const Place& at,
               int64_t to) const {
    const T* from = saved + (t * batch + b) * p.J;
    for (int64_t j = 0; j < p.J; ++j) {
      const int64_t here = to * scalars_ + at.scalar + j * at.stride;
      max()[here] = from[j];
      scale()[here] = from[p.iterations * batch * p.J + j];
    }
  }

 private:
  int64_t scalars_, count_;
  Buffer<T> memory_;
};

}  // namespace capsfast::driver
