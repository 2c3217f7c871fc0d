// The accumulate pass in the rows layout: sums over the input capsules, weighted by the coupling or by its gradient.
#pragma once

#include "../../cpu/vec.inl"
#include "scratch.h"
#include "gather.inl"
#include "rows.inl"

namespace capsfast::CAPSFAST_TARGET {

// B_: Rows or Keys, the building blocks.
template <class T, class B_, bool>
struct RowsAccumulate {
  using V = typename B_::V;
  using Sums = RowsSums<T, B_>;
  static constexpr int L = B_::L;

  // At most L input capsules of sample b, from i0 on.
  struct Block {
    int64_t b, i0, count;
    typename B_::Votes votes;
  };

  // Softmax over the input capsules: replaces scores [J][L] by exp(b - max), where max is the largest so far. If max
  // grows, all sums so far are rescaled.
  static CAPSFAST_ONCE void online(const AccumulatePass<T>& pass, const RowsScratch<T>& at, const Block& block) {
    const Problem& p = *pass.problem;
    const int64_t pitch = B_::sum_pitch(p.D);
    for (int64_t j = 0; j < p.J; ++j) {
      const int64_t scalar = block.b * p.J + j;
      T& highest = pass.max[scalar];
      const V x = load<L>(at.c + j * L);
      const T here = largest<T, L>(x), now = here > highest ? here : highest;
      if (now != highest) {
        const T factor = exp<L>(broadcast<L>(highest - now))[0];
        highest = now;
        at.norm[j] *= factor;
        multiply(pass.norm, scalar, 1, factor);
        multiply(at.sum + j * pitch, pitch, factor);
        multiply(pass.first, scalar * p.D, p.D, factor);
        if (pass.mass.high != nullptr) {
          multiply(at.mass + j * L, L, factor);
          multiply(pass.mass, scalar, 1, factor);
        }
        if (pass.second.high != nullptr) {
          multiply(at.second + j * pitch, pitch, factor);
          multiply(pass.second, scalar * p.D, p.D, factor);
        }
      }
      const V e = exp<L>(x - now);
      store<L>(at.c + j * L, e);
      at.norm[j] += sum<T, L>(e);
    }
  }

  static void multiply(T* to, int64_t count, T factor) {
    for (int64_t n = 0; n < count; ++n) to[n] *= factor;
  }
  static void multiply(const Sum<T>& sum, int64_t from, int64_t count, T factor) {
    multiply(sum.high + from, count, factor);
    multiply(sum.low + from, count, factor);
  }

  static void unweighted(const AccumulatePass<T>& pass, const RowsScratch<T>& at, const Block& block) {
    const Problem& p = *pass.problem;
    for (int64_t n = 0; n < p.J * L; ++n) at.c[n] = 1;
    B_::add_scaled(at.c, block.votes, block.count, nullptr, p.J, p.D, at.sum, nullptr);
  }

  static void weighted(const AccumulatePass<T>& pass, const RowsScratch<T>& at, const Block& block) {
    const Problem& p = *pass.problem;
    const int64_t J = p.J, D = p.D;
    const int64_t vectors = block.b * J * D;
    const Form<T> score = pass.score.from(vectors, block.b * J), gradient = pass.gradient.from(vectors, block.b * J);
    const T* center = from(pass.center, vectors);
    const typename B_::LaneNumbers lanes = B_::numbers(p, View{}, block.b, block.i0, block.count, at);
    const auto outputs = B_::OutputNumbers::of(pass, block.b * J, block.b * J);
    if (score.linear == nullptr) {
      __builtin_memset(at.c, 0, static_cast<size_t>(J * L) * sizeof(T));
    } else {
      B_::dots(block.votes, block.count, score, center, J, D, at.part, at.c);
    }
    B_::template add<true>(score.constant, J, at.c);
    B_::add_logits(p, block.b, block.i0, block.count, lanes.valid, outputs.valid, at.c);
    if (!p.softmax_in()) {
      alignas(sizeof(V)) T lse[L];
      B_::normalize(p.normalize, J, p.leaky, lanes.lse, pass.lse.data == nullptr ? nullptr : lse, at.c);
      if (pass.lse.data != nullptr) B_::template put<1>(pass.lse, block.b, block.i0, block.count, lse);
    } else if (outputs.in_max != nullptr) {
      B_::template softmax_in<true>(J, outputs.in_max, outputs.in_scale, at.c);
    } else {
      online(pass, at, block);
    }
    const T* coefficient = at.c;
    if (gradient.linear == nullptr) {
      B_::weigh(lanes.activation, J, at.c);
      if (pass.coupling.data != nullptr)
        B_::template transfer<true, 1>(pass.coupling, block.b, block.i0, block.count, J, at.c);
    } else {
      B_::dots(block.votes, block.count, gradient, center, J, D, at.part, at.db);
      if (pass.dcoupling.data != nullptr)
        B_::template transfer<false, 1>(pass.dcoupling, block.b, block.i0, block.count, J, at.db);
      B_::template differentiate<true>(p, lanes, outputs, at.c, at.db);
      coefficient = at.db;
    }
    Sums::add(pass, at, block.votes, block.count, center, coefficient);
  }

  static void run(const AccumulatePass<T>& pass, const Range& range, T* scratch) {
    const Problem& p = *pass.problem;
    const RowsScratch<T> at(p, *pass.plan, 1, false, scratch);
    for (int64_t b = range.tile0; b < range.tile1; ++b) {
      for (int64_t from = range.i0; from < range.i1; from += pass.plan->chunk) {
        const int64_t to = from + pass.plan->chunk < range.i1 ? from + pass.plan->chunk : range.i1;
        __builtin_memset(at.norm, 0, static_cast<size_t>(p.J) * sizeof(T));
        Sums::clear(pass, at);
        for (int64_t i0 = from; i0 < to; i0 += L) {
          Block block{b, i0, i0 + L < to ? L : to - i0, {}};
          B_::read(p, b, i0, block.count, at.rows, at.part, &block.votes);
          pass.unweighted ? unweighted(pass, at, block) : weighted(pass, at, block);
        }
        Sums::join(pass, at, b);
        if (pass.norm.high != nullptr) B_::join(at.norm, p.J, pass.norm.high + b * p.J, pass.norm.low + b * p.J);
      }
    }
  }
};

}  // namespace capsfast::CAPSFAST_TARGET
