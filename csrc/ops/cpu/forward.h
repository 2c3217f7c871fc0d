// The forward of a routing or of a routing_pass. An iteration is an accumulate pass, from whose sums s_t, v_t and V_t
// follow. A routing_pass is one iteration whose score is an argument, without a squash: its sums are the result.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "../pass_problem.h"
#include "call.h"

namespace capsfast::driver {

// The tensors of a forward. A routing_pass has `in` and `out`. A routing has v and s; of `out` it has batch, norm, and
// weights for its coupling.
template <class T>
struct ForwardCall {
  PassInputs in;
  PassOutputs out;
  View v;             // [B, J, D]
  void* s = nullptr;  // [r, B, J, D]
  BackwardOutputs none = {};

  BackwardOutputs& gradients() { return none; }
  ForwardCall from(const Problem& p, int64_t n) const {
    ForwardCall part = *this;
    begin_at(p, n,
             {&part.in.query, &part.in.precision, &part.in.center, &part.in.prior, &part.out.mass, &part.out.first,
              &part.out.second, &part.out.weights, &part.out.lse, &part.v});
    if (!p.moments && p.has_positions()) return part;
    if (!p.moments) part.s = static_cast<T*>(s) + n * p.J * p.D;
    if (p.softmax_in()) part.out.norm = static_cast<T*>(out.norm) + n * p.J;
    return part;
  }
  Parts parts(const Problem& p) const { return parts_of<T>(p, num_threads(), {}); }
  void run(const Problem& p, const Totals<T>& totals) const;
};

// A form of the votes in the layout of the passes: a linear and, if the pass is quadratic, a square part, and a
// constant if there is one. A missing tensor is zeros. A routing has a linear part for each of its iterations.
template <class T>
class FormArrays {
 public:
  FormArrays(const Context<T>& context, const View& linear, const View& square, T factor, const View& constant,
             int64_t iterations = 1)
      : size_(iterations * context.layout.vectors()),
        quadratic_(context.p.quadratic),
        constant_(constant.data != nullptr),
        squares_(linear.data == nullptr),
        memory_((quadratic_ ? 2 : 1) * size_ + (constant_ ? context.layout.scalars() : 0)) {
    const Problem& p = context.p;
    if (iterations > 1) {
      std::fill_n(memory_.get(), size_, T(0));
    } else {
      context.load(linear, p.J, p.D, T(1), memory_.get());
    }
    if (quadratic_) context.load(square, p.J, p.D, factor, memory_.get() + size_);
    if (constant_) context.load(constant, p.J, 1, T(1), memory_.get() + (quadratic_ ? 2 : 1) * size_);
  }
  T* linear() const { return memory_.get(); }
  Form<T> form() const {
    const T* linear = memory_.get();
    return {linear, quadratic_ ? linear + size_ : nullptr, constant_ ? linear + (quadratic_ ? 2 : 1) * size_ : nullptr,
            squares_};
  }

 private:
  int64_t size_;
  bool quadratic_, constant_, squares_;
  Buffer<T> memory_;
};

// What scores the votes: V in a routing, from iteration 1 on; arguments in a routing_pass. Also has the center of the
// votes.
template <class T>
class Score {
 public:
  Score(const Context<T>& context, const PassInputs& in, int64_t iterations = 1)
      : by_arguments_(in.query.data != nullptr || in.precision.data != nullptr || in.prior.data != nullptr),
        arrays_(context, in.query, in.precision, T(-0.5), in.prior, iterations),
        center_(context.p.quadratic ? context.layout.vectors() : 0) {
    if (context.p.quadratic) context.load(in.center, context.p.J, context.p.D, T(1), center_.get());
  }
  T* V() const { return arrays_.linear(); }
  // Whether iteration t scores votes. If not, their logits are the argument `logits` alone.
  bool scores(int64_t t) const { return by_arguments_ || t > 0; }
  Form<T> form() const { return arrays_.form(); }
  const T* center(const Problem& p) const { return p.quadratic ? center_.get() : nullptr; }

 private:
  bool by_arguments_;
  FormArrays<T> arrays_;
  Buffer<T> center_;
};

// The bias [J D] of a routing, zeros without one.
template <class T>
std::vector<T> bias_of(const Problem& p) {
  std::vector<T> bias(static_cast<size_t>(p.moments ? 0 : p.J * p.D), T(0));
  if (p.bias.data != nullptr) gather<T>(p.bias, 0, {1, p.J, p.D}, {0, p.bias.stride[0], p.bias.stride[1]}, bias.data());
  return bias;
}

template <class T>
class Forward {
 public:
  Forward(const Problem& problem, const ForwardCall<T>& tensors, int64_t threads)
      : context(problem, threads),
        p(problem),
        call(tensors),
        out(tensors.out),
        score(context, tensors.in),
        first(context.plan.splits * context.layout.vectors()),
        second(out.second.data != nullptr ? context.plan.splits * context.layout.vectors() : 0),
        mass(p.moments ? context.plan.splits * context.layout.scalars() : 0),
        norms(p, context.plan, context.layout),
        bias(bias_of<T>(p)) {}

  void run() {
    for (int64_t t = 0; t < p.iterations; ++t) {
      const bool last = t + 1 == p.iterations, wants_coupling = last && out.weights.data != nullptr;
      AccumulatePass<T> pass = scored_pass(t);
      // With softmax "in", the coupling is known only after the pass.
      if (wants_coupling && !p.softmax_in()) pass.coupling = out.weights;
      if (p.normalize == Normalize::out) pass.lse = out.lse;
      pass.unweighted = are_couplings_equal(t);
      for (const Sums<T>* sums : {&first, &second, &mass}) sums->clear();
      pass.first = first.sum();
      if (out.second.data != nullptr) pass.second = second.sum();
      if (p.moments && !pass.unweighted) pass.mass = mass.sum();
      norms.start(&pass);
      context.accumulate(pass);
      norms.finish();
      context.over_tiles([&](int64_t begin, int64_t end) { finish(pass.unweighted, t, begin, end); });
      if (wants_coupling && p.softmax_in()) write_coupling(t);
    }
    if (!p.moments) return;
    context.save(mass.high(), p.J, 1, out.mass);
    context.save(first.high(), p.J, p.D, out.first);
    context.save(second.high(), p.J, p.D, out.second);
  }

 private:
  AccumulatePass<T> scored_pass(int64_t t) const {
    AccumulatePass<T> pass;
    pass.center = score.center(p);
    if (score.scores(t)) pass.score = score.form();
    return pass;
  }

  // Whether all couplings of a sample are equal, so that the pass is a product of matrices. Such a product cannot leave
  // out the poses of masked input capsules, and writes no couplings. With softmax "in" a routing writes its couplings
  // in a separate pass.
  bool are_couplings_equal(int64_t t) const {
    const bool softmax = p.normalize == Normalize::out || p.softmax_in();
    const bool masked = !p.votes_given && p.mask.data != nullptr;
    const bool last = t + 1 == p.iterations, apart = p.softmax_in() && !p.moments;
    const bool written = (last && out.weights.data != nullptr && !apart) || out.lse.data != nullptr;
    return softmax && !score.scores(t) && !p.quadratic && p.logits.data == nullptr && p.activation.data == nullptr &&
           !masked && !written;
  }

  // Computes the sums of tiles of samples from the sums of the splits; for a routing also s_t, v_t and V_t.
  void finish(bool unweighted, int64_t t, int64_t begin, int64_t end) {
    const int64_t L = context.layout.lanes(), size = context.plan.splits * p.J * L;
    const Buffer<T> factors(size);
    std::fill_n(factors.get(), size, T(0));
    Update<T> at = context.update(bias);
    at.sum = first.high();
    at.low = first.low();
    if (t + 1 < p.iterations) at.V = score.V();
    at.s = p.moments ? nullptr : static_cast<T*>(call.s) + t * out.batch * p.J * p.D;
    at.factor = factors.get();
    if (t + 1 == p.iterations) at.v = call.v;
    for (int64_t tile = begin; tile < end; ++tile) {
      for (int64_t b = tile * L; b < std::min(p.B, (tile + 1) * L); ++b) {
        for (int64_t j = 0; j < p.J; ++j) normalise(unweighted, t, b, j, factors.get() + j * L + b % L);
      }
      p.moments ? add_splits(unweighted, tile, factors.get()) : context.tiles().outputs(at, tile);
    }
  }

  // Writes the factors of the sums of every split. Saves the normaliser and the lse of the softmax over the input
  // capsules, and the mass if all couplings are the same.
  void normalise(bool unweighted, int64_t t, int64_t b, int64_t j, T* factors) const {
    const int64_t L = context.layout.lanes();
    T* const kept = static_cast<T*>(out.norm) + (p.softmax_in() ? (t * out.batch + b) * p.J + j : 0);
    const auto sum = norms.factors(context, unweighted, b, j, kept, p.iterations * out.batch * p.J, factors, p.J * L);
    if (unweighted && p.moments)
      mass.high()[(b / L * p.J + j) * L + b % L] = sum.scale * static_cast<T>(valid_count(p.mask, b, p.I));
    if (out.lse.data == nullptr || !p.softmax_in()) return;
    const T lse = sum.norm == 0 ? -std::numeric_limits<T>::infinity() : sum.max + std::log(sum.norm);
    write<T>(out.lse, b * out.lse.stride[0] + j * out.lse.stride[1], lse);
  }

  // Adds the sums of the other splits to the sums of split 0.
  void add_splits(bool unweighted, int64_t tile, const T* factors) const {
    for (int64_t j = 0; j < p.J; ++j) {
      add(first, tile, j, p.D, factors);
      if (out.second.data != nullptr) add(second, tile, j, p.D, factors);
      if (!unweighted) add(mass, tile, j, 1, factors);
    }
  }

  // Adds up the D numbers of an output capsule, one split after the other, in loops that a compiler vectorises.
  void add(const Sums<T>& sums, int64_t tile, int64_t j, int64_t D, const T* factors) const {
    const int64_t L = context.layout.lanes(), size = D * L, pitch = context.plan.tiles * p.J * size;
    const int64_t begin = (tile * p.J + j) * size;
    T* const to = sums.high() + begin;
    for (int64_t split = 0; split < context.plan.splits; ++split) {
      const T *high = to + split * pitch, *low = sums.low() + begin + split * pitch,
              *f = factors + (split * p.J + j) * L;
      const auto product = [&](int64_t n, int64_t l) { return f[l] * (high[n] + low[n]); };
      // Without lanes all numbers have one factor.
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

  // With softmax "in" the coupling takes a pass of its own, with the score of the last iteration.
  void write_coupling(int64_t t) {
    const InNormArrays<T> in_norm(p, context.layout, out.norm, out.batch, t, 1);
    AccumulatePass<T> pass = scored_pass(t);
    pass.in_max = in_norm.max();
    pass.in_scale = in_norm.scale();
    pass.coupling = out.weights;
    context.accumulate(pass);
  }

  Context<T> context;
  const Problem& p;
  const ForwardCall<T>& call;
  const PassOutputs& out;
  Score<T> score;
  Sums<T> first, second, mass;  // the moments of the votes
  InNorms<T> norms;
  std::vector<T> bias;
};

// s and norm of a slice of positions. A routing with positions does not keep them for its backward: they would take
// r / I of the memory of the votes, and I is small. So the backward routes a slice again while its votes are in the
// cache.
template <class T>
class Intermediate {
 public:
  explicit Intermediate(const Problem& slice)
      : p(slice),
        sums_(p.lane == Lane::position && !p.moments ? p.iterations * p.B * p.J : 0),
        s_(sums_ * p.D),
        norm_(p.softmax_in() ? 2 * sums_ : 0) {}
  // Makes `kept` (outputs of the forward, or inputs of the backward) and s point to this memory.
  template <class Kept, class S>
  void replace(Kept* kept, S** s) const {
    if (sums_ == 0) return;
    kept->batch = p.B;
    kept->norm = norm_.get();
    *s = s_.get();
  }
  // Routes the slice for a backward.
  void route() const {
    if (sums_ == 0) return;
    const Buffer<T> v(p.B * p.J * p.D);
    ForwardCall<T> again;
    again.v = View{v.get(), kStorage<T>, {p.J * p.D, p.D, 1}};
    replace(&again.out, &again.s);
    Forward<T>(p, again, 1).run();
  }

 private:
  const Problem& p;
  int64_t sums_;
  Buffer<T> s_, norm_;
};

template <class T>
void ForwardCall<T>::run(const Problem& p, const Totals<T>& totals) const {
  ForwardCall part = *this;
  const Intermediate<T> intermediate(p);
  intermediate.replace(&part.out, &part.s);
  Forward<T>(p, part, totals.threads).run();
}

}  // namespace capsfast::driver
