#include "routing.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>
#include <vector>

#include "../../cpu/isa.h"
#include "../../cpu/parallel.h"
#include "../../math/half.h"
#include "passes.h"
#include "plan.h"
#include "scratch.h"

namespace capsfast {

namespace {
#include "gather.inl"

struct Free {
  void operator()(void* p) const { std::free(p); }
};

// Uninitialised, on a cache line.
template <class T>
class Buffer {
 public:
  explicit Buffer(int64_t count) {
    const size_t bytes = (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
    memory_.reset(static_cast<T*>(std::aligned_alloc(64, std::max<size_t>(bytes, 64))));
    if (memory_ == nullptr) throw std::bad_alloc();
  }
  T* get() const { return memory_.get(); }

 private:
  std::unique_ptr<T, Free> memory_;
};

// Sums and what their additions rounded off.
template <class T>
class Sums {
 public:
  explicit Sums(int64_t count) : count_(count), memory_(2 * count) {}
  T* high() const { return memory_.get(); }
  T* low() const { return memory_.get() + count_; }
  T total(int64_t n) const { return high()[n] + low()[n]; }
  void clear() const { std::fill_n(memory_.get(), 2 * count_, T(0)); }
  void join() const {
    for (int64_t n = 0; n < count_; ++n) high()[n] = total(n);
  }

 private:
  int64_t count_;
  Buffer<T> memory_;
};

// Where the numbers of sample b stand: element (j, d) of a per-output array at base + (j D + d) stride,
// element j of a per-logit array at base + j stride. Natural order for tensors, the plan's for passes.
struct Place {
  int64_t vector;  // base in an array [.., J D]
  int64_t scalar;  // base in an array [.., J]
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

Range share(const Problem& p, const Plan& plan, int64_t task, int64_t groups, int64_t splits) {
  const int64_t group = task / splits, split = task % splits;
  return {plan.tiles * group / groups, plan.tiles * (group + 1) / groups, p.I * split / splits, p.I * (split + 1) / splits};
}

int64_t valid_count(const MaskView& mask, int64_t b, int64_t size) {
  if (mask.data == nullptr) return size;
  int64_t count = 0;
  for (int64_t n = 0; n < size; ++n) count += mask.at(b, n);
  return count;
}

// The parts in a fixed order, so that the result depends on the number of threads only.
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

// What forward and backward share: the plan, the layout, the kernels and the output mask in lanes.
template <class T>
struct Context {
  const Problem& p;
  const Kernels<T>& kernels_;
  Plan plan;
  Layout layout;
  Buffer<T> valid_out;

  Context(const Problem& problem, int64_t threads)
      : p(problem),
        kernels_(kernels<T>(isa())),
        plan(make_plan(problem, kernels_.L, threads, sizeof(T))),
        layout(problem, plan),
        valid_out(problem.out_mask.data == nullptr ? 0 : layout.scalars()) {
    const int64_t *votes = p.votes.stride, *weight = p.weight.stride;
    // A masked capsule's votes are replaced by zeros, which takes a copy too.
    plan.gather_rows = p.votes_given
                           ? !is_run<T>(p.votes, {1, p.J, p.D}, {0, votes[2], votes[3]}) || p.mask.data != nullptr
                           : !is_run<T>(p.weight, {p.J, p.D, p.K}, {weight[1], weight[2], weight[3]});
    if (p.out_mask.data == nullptr) return;
    std::fill_n(valid_out.get(), layout.scalars(), T(0));
    for (int64_t b = 0; b < p.B; ++b) {
      const Place at = layout.of(b);
      for (int64_t j = 0; j < p.J; ++j) valid_out.get()[at.scalar + j * at.stride] = p.out_mask.at(b, j) ? T(1) : T(0);
    }
  }

  const T* valid() const { return p.out_mask.data == nullptr ? nullptr : valid_out.get(); }
  bool is_valid(int64_t b, int64_t j) const { return p.out_mask.data == nullptr || p.out_mask.at(b, j); }

  // Samples at a time for the work between passes: enough for a task to be worth a thread.
  int64_t grain() const { return std::max<int64_t>(1, 4096 / std::max<int64_t>(1, p.J * p.D)); }

  // Runs a reducing pass; split s adds to sum and low + s * vectors (and max, norm + s * scalars).
  void reduce(ReducePass<T> pass) const {
    pass.problem = &p;
    pass.plan = &plan;
    pass.valid_out = valid();
    const int64_t tasks = plan.tile_groups * plan.splits;
    const int64_t size = plan.lanes ? LanesReduceScratch<T>(p, plan, nullptr).size : RowsReduceScratch<T>(p, plan, nullptr).size;
    const Buffer<T> scratch(tasks * size);
    parallel(tasks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task) {
        ReducePass<T> mine = pass;
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
        plan.lanes ? kernels_.lanes_reduce(mine, range, memory) : kernels_.rows_reduce(mine, range, memory);
      }
    });
  }
};

// The factor that makes the partial sums of the splits one softmax over the input capsules.
template <class T>
struct InNorm {
  T max = std::numeric_limits<T>::lowest();
  T norm = 0;

  InNorm(const T* maxima, const T* norms, int64_t splits, int64_t pitch) {
    for (int64_t s = 0; s < splits; ++s) max = maxima[s * pitch] > max || maxima[s * pitch] != maxima[s * pitch] ? maxima[s * pitch] : max;
    for (int64_t s = 0; s < splits; ++s) norm += norms[s * pitch] * std::exp(maxima[s * pitch] - max);
  }
  T factor(T split_max) const { return std::exp(split_max - max) * scale(); }
  T scale() const { return norm == 0 ? T(0) : 1 / norm; }
};

// The saved normalisers of `iterations` iterations in the plan's layout. Lanes without a sample get the
// maximum inf, which makes their c zero whatever their logits.
template <class T>
class InNormArrays {
 public:
  InNormArrays(const Layout& layout, int64_t iterations) : scalars_(layout.scalars()), count_(iterations * scalars_), memory_(2 * count_) {
    std::fill_n(max(), count_, std::numeric_limits<T>::infinity());
    std::fill_n(scale(), count_, T(0));
  }
  T* max() const { return memory_.get(); }
  T* scale() const { return memory_.get() + count_; }
  // Iteration t of sample b of the saved tensor [2, r, batch, J], to the `to`-th place here.
  void restore(const T* saved, const Problem& p, int64_t batch, int64_t t, int64_t b, const Place& at, int64_t to) const {
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

template <class T>
class Forward {
 public:
  Forward(const Problem& problem, const ForwardOutputs& outputs, int64_t threads)
      : context(problem, threads),
        p(problem),
        out(outputs),
        V(context.layout.vectors()),
        sums(context.plan.splits * context.layout.vectors()),
        max(p.softmax_in ? context.plan.splits * context.layout.scalars() : 0),
        norms(p.softmax_in ? context.plan.splits * context.layout.scalars() : 0),
        bias(static_cast<size_t>(p.J * p.D), T(0)) {
    std::fill_n(V.get(), context.layout.vectors(), T(0));
    if (p.bias.data != nullptr) gather<T>(p.bias, 0, {1, p.J, p.D}, {0, p.bias.stride[0], p.bias.stride[1]}, bias.data());
  }

  void run() {
    for (int64_t t = 0; t < p.iterations; ++t) {
      const bool last = t + 1 == p.iterations;
      const bool wants_coupling = last && out.coupling.data != nullptr;
      ReducePass<T> pass;
      pass.V = t == 0 ? nullptr : V.get();
      // "in": c is known only when the pass is over.
      if (wants_coupling && !p.softmax_in) pass.coupling = out.coupling;
      pass.unweighted = t == 0 && p.logits.data == nullptr && pass.coupling.data == nullptr;
      sums.clear();
      pass.sum = sums.high();
      pass.low = sums.low();
      if (p.softmax_in) {
        start_norms();
        pass.max = max.get();
        pass.norm = norms.high();
        pass.norm_low = norms.low();
      }
      context.reduce(pass);
      if (p.softmax_in) norms.join();
      parallel(p.B, context.grain(), [&](int64_t begin, int64_t end) {
        for (int64_t b = begin; b < end; ++b) finish(pass.unweighted, t, b);
      });
      if (wants_coupling && p.softmax_in) write_coupling(t);
    }
  }

 private:
  // The leaky entry, with logit 0, is in the first split only.
  void start_norms() {
    const int64_t pitch = context.layout.scalars();
    std::fill_n(max.get(), context.plan.splits * pitch, std::numeric_limits<T>::lowest());
    norms.clear();
    if (!p.leaky) return;
    std::fill_n(max.get(), pitch, T(0));
    std::fill_n(norms.high(), pitch, T(1));
  }

  // s_t, v_t and V_t of one sample from the partial sums.
  void finish(bool unweighted, int64_t t, int64_t b) {
    const Place at = context.layout.of(b);
    const int64_t splits = context.plan.splits, pitch = context.layout.vectors(), scalar_pitch = context.layout.scalars();
    const int64_t counted = !unweighted ? 0 : p.softmax_in ? valid_count(p.mask, b, p.I) : valid_count(p.out_mask, b, p.J);
    const T entries = static_cast<T>(counted + (p.leaky ? 1 : 0));
    T* s = static_cast<T*>(out.s) + (t * out.batch + b) * p.J * p.D;
    for (int64_t j = 0; j < p.J; ++j) {
      const bool valid = context.is_valid(b, j);
      const int64_t scalar = at.scalar + j * at.stride;
      const T scale = unweighted ? (valid && entries > 0 ? 1 / entries : T(0)) : T(1);
      if (p.softmax_in) {
        T* to = static_cast<T*>(out.norm) + (t * out.batch + b) * p.J + j;
        T& norm_max = to[0];
        T& norm_scale = to[p.iterations * out.batch * p.J];
        norm_max = 0;
        norm_scale = scale;
        if (!unweighted) {
          const InNorm<T> all(max.get() + scalar, norms.high() + scalar, splits, scalar_pitch);
          norm_max = all.max;
          norm_scale = all.scale();
        }
      }
      for (int64_t d = 0; d < p.D; ++d) s[j * p.D + d] = 0;
      for (int64_t split = 0; split < splits; ++split) {
        T factor = scale;
        if (p.softmax_in && !unweighted) {
          factor = InNorm<T>(max.get() + scalar, norms.high() + scalar, splits, scalar_pitch).factor(max.get()[scalar + split * scalar_pitch]);
        }
        const int64_t part = split * pitch + at.vector + j * p.D * at.stride;
        for (int64_t d = 0; d < p.D; ++d) s[j * p.D + d] += factor * sums.total(part + d * at.stride);
      }
      add_output(s + j * p.D, j, valid, V.get() + at.vector + j * p.D * at.stride, at.stride, t + 1 == p.iterations ? b : -1);
    }
  }

  // v = squash(s + bias) of one output capsule, added to V_t; of the last iteration also to the result.
  void add_output(const T* s, int64_t j, bool valid, T* V_t, int64_t stride, int64_t last_of_sample) const {
    const T* bias_j = bias.data() + j * p.D;
    T n = 0;
    for (int64_t d = 0; d < p.D; ++d) n += (s[d] + bias_j[d]) * (s[d] + bias_j[d]);
    const T f = radial<T>(p.squash, n, static_cast<T>(p.eps));
    for (int64_t d = 0; d < p.D; ++d) {
      const T v = valid ? f * (s[d] + bias_j[d]) : T(0);
      V_t[d * stride] += v;
      if (last_of_sample >= 0) write<T>(out.v, (last_of_sample * p.J + j) * p.D + d, v);
    }
  }

  // c = exp(b - max) scale takes a pass of its own, before V_t gets the last v.
  void write_coupling(int64_t t) {
    InNormArrays<T> in_norm(context.layout, 1);
    Buffer<T> before(context.layout.vectors());
    std::fill_n(before.get(), context.layout.vectors(), T(0));
    for (int64_t b = 0; b < p.B; ++b) {
      const Place at = context.layout.of(b);
      in_norm.restore(static_cast<const T*>(out.norm), p, out.batch, t, b, at, 0);
      const T* s = static_cast<const T*>(out.s) + b * p.J * p.D;
      for (int64_t j = 0; j < p.J; ++j) {
        for (int64_t earlier = 0; earlier < t; ++earlier) {
          add_output(s + (earlier * out.batch * p.J + j) * p.D, j, context.is_valid(b, j), before.get() + at.vector + j * p.D * at.stride,
                     at.stride, -1);
        }
      }
    }
    ReducePass<T> pass;
    pass.V = t == 0 ? nullptr : before.get();
    pass.in_max = in_norm.max();
    pass.in_scale = in_norm.scale();
    pass.coupling = out.coupling;
    context.reduce(pass);
  }

  Context<T> context;
  const Problem& p;
  const ForwardOutputs& out;
  Buffer<T> V;
  Sums<T> sums;
  Buffer<T> max;
  Sums<T> norms;
  std::vector<T> bias;
};

template <class T>
class Backward {
 public:
  // dlogits_sum [I, J] and dbias_sum [J, D], added to; null where they are not wanted.
  Backward(const Problem& problem, const BackwardInputs& inputs, const BackwardOutputs& outputs, double* dlogits_sum, double* dbias_sum,
           int64_t threads)
      : context(problem, threads),
        p(problem),
        in(inputs),
        out(outputs),
        dlogits_sum_(dlogits_sum),
        dbias_sum_(dbias_sum),
        first(problem.gradient_last ? problem.iterations - 1 : 0),
        V(p.iterations * context.layout.vectors()),
        ds(p.iterations * context.layout.vectors()),
        sums(context.plan.splits * context.layout.vectors()),
        in_norm(context.layout, p.softmax_in ? p.iterations : 0),
        c_dc(p.softmax_in ? p.iterations * context.layout.scalars() : 0),
        bias(static_cast<size_t>(p.J * p.D), T(0)) {
    // Lanes without a sample read as zero capsules.
    std::fill_n(V.get(), p.iterations * context.layout.vectors(), T(0));
    std::fill_n(ds.get(), p.iterations * context.layout.vectors(), T(0));
    if (p.bias.data != nullptr) gather<T>(p.bias, 0, {1, p.J, p.D}, {0, p.bias.stride[0], p.bias.stride[1]}, bias.data());
    if (p.softmax_in) {
      std::fill_n(c_dc.get(), p.iterations * context.layout.scalars(), T(0));
    }
  }

  void run() {
    const int64_t r = p.iterations, pitch = context.layout.vectors();
    parallel(p.B, context.grain(), [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) {
        restore(b);
        differentiate(r - 1, b, true);
      }
    });
    for (int64_t t = r - 1; t > first; --t) {
      ReducePass<T> pass;
      pass.V = V.get() + t * pitch;
      pass.ds = ds.get() + t * pitch;
      if (p.softmax_in) {
        pass.in_max = in_norm.max() + t * context.layout.scalars();
        pass.in_scale = in_norm.scale() + t * context.layout.scalars();
        pass.c_dc = c_dc.get() + t * context.layout.scalars();
      }
      if (t == r - 1) pass.dcoupling = in.dcoupling;
      pass.sum = sums.high();
      pass.low = sums.low();
      // The sums go on from iteration to iteration: V_t holds every earlier v, so G adds up.
      if (t == r - 1) sums.clear();
      context.reduce(pass);
      parallel(p.B, context.grain(), [&](int64_t begin, int64_t end) {
        for (int64_t b = begin; b < end; ++b) differentiate(t - 1, b, false);
      });
    }
    if (dbias_sum_ != nullptr) sum_bias();
    if (out.du.data != nullptr || out.dweight.data != nullptr || out.dlogits.data != nullptr) last_pass();
  }

 private:
  // V_t of every iteration from the saved s, and the normalisers, in the plan's layout.
  void restore(int64_t b) {
    const Place at = context.layout.of(b);
    const int64_t pitch = context.layout.vectors();
    for (int64_t t = 0; t + 1 < p.iterations; ++t) {
      const T* s = saved_s(t, b);
      for (int64_t j = 0; j < p.J; ++j) {
        const bool valid = context.is_valid(b, j);
        T n = 0;
        for (int64_t d = j * p.D; d < (j + 1) * p.D; ++d) n += biased(s, d) * biased(s, d);
        const T f = radial<T>(p.squash, n, static_cast<T>(p.eps));
        for (int64_t d = j * p.D; d < (j + 1) * p.D; ++d) {
          const int64_t here = t * pitch + at.vector + d * at.stride;
          V.get()[here + pitch] = V.get()[here] + (valid ? f * biased(s, d) : T(0));
        }
      }
    }
    if (!p.softmax_in) return;
    for (int64_t t = 0; t < p.iterations; ++t) in_norm.restore(static_cast<const T*>(in.norm), p, in.batch, t, b, at, t);
  }

  T biased(const T* s, int64_t row) const { return s[row] + bias[static_cast<size_t>(row)]; }
  const T* saved_s(int64_t t, int64_t b) const { return static_cast<const T*>(in.s) + (t * in.batch + b) * p.J * p.D; }

  // ds_t from dv_t: the given dv for the last iteration, else the sum of the reducing passes.
  void differentiate(int64_t t, int64_t b, bool given) {
    const Place at = context.layout.of(b);
    const int64_t pitch = context.layout.vectors();
    const T* s = saved_s(t, b);
    std::vector<T> dv(static_cast<size_t>(p.D));
    for (int64_t j = 0; j < p.J; ++j) {
      T n = 0, s_dv = 0, total = 0;
      T* to = ds.get() + t * pitch + at.vector + j * p.D * at.stride;
      for (int64_t d = 0; d < p.D; ++d) {
        T& g = dv[static_cast<size_t>(d)];
        g = 0;
        if (given) {
          g = read<T>(in.dv, b * in.dv.stride[0] + j * in.dv.stride[1] + d * in.dv.stride[2]);
        } else {
          for (int64_t split = 0; split < context.plan.splits; ++split) g += sums.total(split * pitch + at.vector + (j * p.D + d) * at.stride);
        }
        n += biased(s, j * p.D + d) * biased(s, j * p.D + d);
        s_dv += biased(s, j * p.D + d) * g;
      }
      const bool valid = context.is_valid(b, j);
      const T eps = static_cast<T>(p.eps);
      const T f = radial<T>(p.squash, n, eps), slope = 2 * radial_derivative<T>(p.squash, n, eps) * s_dv;
      for (int64_t d = 0; d < p.D; ++d) {
        const T value = valid ? f * dv[static_cast<size_t>(d)] + slope * biased(s, j * p.D + d) : T(0);
        to[d * at.stride] = value;
        total += value * s[j * p.D + d];
      }
      if (!p.softmax_in) continue;
      // sum_i c dc = ds . sum_i c votes, and what the coupling's own gradient adds.
      if (given && in.dcoupling.data != nullptr) total += coupling_gradient(b, j);
      c_dc.get()[t * context.layout.scalars() + at.scalar + j * at.stride] = total;
    }
  }

  T coupling_gradient(int64_t b, int64_t j) const {
    T total = 0;
    const View &c = in.coupling, &dc = in.dcoupling;
    for (int64_t i = 0; i < p.I; ++i) {
      total += read<T>(c, b * c.stride[0] + i * c.stride[1] + j * c.stride[2]) *
               read<T>(dc, b * dc.stride[0] + i * dc.stride[1] + j * dc.stride[2]);
    }
    return total;
  }

  void sum_bias() {
    for (int64_t t = first; t < p.iterations; ++t) {
      for (int64_t b = 0; b < p.B; ++b) {
        const Place at = context.layout.of(b);
        const T* from = ds.get() + t * context.layout.vectors() + at.vector;
        for (int64_t n = 0; n < p.J * p.D; ++n) dbias_sum_[n] += from[n * at.stride];
      }
    }
  }

  void last_pass() {
    const Plan& plan = context.plan;
    const int64_t groups = plan.final_groups, splits = plan.final_splits, tasks = groups * splits;
    const int64_t weights = out.dweight.data == nullptr || p.votes_given ? 0 : out.weight_rows * p.J * p.D * p.K;
    // Who adds to one dW: every task if the weight is shared, every group of tiles otherwise.
    const int64_t adders = weights == 0 ? 0 : p.shared_weight ? tasks : groups > 1 ? groups : 0;
    const int64_t logits = dlogits_sum_ != nullptr ? p.I * p.J : 0;
    const Sums<T> dweight(adders * weights);
    const Buffer<double> dlogits(groups * logits);
    dweight.clear();
    std::fill_n(dlogits.get(), groups * logits, 0.0);

    FinalPass<T> pass;
    pass.problem = &p;
    pass.plan = &plan;
    pass.first = first;
    pass.V = V.get();
    pass.ds = ds.get();
    pass.valid_out = context.valid();
    pass.in_max = in_norm.max();
    pass.in_scale = in_norm.scale();
    pass.c_dc = c_dc.get();
    pass.dcoupling = in.dcoupling;
    pass.du = out.du;
    if (p.votes_given) {
      pass.dvotes = out.dweight;
    } else {
      pass.dweight = out.dweight;
    }
    if (out.per_sample_logits) pass.dlogits_sample = out.dlogits;
    const int64_t terms = p.iterations - first;
    const int64_t size = plan.lanes ? LanesFinalScratch<T>(p, plan, terms, nullptr).size : RowsFinalScratch<T>(p, plan, terms, nullptr).size;
    const Buffer<T> scratch(tasks * size);
    parallel(tasks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task) {
        FinalPass<T> mine = pass;
        if (logits > 0) mine.dlogits = dlogits.get() + task / splits * logits;
        if (adders > 0) {
          const int64_t adder = p.shared_weight ? task : task / splits;
          mine.dweight_sum = dweight.high() + adder * weights;
          mine.dweight_low = dweight.low() + adder * weights;
        }
        const Range range = share(p, plan, task, groups, splits);
        T* memory = scratch.get() + task * size;
        plan.lanes ? context.kernels_.lanes_final(mine, range, memory) : context.kernels_.rows_final(mine, range, memory);
      }
    });
    dweight.join();
    add_up<T>(dweight.high(), adders, weights, out.dweight);
    for (int64_t group = 0; group < groups; ++group) {
      for (int64_t n = 0; n < logits; ++n) dlogits_sum_[n] += dlogits.get()[group * logits + n];
    }
  }

  Context<T> context;
  const Problem& p;
  const BackwardInputs& in;
  const BackwardOutputs& out;
  double *dlogits_sum_, *dbias_sum_;
  int64_t first;
  Buffer<T> V, ds;
  Sums<T> sums;
  InNormArrays<T> in_norm;
  Buffer<T> c_dc;
  std::vector<T> bias;
};

// Votes that exist are read once per iteration. Sample by sample, all iterations of one before the next,
// they come from memory once and from the cache after that; a thread then has samples of its own.
constexpr int64_t kSliceBytes = 512 * 1024;

struct Slices {
  int64_t tasks, samples;  // samples worked on together

  Slices(const Problem& p, int64_t size) {
    tasks = p.votes_given ? std::min(p.B, num_threads()) : 0;
    if (tasks < num_threads() || p.I == 0) tasks = 0;
    const int64_t bytes = std::max<int64_t>(1, p.I * p.J * p.D * size);
    samples = std::clamp<int64_t>(kSliceBytes / bytes, 1, tasks == 0 ? p.B + 1 : (p.B + tasks - 1) / tasks);
  }
};

View shifted(View view, int64_t elements) {
  const int64_t size = view.storage == Storage::f64 ? 8 : view.storage == Storage::f32 ? 4 : 2;
  if (view.data != nullptr) view.data = static_cast<char*>(view.data) + elements * size;
  return view;
}

MaskView shifted(MaskView mask, int64_t rows) {
  if (mask.data != nullptr) mask.data += rows * mask.stride[0];
  return mask;
}

Problem slice(const Problem& whole, int64_t b0, int64_t samples) {
  Problem p = whole;
  p.B = samples;
  p.votes = shifted(whole.votes, b0 * whole.votes.stride[0]);
  p.logits = shifted(whole.logits, b0 * whole.logits.stride[0]);
  p.mask = shifted(whole.mask, b0);
  p.out_mask = shifted(whole.out_mask, b0);
  return p;
}

template <class T>
void passes_forward(const Problem& p, const ForwardOutputs& out) {
  const Slices slices(p, sizeof(T));
  if (slices.tasks == 0) return Forward<T>(p, out, num_threads()).run();
  parallel(slices.tasks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t b = p.B * begin / slices.tasks; b < p.B * end / slices.tasks; b += slices.samples) {
      const int64_t samples = std::min(slices.samples, p.B * end / slices.tasks - b);
      ForwardOutputs part = out;
      part.v = shifted(out.v, b * p.J * p.D);
      part.coupling = shifted(out.coupling, b * p.I * p.J);
      part.s = static_cast<T*>(out.s) + b * p.J * p.D;
      part.norm = static_cast<T*>(out.norm) + (p.softmax_in ? b * p.J : 0);
      Forward<T>(slice(p, b, samples), part, 1).run();
    }
  });
}

template <class T>
void passes_backward(const Problem& p, const BackwardInputs& in, const BackwardOutputs& out) {
  const Slices slices(p, sizeof(T));
  const int64_t tasks = std::max<int64_t>(1, slices.tasks);
  const int64_t logits = out.dlogits.data != nullptr && !out.per_sample_logits ? p.I * p.J : 0;
  const int64_t bias = out.dbias.data != nullptr ? p.J * p.D : 0;
  const Buffer<double> dlogits(tasks * logits), dbias(tasks * bias);
  std::fill_n(dlogits.get(), tasks * logits, 0.0);
  std::fill_n(dbias.get(), tasks * bias, 0.0);
  const auto logits_of = [&](int64_t task) { return logits == 0 ? nullptr : dlogits.get() + task * logits; };
  const auto bias_of = [&](int64_t task) { return bias == 0 ? nullptr : dbias.get() + task * bias; };
  if (slices.tasks == 0) {
    Backward<T>(p, in, out, logits_of(0), bias_of(0), num_threads()).run();
  } else {
    parallel(tasks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task) {
        const int64_t b1 = p.B * (task + 1) / tasks;
        for (int64_t b = p.B * task / tasks; b < b1; b += slices.samples) {
          BackwardInputs part_in = in;
          part_in.dv = shifted(in.dv, b * in.dv.stride[0]);
          part_in.dcoupling = shifted(in.dcoupling, b * in.dcoupling.stride[0]);
          part_in.coupling = shifted(in.coupling, b * in.coupling.stride[0]);
          part_in.s = static_cast<const T*>(in.s) + b * p.J * p.D;
          part_in.norm = static_cast<const T*>(in.norm) + (p.softmax_in ? b * p.J : 0);
          BackwardOutputs part_out = out;
          part_out.dweight = shifted(out.dweight, b * p.I * p.J * p.D);
          if (out.per_sample_logits) part_out.dlogits = shifted(out.dlogits, b * p.I * p.J);
          const Problem part = slice(p, b, std::min(slices.samples, b1 - b));
          Backward<T>(part, part_in, part_out, logits_of(task), bias_of(task), 1).run();
        }
      }
    });
  }
  add_up<double>(dlogits.get(), logits == 0 ? 0 : tasks, logits, out.dlogits);
  add_up<double>(dbias.get(), bias == 0 ? 0 : tasks, bias, out.dbias);
}

// A small batch: the votes made once, kept, and routed.
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

  // The same routing with the votes given.
  Problem routed() const {
    Problem q = p;
    q.votes_given = true;
    q.shared_weight = false;
    q.K = 1;
    q.u = q.weight = View{};
    q.votes = View{votes.get(), kStorage<T>, {p.I * p.J * p.D, p.J * p.D, p.D, 1}};
    return q;
  }

  // dvotes took the place of the votes: du and dW from them.
  void finish(const BackwardOutputs& out) const {
    if (out.du.data == nullptr && out.dweight.data == nullptr) return;
    const int64_t adders = p.shared_weight && out.dweight.data != nullptr ? num_threads() : 0;
    const Sums<T> sums(adders * row);
    sums.clear();
    const Buffer<T> scratch(num_threads() * 2 * (row + p.K));
    over_capsules([&](int64_t task, int64_t i0, int64_t i1) {
      SmallBatchGradients<T> gradients{votes.get(), out.du, out.dweight, nullptr, nullptr};
      if (adders > 0) {
        gradients.dweight_sum = sums.high() + task * row;
        gradients.dweight_low = sums.low() + task * row;
      }
      kernels_.small_gradients(gradients, p, i0, i1, scratch.get() + task * 2 * (row + p.K));
    });
    sums.join();
    add_up<T>(sums.high(), adders, row, out.dweight);
  }

 private:
  template <class F>
  void over_capsules(const F& f) const {
    const int64_t tasks = num_threads();
    parallel(tasks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task) f(task, p.I * task / tasks, p.I * (task + 1) / tasks);
    });
  }

  const Problem& p;
  const Kernels<T>& kernels_;
  int64_t row;
  Buffer<T> votes;
};

template <class T>
bool is_small_batch(const Problem& p) {
  return make_plan(p, kernels<T>(isa()).L, num_threads(), sizeof(T)).small_batch;
}

}  // namespace

template <class T>
void routing_forward(const Problem& p, const ForwardOutputs& out) {
  if (!is_small_batch<T>(p)) return passes_forward<T>(p, out);
  const SmallBatch<T> batch(p);
  passes_forward<T>(batch.routed(), out);
}

template <class T>
void routing_backward(const Problem& p, const BackwardInputs& in, const BackwardOutputs& out) {
  if (!is_small_batch<T>(p)) return passes_backward<T>(p, in, out);
  const SmallBatch<T> batch(p);
  const Problem routed = batch.routed();
  BackwardOutputs votes_out = out;
  votes_out.du = View{};
  votes_out.dweight = out.du.data == nullptr && out.dweight.data == nullptr ? View{} : routed.votes;
  passes_backward<T>(routed, in, votes_out);
  batch.finish(out);
}

template void routing_forward<float>(const Problem&, const ForwardOutputs&);
template void routing_forward<double>(const Problem&, const ForwardOutputs&);
template void routing_backward<float>(const Problem&, const BackwardInputs&, const BackwardOutputs&);
template void routing_backward<double>(const Problem&, const BackwardInputs&, const BackwardOutputs&);

}  // namespace capsfast
