// What the gradient pass in the lanes layout makes of scores: coupling coefficients, the gradients of the logits and of
// the votes. Nothing here depends on K. lanes_gradient.inl has the formulas.
#pragma once

#include "../../cpu/vec.inl"
#include "scratch.h"
#include "lanes.inl"
#include "lanes_chunk.inl"

namespace capsfast::CAPSFAST_TARGET {

// Q: a quadratic pass of one iteration.
template <class T, int L_, bool Q>
struct LanesVoteGradients {
  using B_ = Lanes<T, L_, 0>;
  using V = Vec<T, L_>;
  using Tile = LanesTile<T, L_>;
  static constexpr int L = L_;

  static bool needs_db(const GradientPass<T>& pass, int64_t t) {
    const bool wanted = pass.dlogits != nullptr || pass.dlogits_sample.data != nullptr;
    return wanted || pass.mass.high != nullptr || pass.dactivation.data != nullptr || pass.dlse_given.data != nullptr ||
           (!pass.problem->gradient_last && t >= pass.scored);
  }

  static const T* parameters(const T* all, const GradientPass<T>& pass, int64_t iteration, int64_t t) {
    const int64_t JD = pass.problem->J * pass.problem->D;
    return all + (iteration * pass.plan->tiles + t) * JD * (pass.problem->capsule_lanes() ? 1 : L);
  }

  // Replaces the dot products with V (in at.c) by c, and those with ds (in at.db) by db. Writes the gradients of
  // activation and lse.
  static void coefficients(const GradientPass<T>& pass, const Tile& tile, const LanesGradientScratch<T>& at) {
    const Problem& p = *pass.problem;
    const int64_t J = p.J, chunk = pass.plan->gradient_chunk, tiles = pass.plan->tiles;
    for (int64_t i = 0; i < tile.count; ++i) {
      const typename B_::LaneNumbers lanes = tile.numbers(p, at, i, pass.dlse);
      for (int64_t t = pass.since; t < p.iterations; ++t) {
        const int64_t scalars = (t * tiles + tile.t) * J * L;
        const auto outputs = B_::OutputNumbers::of(pass, tile.t * J * L, scalars, pass.in_dlse);
        T* c = at.c + ((t - pass.since) * chunk + i) * J * L;
        T* dc = at.db + ((t - pass.since) * chunk + i) * J * L;
        B_::add(from(pass.score.constant, scalars), J, c);
        tile.add_logits(p, outputs.valid, at, i, c);
        if (p.softmax_in()) {
          B_::softmax_in(J, outputs.in_max, outputs.in_scale, c);
        } else {
          B_::normalize(p.normalize, J, p.leaky, lanes.lse, nullptr, c);
        }
        if (!needs_db(pass, t)) {
          B_::weigh(lanes.activation, J, c);
          continue;
        }
        B_::add(from(pass.gradient.constant, scalars), J, dc);
        const bool last = t + 1 == p.iterations;
        B_::template finish<false, 0>(pass, lanes, outputs, last, tile.b0, tile.i0 + i, tile.samples, c, dc);
      }
    }
  }

  // Products that add up to a row of dvotes of input capsule i for output capsule j: a factor for each iteration times
  // a row of the output capsule. next_factor and next_rows: steps to the next iteration.
  struct Products {
    const T *factors, *rows;
    int64_t count, next_factor, next_rows;

    CAPSFAST_INLINE Products(const GradientPass<T>& pass, const Tile& tile, const T* coefficients, const T* all,
                             int64_t t0, int64_t i, int64_t j) {
      const Problem& p = *pass.problem;
      count = p.iterations > t0 ? p.iterations - t0 : 0;
      next_factor = pass.plan->gradient_chunk * p.J * L;
      factors = coefficients + (i * p.J + j) * L + (t0 - pass.since) * next_factor;
      rows = all == nullptr ? nullptr : parameters(all, pass, t0, tile.t) + j * p.D * (p.capsule_lanes() ? 1 : L);
      next_rows = parameters(all, pass, 1, 0) - all;
    }

    template <int N, bool LanesAgree>
    CAPSFAST_INLINE void add(int64_t d, V* sums) const {
      const T *factor = factors, *row = rows + d * (LanesAgree ? 1 : L);
      for (int64_t n = 0; n < count; ++n, factor += next_factor, row += next_rows) {
        const V c = load<L>(factor);
#pragma GCC unroll 16
        for (int m = 0; m < N; ++m) sums[m] += c * B_::template parameter<LanesAgree>(row, m);
      }
    }
  };

  // dvotes of input capsule i for output capsule j.
  template <bool LanesAgree>
  struct VoteGradient {
    Products ds, V_t;

    CAPSFAST_INLINE VoteGradient(const GradientPass<T>& pass, const Tile& tile, const LanesGradientScratch<T>& at,
                                 int64_t i, int64_t j)
        : ds(pass, tile, at.c, pass.gradient.linear, pass.since, i, j),
          V_t(pass, tile, at.db, pass.score.linear,
              pass.problem->gradient_last ? pass.problem->iterations
              : pass.scored > pass.since  ? pass.scored
                                          : pass.since,
              i, j) {}

    // rows[n] = component d + n, for n < N.
    template <int N>
    CAPSFAST_INLINE void rows(int64_t d, V* rows) const {
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) rows[n] = V{};
      ds.template add<N, LanesAgree>(d, rows);
      V_t.template add<N, LanesAgree>(d, rows);
    }
  };

  // The same for a quadratic pass, which has one iteration.
  template <bool LanesAgree>
  struct QuadraticVoteGradient {
    Form<T> gradient, score;
    V c, db;
    const T* x;
    bool scored;

    CAPSFAST_INLINE QuadraticVoteGradient(const GradientPass<T>& pass, const Tile& tile,
                                          const LanesGradientScratch<T>& at, int64_t i, int64_t j)
        : gradient(form(pass.gradient, pass, tile, j)), score(form(pass.score, pass, tile, j)) {
      const int64_t pair = i * pass.problem->J + j;
      c = load<L>(at.c + pair * L);
      db = load<L>(at.db + pair * L);
      x = at.held + pair * pass.problem->D * L;
      scored = pass.scored == 0;
    }

    // The form of a tile, from output capsule j on.
    static CAPSFAST_INLINE Form<T> form(const Form<T>& all, const GradientPass<T>& pass, const Tile& tile, int64_t j) {
      if (all.linear == nullptr) return {};
      const int64_t row = j * pass.problem->D * (LanesAgree ? 1 : L);
      return {parameters(all.linear, pass, 0, tile.t) + row, parameters(all.square, pass, 0, tile.t) + row};
    }

    template <int N>
    CAPSFAST_INLINE void rows(int64_t d, V* rows) const {
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) {
        const V twice = T(2) * load<L>(x + (d + n) * L);
        rows[n] = c * (B_::template parameter<LanesAgree>(gradient.linear, d + n) +
                       twice * B_::template parameter<LanesAgree>(gradient.square, d + n));
        if (!scored) continue;
        rows[n] += db * (B_::template parameter<LanesAgree>(score.linear, d + n) +
                         twice * B_::template parameter<LanesAgree>(score.square, d + n));
      }
    }
  };

  // LanesAgree: numbers of an output capsule are the same in all lanes.
  template <bool LanesAgree = false>
  using Gradient = std::conditional_t<Q, QuadraticVoteGradient<LanesAgree>, VoteGradient<LanesAgree>>;

  // Writes dvotes of input capsule i for output capsules [j0, j1) to dx [(j1 - j0) D][L].
  template <bool LanesAgree = false>
  static void vote_gradients(const GradientPass<T>& pass, const Tile& tile, const LanesGradientScratch<T>& at,
                             int64_t i, int64_t j0, int64_t j1, T* dx) {
    const int64_t D = pass.problem->D;
    for (int64_t j = j0; j < j1; ++j, dx += D * L) {
      const Gradient<LanesAgree> gradient(pass, tile, at, i, j);
      const auto stored = [&](auto count, int64_t d) {
        constexpr int N = decltype(count)::value;
        V rows[N];
        gradient.template rows<N>(d, rows);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) store<L>(dx + (d + n) * L, rows[n]);
      };
      int64_t d = 0;
      for (; d + 4 <= D; d += 4) stored(std::integral_constant<int, 4>{}, d);
      for (; d < D; ++d) stored(std::integral_constant<int, 1>{}, d);
    }
  }

  // Adds the votes of the chunk, weighted by db, to the sums of a pass of one iteration.
  static void add_sums(const GradientPass<T>& pass, const Tile& tile, const LanesGradientScratch<T>& at) {
    const int64_t J = pass.problem->J;
    for (int64_t j = 0; j < J; ++j) {
      V mass = V{};
      for (int64_t i = 0; i < tile.count; ++i) mass += load<L>(at.db + (i * J + j) * L);
      LanesSums<T, L>::join(mass, pass.mass, (tile.t * J + j) * L);
    }
    const T* const votes = pass.problem->votes_in_lanes() ? tile.votes : at.held;
    if (pass.first.high != nullptr) LanesSums<T, L>::template add_chunk<Q>(pass, tile.t, tile.count, votes, at.db);
  }

  static void sum_logits(const GradientPass<T>& pass, const Tile& tile, const LanesGradientScratch<T>& at) {
    const Problem& p = *pass.problem;
    const int64_t size = tile.count * p.J * L, pitch = pass.plan->gradient_chunk * p.J * L;
    const bool per_sample = pass.dlogits_sample.data != nullptr;
    for (int64_t n = 0; n < size; n += L) {
      V total = per_sample ? V{} : load<L>(at.dlogits + n);
      for (int64_t t = 0; t < p.iterations - pass.since; ++t) total += load<L>(at.db + t * pitch + n);
      store<L>(at.dlogits + n, total);
    }
    if (per_sample)
      B_::unpack(at.dlogits, tile.b0, tile.samples, tile.i0, tile.count, p.J, at.buffer, pass.dlogits_sample);
  }

  // Writes the gradients of given votes.
  static void write_votes(const GradientPass<T>& pass, const Tile& tile, const LanesGradientScratch<T>& at) {
    const Problem& p = *pass.problem;
    const int64_t J = p.J, D = p.D, held = pass.plan->gradient_out_tile;
    if (p.capsule_lanes()) {
      // Gradients replace the votes. Masked votes are 0 and give no gradients.
      T* const dvotes = static_cast<T*>(pass.dvotes.data) + tile.i0 * J * D * L;
      for (int64_t i = 0; i < tile.count; ++i) vote_gradients<true>(pass, tile, at, i, 0, J, dvotes + i * J * D * L);
      return;
    }
    for (int64_t i = 0; i < tile.count; ++i) {
      const View to = B_::of_capsule(pass.dvotes, tile.i0 + i);
      for (int64_t j0 = 0; j0 < J; j0 += held) {
        const int64_t j1 = j0 + held < J ? j0 + held : J;
        vote_gradients(pass, tile, at, i, j0, j1, at.dx);
        for (int64_t row = 0; row < (j1 - j0) * D && p.mask.data != nullptr; ++row) {
          V x = load<L>(at.dx + row * L);
          B_::template keep_valid<1>(tile.valid_of(i), &x);
          store<L>(at.dx + row * L, x);
        }
        B_::unpack(at.dx, tile.b0, tile.samples, j0, j1 - j0, D, at.buffer, to);
      }
    }
  }
};

}  // namespace capsfast::CAPSFAST_TARGET
