// The gradient pass in the rows layout, all iterations at once. lanes_gradient.inl has the formulas.
#pragma once

#include "../../cpu/vec.inl"
#include "scratch.h"
#include "gather.inl"
#include "rows.inl"

namespace capsfast::CAPSFAST_TARGET {

// B_: Rows or Keys, the building blocks. Q: see Rows.
template <class T, class B_, bool Q>
struct RowsGradient {
  using V = typename B_::V;
  using Sums = RowsSums<T, B_>;
  static constexpr int L = B_::L;

  struct Block {
    int64_t b, i0, count;
    typename B_::Votes votes;
  };

  static void coefficients(const GradientPass<T>& pass, const RowsScratch<T>& at, const Block& block) {
    const Problem& p = *pass.problem;
    const int64_t J = p.J, D = p.D;
    const bool want_logits = pass.dlogits != nullptr || pass.dlogits_sample.data != nullptr;
    const bool want_db =
        want_logits || pass.mass.high != nullptr || pass.dactivation.data != nullptr || pass.dlse_given.data != nullptr;
    const T* center = from(pass.center, block.b * J * D);
    const typename B_::LaneNumbers lanes = B_::numbers(p, pass.dlse, block.b, block.i0, block.count, at);
    for (int64_t t = pass.since; t < p.iterations; ++t) {
      T* c = at.c + (t - pass.since) * J * L;
      T* dc = at.db + (t - pass.since) * J * L;
      const int64_t scalars = (t * p.B + block.b) * J;
      const auto outputs = B_::OutputNumbers::of(pass, block.b * J, scalars, pass.in_dlse);
      if (t < pass.scored) {
        __builtin_memset(c, 0, static_cast<size_t>(J * L) * sizeof(T));
      } else {
        B_::dots(block.votes, block.count, pass.score.from(scalars * D, scalars), center, J, D, at.part, c);
      }
      B_::template add<true>(from(pass.score.constant, scalars), J, c);
      B_::add_logits(p, block.b, block.i0, block.count, lanes.valid, outputs.valid, c);
      if (p.softmax_in()) {
        B_::template softmax_in<true>(J, outputs.in_max, outputs.in_scale, c);
      } else {
        B_::normalize(p.normalize, J, p.leaky, lanes.lse, nullptr, c);
      }
      if (!want_db && (p.gradient_last || t < pass.scored)) {
        B_::weigh(lanes.activation, J, c);
        continue;
      }
      B_::dots(block.votes, block.count, pass.gradient.from(scalars * D, scalars), center, J, D, at.part, dc);
      B_::template add<true>(from(pass.gradient.constant, scalars), J, dc);
      const bool last = t + 1 == p.iterations;
      B_::template finish<true, 1>(pass, lanes, outputs, last, block.b, block.i0, block.count, c, dc);
    }
    if (want_logits) logits(pass, at, block);
  }

  static void logits(const GradientPass<T>& pass, const RowsScratch<T>& at, const Block& block) {
    const int64_t J = pass.problem->J, terms = pass.problem->iterations - pass.since;
    const View& out = pass.dlogits_sample;
    for (int64_t n = 0; n < block.count; ++n) {
      for (int64_t j = 0; j < J; ++j) {
        T total = 0;
        for (int64_t t = 0; t < terms; ++t) total += at.db[(t * J + j) * L + n];
        if (pass.dlogits != nullptr) pass.dlogits[(block.i0 + n) * J + j] += total;
        if (out.data == nullptr) continue;
        write<T>(out, block.b * out.stride[0] + (block.i0 + n) * out.stride[1] + j * out.stride[2], total);
      }
    }
  }

  // Lanes [d, d + L) of dvotes of input capsule n of the block for output capsule j.
  static CAPSFAST_INLINE V gradient(const GradientPass<T>& pass, const RowsScratch<T>& at, const Block& block,
                                    int64_t n, int64_t j, int64_t d, int64_t D) {
    const Problem& p = *pass.problem;
    V g = V{};
    for (int64_t t = pass.since; t < p.iterations; ++t) {
      const int64_t vector = ((t * p.B + block.b) * p.J + j) * D, coefficient = ((t - pass.since) * p.J + j) * L + n;
      const bool scored = !p.gradient_last && t >= pass.scored;
      if constexpr (Q) {
        const V twice = T(2) * B_::read_vote(block.votes.at[n] + j * block.votes.pitch, pass.center + vector, d, D);
        g += at.c[coefficient] * derivative(pass.gradient, vector, twice, d, D);
        if (scored) g += at.db[coefficient] * derivative(pass.score, vector, twice, d, D);
      } else {
        g += B_::read_vector(pass.gradient.linear + vector, d, D) * at.c[coefficient];
        if (scored) g += B_::read_vector(pass.score.linear + vector, d, D) * at.db[coefficient];
      }
    }
    return g;
  }

  // The derivative of a form with respect to the vote.
  static CAPSFAST_INLINE V derivative(const Form<T>& form, int64_t vector, V twice, int64_t d, int64_t D) {
    return B_::read_vector(form.linear + vector, d, D) + twice * B_::read_vector(form.square + vector, d, D);
  }

  // Computes dvotes [L][sum_pitch] of the block, if votes are matrices.
  static void matrix_gradients(const GradientPass<T>& pass, const RowsScratch<T>& at, const Block& block) {
    const Problem& p = *pass.problem;
    const int64_t J = p.J, D = p.D;
    __builtin_memset(at.gradients, 0, static_cast<size_t>(L * B_::sum_pitch(D)) * sizeof(T));
    for (int64_t t = pass.since; t < p.iterations; ++t) {
      const int64_t vectors = (t * p.B + block.b) * J * D, coefficients = (t - pass.since) * J * L;
      B_::add_gradients(
          at.c + coefficients, pass.gradient.linear + vectors, block.count, J, D, at.padded, at.gradients);
      if (!p.gradient_last && t >= pass.scored)
        B_::add_gradients(
            at.db + coefficients, pass.score.linear + vectors, block.count, J, D, at.padded, at.gradients);
    }
  }

  // Computes dvotes [J][D] of input capsule n of the block, or [D] if all output capsules share its vote.
  static void gradients(const GradientPass<T>& pass, const RowsScratch<T>& at, const Block& block, int64_t n,
                        T* dvotes) {
    const Problem& p = *pass.problem;
    const int64_t J = p.J, D = B_::size_of(p.D);
    if (p.shared_outputs) {
      for (int64_t d = 0; d < D; d += L) {
        V total = V{};
        for (int64_t j = 0; j < J; ++j) total += gradient(pass, at, block, n, j, d, D);
        B_::write_vector(dvotes, total, d, D);
      }
      return;
    }
    for (int64_t j = 0; j < J; ++j) {
#pragma GCC unroll 2
      for (int64_t d = 0; d < D; d += L) B_::write_vector(dvotes + j * D, gradient(pass, at, block, n, j, d, D), d, D);
    }
  }

  static void write_votes(const GradientPass<T>& pass, const RowsScratch<T>& at, const Block& block, int64_t n) {
    const Problem& p = *pass.problem;
    const int64_t i = block.i0 + n, size = p.votes_size(),
                  to = block.b * pass.dvotes.stride[0] + i * pass.dvotes.stride[1];
    const bool in_place = pass.dvotes.storage == kStorage<T>;
    T* dvotes = in_place ? static_cast<T*>(pass.dvotes.data) + to : at.row;
    if (p.mask.data != nullptr && !p.mask.at(block.b, i)) {
      __builtin_memset(dvotes, 0, static_cast<size_t>(size) * sizeof(T));
    } else if constexpr (B_::kMatrices) {
      __builtin_memcpy(dvotes, at.gradients + n * B_::sum_pitch(p.D), static_cast<size_t>(size) * sizeof(T));
    } else {
      gradients(pass, at, block, n, dvotes);
    }
    if (!in_place) scatter<T>(pass.dvotes, to, {1, 1, size}, {0, 0, 1}, dvotes);
  }

  static void block_gradients(const GradientPass<T>& pass, const RowsScratch<T>& at, const Block& block) {
    const Problem& p = *pass.problem;
    coefficients(pass, at, block);
    Sums::add(pass, at, block.votes, block.count, from(pass.center, block.b * p.J * p.D), at.db);
    if (pass.dvotes.data == nullptr) return;
    if constexpr (B_::kMatrices) matrix_gradients(pass, at, block);
    for (int64_t n = 0; n < block.count; ++n) write_votes(pass, at, block, n);
  }

  static void run(const GradientPass<T>& pass, const Range& range, T* scratch) {
    const Problem& p = *pass.problem;
    const RowsScratch<T> at(p, *pass.plan, p.iterations - pass.since, true, scratch);
    for (int64_t b = range.tile0; b < range.tile1; ++b) {
      for (int64_t from = range.i0; from < range.i1; from += pass.plan->chunk) {
        const int64_t to = from + pass.plan->chunk < range.i1 ? from + pass.plan->chunk : range.i1;
        if (p.moments) Sums::clear(pass, at);
        for (int64_t i0 = from; i0 < to; i0 += L) {
          Block block{b, i0, i0 + L < to ? L : to - i0, {}};
          B_::read(p, b, i0, block.count, at.rows, at.part, &block.votes);
          block_gradients(pass, at, block);
        }
        Sums::join(pass, at, b);
      }
    }
  }
};

}  // namespace capsfast::CAPSFAST_TARGET
