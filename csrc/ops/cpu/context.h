// What forward and backward share: the layout of per-sample arrays, and how passes are run.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "../../cpu/isa.h"
#include "../../cpu/parallel.h"
#include "capsule_lanes.h"
#include "gather.inl"
#include "memory.h"
#include "kernels.h"
#include "plan.h"
#include "scratch.h"

namespace capsfast::driver {

// Where sample b stands in the arrays of a pass (see kernels.h for the layouts). An array with J D numbers a sample has
// element (j, d) at `vector` + (j D + d) `stride`; an array with J numbers has element j at `scalar` + j `stride`.
struct Place {
  int64_t vector;
  int64_t scalar;
  int64_t stride;
};

class Layout {
 public:
  Layout(const Problem& p, const Plan& plan)
      : L_(plan.lanes ? plan.L : 1), JD_(p.J * p.D), J_(p.J), samples_(plan.tiles * L_) {}
  Place of(int64_t b) const { return {b / L_ * JD_ * L_ + b % L_, b / L_ * J_ * L_ + b % L_, L_}; }
  int64_t lanes() const { return L_; }
  int64_t vectors() const { return samples_ * JD_; }
  int64_t scalars() const { return samples_ * J_; }

 private:
  int64_t L_, JD_, J_, samples_;
};

// Whether kernels of the lanes layout run the passes.
inline bool in_lanes(const Problem& p, const Plan& plan) { return plan.lanes || p.capsule_lanes(); }

// How many numbers of scratch memory a task of a pass takes.
template <class T>
int64_t accumulate_scratch(const Problem& p, const Plan& plan) {
  return in_lanes(p, plan) ? LanesAccumulateScratch<T>(p, plan, nullptr).size
                           : RowsScratch<T>(p, plan, 1, false, nullptr).size;
}
template <class T>
int64_t gradient_scratch(const Problem& p, const Plan& plan, int64_t iterations) {
  return in_lanes(p, plan) ? LanesGradientScratch<T>(p, plan, iterations, nullptr).size
                           : RowsScratch<T>(p, plan, iterations, true, nullptr).size;
}

inline Range range_of(const Plan& plan, int64_t task, int64_t groups, int64_t splits) {
  const int64_t group = task / splits, split = task % splits;
  return {plan.tiles * group / groups, plan.tiles * (group + 1) / groups, plan.capsules * split / splits,
          plan.capsules * (split + 1) / splits};
}

// Which task is taken as the n-th: threads that take tasks at the same time get tasks that are far apart. With
// neighbouring tasks both threads would be the first to touch the same page of dW, and the system would clear the page
// twice.
inline int64_t spread_out(int64_t n, int64_t tasks, int64_t threads) {
  return tasks % threads == 0 ? n % threads * (tasks / threads) + n / threads : n;
}

inline int64_t valid_count(const MaskView& mask, int64_t b, int64_t size) {
  if (mask.data == nullptr) return size;
  int64_t count = 0;
  for (int64_t n = 0; n < size; ++n) count += mask.at(b, n);
  return count;
}

// Writes the sum of parts [count][size] to `to`. The order is fixed, so the result depends on the number of threads
// only. Overwrites the first part.
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

// Partial sums of dW: one for each task if the weight is shared, else one for each group of tiles. A single group needs
// no partial sum, because every task writes the dW of its input capsules; but several parts that do not add in place
// need one. Parts of a batch have plans with the same tasks, and add to the same sums one after the other.
template <class T>
class WeightSums {
 public:
  explicit WeightSums(int64_t parts = 1) : parts_(parts) {}
  int64_t parts() const { return parts_; }

  // Before the gradient pass of the next part.
  void begin(const Problem& p, const Plan& plan, const BackwardOutputs& out, GradientPass<T>* pass) {
    pass->weight_begun = part_ > 0;
    pass->weight_continued = ++part_ < parts_;
    if (pass->weight_begun) return;
    const bool wanted = out.dweight.data != nullptr && !p.votes_given;
    const bool several = plan.gradient_groups > 1 || (parts_ > 1 && !plan.weight_in_place);
    shared_ = p.shared_weight;
    size_ = wanted ? out.weight_rows * p.weight_size() : 0;
    adders_ = !wanted ? 0 : shared_ ? plan.gradient_groups * plan.gradient_splits : several ? plan.gradient_groups : 0;
    sums_.emplace(adders_ * size_);
    sums_->clear();
  }
  // Gives a task its sum. A group of tiles has `splits` tasks.
  void give(int64_t task, int64_t splits, GradientPass<T>* pass) const {
    if (adders_ == 0) return;
    const int64_t adder = shared_ ? task : task / splits;
    pass->dweight_sum = sums_->high() + adder * size_;
    pass->dweight_low = sums_->low() + adder * size_;
  }
  // After the gradient pass of a part.
  void finish(const BackwardOutputs& out) const {
    if (part_ < parts_) return;
    sums_->join();
    add_up<T>(sums_->high(), adders_, size_, out.dweight);
  }

 private:
  int64_t parts_, part_ = 0, size_ = 0, adders_ = 0;
  bool shared_ = false;
  std::optional<Sums<T>> sums_;
};

// The kernels of a call. A vector of a tile may have several registers: then a lane costs about 4/5 as much as with one
// register, but more lanes may stay empty. A batch (or positions) that fills at most half of an AVX-512 register takes
// the AVX2 kernels: on many machines two AVX2 instructions run in the time of one AVX-512 instruction.
template <class T>
const Kernels<T>& kernels_for(const Problem& p, int64_t threads) {
  const Kernels<T>&registers = kernels<T>(isa()), &tiles = kernels<T>(isa(), true);
  if (!make_plan(p, registers.L, threads, sizeof(T)).lanes) return registers;
  const auto filled = [&](int64_t lanes) { return (p.B + lanes - 1) / lanes * lanes; };
  if (isa() == Isa::avx512) return p.B > tiles.L / 2 ? tiles : kernels<T>(Isa::avx2);
  return 4 * filled(tiles.L) <= 5 * filled(registers.L) ? tiles : registers;
}

// The kernels and the plan of a part of a call.
template <class T>
struct Planned {
  const Kernels<T>& kernel_table;
  Plan plan;

  Planned(const Problem& p, int64_t threads)
      : kernel_table(kernels_for<T>(p, threads)), plan(make_plan(p, kernel_table.L, threads, sizeof(T))) {
    const int64_t *votes = p.votes.stride, *weight = p.weight.stride;
    // With a mask votes are also copied: zeros replace the votes of a masked capsule.
    plan.gather_rows =
        p.votes_in_lanes() ? false
        : p.votes_given    ? !is_run<T>(p.votes, {1, p.shared_outputs ? 1 : p.J, p.D}, {0, votes[2], votes[3]}) ||
                                 p.mask.data != nullptr
                           : !is_run<T>(p.weight, {p.J, p.R(), p.K}, {weight[1], weight[2], weight[3]});
    // Copied weights take the scratch memory that dW in place has saved.
    if (plan.gather_rows && plan.weight_in_place) plan.gradient_chunk = (plan.gradient_chunk + 1) / 2;
  }
};

// The plan of a part, its layout, its kernels, and the output mask in that layout.
template <class T>
struct Context : Planned<T> {
  using Planned<T>::kernel_table, Planned<T>::plan;
  const Problem& p;
  Layout layout;
  Buffer<T> valid_out;

  Context(const Problem& problem, int64_t threads)
      : Planned<T>(problem, threads),
        p(problem),
        layout(problem, plan),
        valid_out(problem.out_mask.data == nullptr ? 0 : layout.scalars()) {
    if (p.out_mask.data == nullptr) return;
    std::fill_n(valid_out.get(), layout.scalars(), T(0));
    for (int64_t b = 0; b < p.B; ++b) {
      const Place at = layout.of(b);
      for (int64_t j = 0; j < p.J; ++j) valid_out.get()[at.scalar + j * at.stride] = p.out_mask.at(b, j) ? T(1) : T(0);
    }
  }

  const T* valid() const { return p.out_mask.data == nullptr ? nullptr : valid_out.get(); }
  bool is_valid(int64_t b, int64_t j) const { return p.out_mask.data == nullptr || p.out_mask.at(b, j); }

  // The fewest tiles of a task between passes. With fewer, starting the task would cost more than its work.
  int64_t grain() const { return std::max<int64_t>(1, 4096 / std::max<int64_t>(1, p.J * p.D * layout.lanes())); }
  // Calls f(begin, end) for parts of the tiles.
  template <class F>
  void over_tiles(const F& f) const {
    parallel(plan.tiles, grain(), f);
  }
  const TileKernels<T>& tiles() const { return plan.lanes ? kernel_table.lanes_tiles : kernel_table.rows_tiles; }

  Update<T> update(const std::vector<T>& bias) const {
    Update<T> at;
    at.problem = &p;
    at.plan = &plan;
    at.bias = bias.data();
    at.valid_out = valid();
    return at;
  }

  // Runs an accumulate pass. Split k of the input capsules adds to the k-th part of its sums: [splits][vectors()] of
  // first and second, [splits][scalars()] of mass, norm and max.
  void accumulate(AccumulatePass<T> pass) const {
    pass.problem = &p;
    pass.plan = &plan;
    pass.valid_out = valid();
    const int64_t tasks = plan.tile_groups * plan.splits;
    over_ranges(tasks, accumulate_scratch<T>(p, plan), [&](int64_t task, T* memory) {
      AccumulatePass<T> of_task = pass;
      const int64_t split = task % plan.splits;
      move_sums(&of_task, split);
      move(&of_task.norm, split * layout.scalars());
      if (of_task.max != nullptr) of_task.max += split * layout.scalars();
      const Range range = range_of(plan, task, plan.tile_groups, plan.splits);
      run_kernel(
          in_lanes(p, plan) ? kernel_table.lanes_accumulate : kernel_table.rows.accumulate, of_task, range, memory);
    });
  }

  // Calls f(task, memory) for the tasks of a pass, with `size` numbers of scratch memory.
  template <class F>
  void over_ranges(int64_t tasks, int64_t size, const F& f) const {
    const Buffer<T> scratch(members() * size);
    const int64_t threads = num_threads();
    const auto task = [&](int64_t n, int64_t member) {
      f(p.capsule_lanes() ? n : spread_out(n, tasks, threads), scratch.get() + member * size);
    };
    for_tasks(tasks, task, p.capsule_lanes());
  }

  // Runs a kernel for a task, or, if lanes are input capsules, for each sample of the task.
  template <class Pass>
  void run_kernel(void (*kernel)(const Pass&, const Range&, T*), const Pass& pass, const Range& range,
                  T* memory) const {
    if (!p.capsule_lanes()) return kernel(pass, range, memory);
    for (int64_t b = 0; b < p.B; ++b) {
      CapsuleLanes<T> lanes(p, b, plan.L);
      kernel(lanes.begin(pass), {0, 1, range.i0, range.i1}, memory);
      lanes.finish(kernel_table);
    }
  }

  // Copies a tensor [B, n1, n2], or [B, n1] with n2 = 1, to the layout of the passes, times `scale`. n1 is J. Lanes
  // without a sample and masked output capsules get zeros; if data is null, all numbers are zeros.
  void load(const View& view, int64_t n1, int64_t n2, T scale, T* to) const {
    const int64_t L = layout.lanes(), size = n1 * n2;
    if (view.data == nullptr) {
      std::fill_n(to, plan.tiles * L * size, T(0));
      return;
    }
    over_tiles([&](int64_t begin, int64_t end) {
      const Buffer<T> buffer(L > 1 ? L * size : 0);
      for (int64_t tile = begin; tile < end; ++tile) {
        T* here = to + tile * size * L;
        tiles().load(view, tile * L, std::min(L, p.B - tile * L), n1, n2, buffer.get(), here);
        for (int64_t n = 0; n < size * L && scale != T(1); ++n) here[n] *= scale;
        if (p.out_mask.data == nullptr) continue;
        const T* ok = valid() + tile * p.J * L;
        for (int64_t j = 0; j < p.J; ++j) {
          for (int64_t n = 0; n < n2 * L; ++n)
            here[j * n2 * L + n] = ok[j * L + n % L] > 0 ? here[j * n2 * L + n] : T(0);
        }
      }
    });
  }

  // The opposite of load(), to a tensor [B, n1, n2]. Does nothing if data is null.
  void save(const T* from, int64_t n1, int64_t n2, const View& view) const {
    if (view.data == nullptr) return;
    over_tiles([&](int64_t begin, int64_t end) {
      const int64_t L = layout.lanes(), size = n1 * n2;
      const Buffer<T> buffer(L > 1 ? L * size : 0);
      for (int64_t tile = begin; tile < end; ++tile)
        tiles().store(from + tile * size * L, tile * L, std::min(L, p.B - tile * L), n1, n2, buffer.get(), view);
    });
  }

  static void move(Sum<T>* sum, int64_t by) {
    if (sum->high == nullptr) return;
    sum->high += by;
    sum->low += by;
  }
  // Moves the pointers to the sums of a split.
  template <class Pass>
  void move_sums(Pass* pass, int64_t split) const {
    move(&pass->first, split * layout.vectors());
    move(&pass->second, split * layout.vectors());
    move(&pass->mass, split * layout.scalars());
  }

  // Runs the gradient pass for the gradients in `out`. Adds to dlogits_sum [I, J], null if it is not wanted. Split k of
  // the input capsules adds to the k-th part of the sums.
  // cut: the plan, maybe with other groups and splits.
  void gradient(const Plan& cut, GradientPass<T> pass, const BackwardOutputs& out, double* dlogits_sum,
                WeightSums<T>* weights) const {
    const int64_t groups = cut.gradient_groups, splits = cut.gradient_splits, tasks = groups * splits;
    // Each group of tiles has its own sum of dlogits. A single group adds to the result directly.
    const int64_t logits = dlogits_sum != nullptr && groups > 1 ? p.I * p.J : 0;
    const Buffer<double> dlogits(groups * logits);
    std::fill_n(dlogits.get(), groups * logits, 0.0);

    weights->begin(p, cut, out, &pass);
    pass.problem = &p;
    pass.plan = &cut;
    pass.valid_out = valid();
    pass.du = out.du;
    if (p.votes_given) {
      pass.dvotes = out.dweight;
    } else {
      pass.dweight = out.dweight;
    }
    if (out.per_sample_logits) pass.dlogits_sample = out.dlogits;
    over_ranges(tasks, gradient_scratch<T>(p, cut, p.iterations - pass.since), [&](int64_t task, T* memory) {
      GradientPass<T> of_task = pass;
      if (dlogits_sum != nullptr) of_task.dlogits = groups > 1 ? dlogits.get() + task / splits * logits : dlogits_sum;
      weights->give(task, splits, &of_task);
      move_sums(&of_task, task % splits);
      const Range range = range_of(cut, task, groups, splits);
      run_kernel(in_lanes(p, plan) ? kernel_table.lanes_gradient : kernel_table.rows.gradient, of_task, range, memory);
    });
    weights->finish(out);
    for (int64_t group = 0; group < groups; ++group) {
      for (int64_t n = 0; n < logits; ++n) dlogits_sum[n] += dlogits.get()[group * logits + n];
    }
  }
};

// The normalisers of a softmax over the input capsules while a pass runs, [splits][scalars()].
template <class T>
class InNorms {
 public:
  InNorms(const Problem& p, const Plan& plan, const Layout& layout)
      : leaky_(p.leaky),
        splits_(p.softmax_in() ? plan.splits : 0),
        pitch_(layout.scalars()),
        max_(splits_ * pitch_),
        norms_(splits_ * pitch_) {}

  // Before a pass. The leaky entry, with logit 0, must count once: the first split has it.
  void start(AccumulatePass<T>* pass) const {
    if (splits_ == 0) return;
    std::fill_n(max_.get(), splits_ * pitch_, std::numeric_limits<T>::lowest());
    norms_.clear();
    pass->max = max_.get();
    pass->norm = norms_.sum();
    if (!leaky_) return;
    std::fill_n(max_.get(), pitch_, T(0));
    std::fill_n(norms_.high(), pitch_, T(1));
  }
  // After a pass.
  void finish() const { norms_.join(); }

  // Sums of an output capsule times `scale` are sums weighted by the coupling. With the softmax over the input capsules
  // the sums of a split are also multiplied by its rescaling() to `max`.
  struct Scale {
    T scale = 1, max = 0, norm = 0;
  };
  // Writes the factors of the splits' sums of output capsule j of sample b: the sums of split n are multiplied by
  // factors[n pitch] and then added up. equal: the pass counted every coupling as 1. With the softmax over the input
  // capsules, saves the normaliser to kept[0] and kept[next].
  Scale factors(const Context<T>& context, bool equal, int64_t b, int64_t j, void* kept, int64_t next, T* factors,
                int64_t pitch) const {
    const Problem& p = context.p;
    const Place at = context.layout.of(b);
    const int64_t scalar = at.scalar + j * at.stride;
    Scale result;
    if (equal) {
      const int64_t counted = p.softmax_in() ? valid_count(p.mask, b, p.I) : valid_count(p.out_mask, b, p.J);
      const int64_t entries = counted + (p.leaky ? 1 : 0);
      result.scale = entries > 0 && context.is_valid(b, j) ? 1 / static_cast<T>(entries) : T(0);
    } else if (p.softmax_in()) {
      std::tie(result.max, result.norm) = combined(scalar);
      result.scale = result.norm == 0 ? T(0) : 1 / result.norm;
    }
    if (p.softmax_in()) {
      static_cast<T*>(kept)[0] = result.max;
      static_cast<T*>(kept)[next] = result.scale;
    }
    for (int64_t split = 0; split < context.plan.splits; ++split)
      factors[split * pitch] =
          p.softmax_in() && !equal ? result.scale * rescaling(split, scalar, result.max) : result.scale;
    return result;
  }

 private:
  // The maximum of all splits, and the sum of exponentials relative to it.
  std::pair<T, T> combined(int64_t scalar) const {
    T max = std::numeric_limits<T>::lowest(), norm = 0;
    for (int64_t s = 0; s < splits_; ++s) {
      const T here = max_.get()[s * pitch_ + scalar];
      max = here > max || here != here ? here : max;
    }
    for (int64_t s = 0; s < splits_; ++s) norm += norms_.high()[s * pitch_ + scalar] * rescaling(s, scalar, max);
    return {max, norm};
  }
  // The factor that turns sums relative to the maximum of a split into sums relative to `max`.
  T rescaling(int64_t split, int64_t scalar, T max) const {
    return std::exp(max_.get()[split * pitch_ + scalar] - max);
  }

  bool leaky_;
  int64_t splits_, pitch_;
  Buffer<T> max_;
  Sums<T> norms_;
};

// The saved normalisers of the softmax over the input capsules, [count][scalars()], in the layout of the passes: of
// iterations [t0, t0 + count) of `saved` [2, r, batch, J]. Lanes without a sample get the maximum inf, so that
// their c is zero for any logits.
template <class T>
class InNormArrays {
 public:
  InNormArrays(const Problem& p, const Layout& layout, const void* saved, int64_t batch, int64_t t0, int64_t count)
      : count_(count * layout.scalars()), memory_(2 * count_) {
    std::fill_n(max(), count_, std::numeric_limits<T>::infinity());
    std::fill_n(scale(), count_, T(0));
    for (int64_t n = 0; n < count * p.B; ++n) {
      const int64_t t = n / p.B, b = n % p.B;
      const Place at = layout.of(b);
      const T* const from = static_cast<const T*>(saved) + ((t0 + t) * batch + b) * p.J;
      for (int64_t j = 0; j < p.J; ++j) {
        const int64_t here = t * layout.scalars() + at.scalar + j * at.stride;
        max()[here] = from[j];
        scale()[here] = from[p.iterations * batch * p.J + j];
      }
    }
  }
  T* max() const { return memory_.get(); }
  T* scale() const { return memory_.get() + count_; }

 private:
  int64_t count_;
  Buffer<T> memory_;
};

}  // namespace capsfast::driver
