// The accumulate pass in the lanes layout: sums over the input capsules, weighted by the coupling or by its gradient.
//
// A chunk of weights is read once for all tiles of samples. If the votes of all J output capsules fit the cache
// (plan.out_tile >= J), the pass makes them once, scores them and adds them up. Otherwise a first sweep over tiles of
// output capsules keeps only the scores [chunk][J]; a second sweep makes the votes again and adds them up. When a tile
// of output capsules ends, the sums of the chunk join the sums of the pass while they are in L1. Votes with positions
// are copied to lanes, less the center, into the array of poses. Votes whose lanes are input capsules are read in place
// if there is no center.
#pragma once

#include "../../cpu/vec.inl"
#include "scratch.h"
#include "lanes.inl"
#include "lanes_chunk.inl"

namespace capsfast::CAPSFAST_TARGET {

// Q: a quadratic pass.
template <class T, int L_, int K_, bool Q>
struct LanesAccumulate {
  using B_ = Lanes<T, L_, K_>;
  using Coefficients = LanesCoefficients<T, L_>;
  using Tile = typename Coefficients::Tile;
  using V = typename B_::V;
  static constexpr int L = B_::L;

  // The forms of output capsules [j0, j1), and where their results go: score to b and, in the backward, gradient to dc,
  // both [J][L]. The constants of the forms are added later. A row of a form has `lanes` numbers.
  struct Sets {
    const T* linear[2];
    const T* square[2];
    T* out[2];
    int64_t count = 0;

    CAPSFAST_INLINE Sets(const Tile& tile, int64_t D, int64_t j0, int64_t j1, int64_t lanes, T* b, T* dc) {
      const auto add = [&](const Form<T>& form, T* to) {
        linear[count] = Q && form.squares ? nullptr : form.linear + j0 * D * lanes;
        square[count] = form.square + (Q ? j0 * D * lanes : 0);
        out[count++] = to + j0 * L;
      };
      if (tile.score.linear != nullptr) {
        add(tile.score, b);
      } else {
        __builtin_memset(b + j0 * L, 0, static_cast<size_t>((j1 - j0) * L) * sizeof(T));
      }
      if (!Q && tile.gradient.linear != nullptr) add(tile.gradient, dc);
    }
  };

  // Makes the votes of input capsule i for output capsules [j0, j1), stores them to x unless x is null, and scores
  // them. `apart`: as a function call, not inlined in the loop.
  template <bool apart = !B_::kConstantK>
  static CAPSFAST_INLINE void score(const AccumulatePass<T>& pass, const Tile& tile,
                                    const LanesAccumulateScratch<T>& at, int64_t i, int64_t j0, int64_t j1, T* x, T* b,
                                    T* dc) {
    const Problem& p = *pass.problem;
    const Sets sets(tile, p.D, j0, j1, L, b, dc);
    const Votes of = votes_of(pass, tile, at, i, j0);
    const int64_t K = B_::K_of(p.K);
    if constexpr (apart) {
      B_::template scored_votes_apart<Q>(of.weight, of.poses, tile.valid_of(i), of.center, K, p.P, j1 - j0, p.D, x,
                                         at.x, sets.count, sets.linear, sets.square, sets.out);
    } else {
      B_::template scored_votes<Q>(of.weight, of.poses, tile.valid_of(i), of.center, K, p.P, j1 - j0, p.D, x, at.x,
                                   sets.count, sets.linear, sets.square, sets.out);
    }
  }

  static CAPSFAST_INLINE void score_given(const AccumulatePass<T>& pass, const Tile& tile, int64_t i, T* b, T* dc) {
    const Problem& p = *pass.problem;
    const Sets sets(tile, p.D, 0, p.J, p.capsule_lanes() ? 1 : L, b, dc);
    const T* votes = tile.votes + i * p.J * p.D * L;
    if (p.capsule_lanes()) {
      B_::template score_stored<Q, true>(votes, p.J, p.D, sets.count, sets.linear, sets.square, sets.out);
    } else {
      B_::template score_stored<Q, false>(votes, p.J, p.D, sets.count, sets.linear, sets.square, sets.out);
    }
  }

  // The arrays that make the votes of an input capsule, from an output capsule on.
  struct Votes {
    const T *weight, *poses, *center;
  };
  static CAPSFAST_INLINE Votes votes_of(const AccumulatePass<T>& pass, const Tile& tile,
                                        const LanesAccumulateScratch<T>& at, int64_t i, int64_t j0) {
    const Problem& p = *pass.problem;
    const int64_t K = B_::K_of(p.K);
    return {tile.weights + i * tile.pitch + j0 * B_::weight_rows_of(p) * K, at.u + i * B_::pose_size_of(p) * L,
            Q ? tile.center + j0 * p.D * L : nullptr};
  }

  // Adds the votes x [J D][L] of output capsules [j0, j1), weighted by e [J][L], to the sums of the chunk, whose first
  // row belongs to j0.
  static CAPSFAST_INLINE void add_votes(const AccumulatePass<T>& pass, const LanesAccumulateScratch<T>& at, const T* e,
                                        const T* x, int64_t j0, int64_t j1) {
    const int64_t D = pass.problem->D;
    for (int64_t j = j0; j < j1; ++j) {
      const int64_t vote = (j - j0) * D * L;
      if (Q && pass.second.high != nullptr) {
        B_::add_scaled_squares(load<L>(e + j * L), x + vote, D, at.sum + vote, at.second + vote);
      } else {
        B_::add_scaled(load<L>(e + j * L), x + vote, D, at.sum + vote);
      }
    }
  }

  // Input capsules i and i + 1 of a quadratic pass together. The pass has five arrays of output capsules, which do not
  // fit L1, so each array is read once for both input capsules.
  static CAPSFAST_INLINE void pair(const AccumulatePass<T>& pass, const Tile& tile, const LanesAccumulateScratch<T>& at,
                                   int64_t i) {
    const int64_t J = pass.problem->J, D = pass.problem->D, step = J < 4 ? J : 4;
    T *const x[2] = {at.x, at.x + J * D * L}, *const b[2] = {at.scores, at.scores + J * L};
    for (int64_t j0 = 0; j0 < J; j0 += step) {
      const int64_t j1 = j0 + step < J ? j0 + step : J;
      for (int c = 0; c < 2; ++c) score(pass, tile, at, i + c, j0, j1, x[c] + j0 * D * L, b[c], nullptr);
    }
    for (int c = 0; c < 2; ++c) Coefficients::coefficients(pass, tile, at, i + c, b[c], nullptr);
    for (int64_t j = 0; j < J; ++j) {
      const int64_t vote = j * D * L;
      B_::add_scaled_squares(
          load<L>(b[0] + j * L), x[0] + vote, load<L>(b[1] + j * L), x[1] + vote, D, at.sum + vote, at.second + vote);
    }
    for (int c = 0; c < 2; ++c) Coefficients::add_mass(pass, at, b[c]);
  }

  // A chunk of given votes. After the scores, a few rows of the sums at a time stay in registers over the whole chunk.
  static void chunk_given(const AccumulatePass<T>& pass, const Tile& tile, const LanesAccumulateScratch<T>& at) {
    const int64_t J = pass.problem->J;
    for (int64_t i = 0; i < tile.count; ++i) score_given(pass, tile, i, at.scores + i * J * L, at.dc + i * J * L);
    Coefficients::chunk_coefficients(pass, tile, at);
    if (pass.first.high == nullptr) return;
    const T* coefficient = tile.gradient.linear != nullptr ? at.dc : at.scores;
    Coefficients::template add_chunk<Q>(pass, tile.t, tile.count, tile.votes, coefficient);
  }

  static constexpr int kAhead = 128;  // how many vectors ahead prefetches ask for

  static void chunk(const AccumulatePass<T>& pass, const Tile& tile, const LanesAccumulateScratch<T>& at) {
    const Problem& p = *pass.problem;
    const int64_t J = p.J, D = p.D, K = B_::K_of(p.K);
    const bool online_softmax = p.softmax_in() && tile.outputs.in_max == nullptr;
    const int64_t held = pass.plan->out_tile;
    const T* coefficient = tile.gradient.linear != nullptr ? at.dc : at.scores;
    if (held >= J) {
      clear_sums(pass, at, J * D);
      int64_t i = 0;
      if constexpr (Q) {
        for (; pass.second.high != nullptr && !online_softmax && i + 2 <= tile.count; i += 2) pair(pass, tile, at, i);
      }
      for (; i < tile.count; ++i) {
        score(pass, tile, at, i, 0, J, at.x, at.scores, at.dc);
        Coefficients::coefficients(pass, tile, at, i, at.scores, at.dc);
        if (online_softmax) {
          Coefficients::online(pass, tile, at);
          B_::weigh(tile.numbers(p, at, i).activation, J, at.scores);
        }
        Coefficients::add_mass(pass, at, coefficient);
        if (pass.first.high != nullptr) add_votes(pass, at, coefficient, at.x, 0, J);
      }
      if (pass.first.high != nullptr) join_sums(pass, tile, at, 0, J * D);
      return;
    }
    for (int64_t j0 = 0; j0 < J; j0 += held) {
      const int64_t j1 = j0 + held < J ? j0 + held : J;
      for (int64_t i = 0; i < tile.count; ++i) {
        score<true>(pass, tile, at, i, j0, j1, nullptr, at.scores + i * J * L, at.dc + i * J * L);
      }
    }
    Coefficients::chunk_coefficients(pass, tile, at);
    if (pass.first.high == nullptr) return;
    for (int64_t j0 = 0; j0 < J; j0 += held) {
      const int64_t j1 = j0 + held < J ? j0 + held : J;
      clear_sums(pass, at, (j1 - j0) * D);
      for (int64_t i = 0; i < tile.count; ++i) {
        const Votes of = votes_of(pass, tile, at, i, j0);
        B_::template votes<Q>(of.weight, of.poses, tile.valid_of(i), of.center, K, p.P, j1 - j0, D, at.x);
        add_votes(pass, at, coefficient + i * J * L, at.x, j0, j1);
      }
      join_sums(pass, tile, at, j0 * D, (j1 - j0) * D);
    }
  }

  // The weights of a block of rows lie in pieces, one for each input capsule. The hardware does not foresee short
  // pieces, so prefetches ask for the piece that follows after about kBytesAhead bytes of pieces.
  static constexpr int kBytesAhead = 2048;

  // In the first iteration without logits all coefficients are the same, so the pass is a matrix product. A block of N
  // rows (j, d) stays in registers over the whole chunk.
  // The poses of two input capsules are `next` elements apart.
  template <int N>
  static CAPSFAST_INLINE void plain_block(const Tile& tile, const T* u, int64_t next, int64_t K, int64_t row, T* sum) {
    V rows[N];
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) rows[n] = V{};
    const int64_t piece = N * K * int64_t{sizeof(T)};
    const int64_t ahead = piece == 0 ? 0 : (1 + kBytesAhead / piece) * tile.pitch;
    for (int64_t i = 0; i < tile.count; ++i) {
      const T* w = tile.weights + i * tile.pitch + row * K;
      if (piece < kBytesAhead) prefetch_rows<T, 1>(w + ahead, 0, N * K);
      if constexpr (!B_::kConstantK) {
        B_::template add_products<N, 4>(w, u + i * next, 0, K, rows);
        continue;
      }
      for (int64_t k = 0; k < K; ++k) {
        const V uk = load<L>(u + i * next + k * L);
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) rows[n] += uk * w[n * K + k];
      }
    }
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) store<L>(sum + (row + n) * L, rows[n]);
  }

  static void plain_rows(const Tile& tile, const T* u, int64_t next, int64_t K_given, int64_t rows, T* sum) {
    const int64_t K = B_::K_of(K_given);
    // These sums go on over the whole chunk. Take as many sums as registers hold, so that additions do not wait for
    // each other.
    constexpr int R = L == kLanes<T> ? B_::R : B_::R * 3 / 2;
    int64_t row = 0;
    for (; row + R <= rows; row += R) plain_block<R>(tile, u, next, K, row, sum);
    if (row < rows && rows >= R) return plain_block<R>(tile, u, next, K, rows - R, sum);
    for (; row < rows; ++row) plain_block<1>(tile, u, next, K, row, sum);
  }

  static void plain(const AccumulatePass<T>& pass, const Tile& tile, const LanesAccumulateScratch<T>& at) {
    const Problem& p = *pass.problem;
    const int64_t K = B_::K_of(p.K), rows = p.J * p.D, some = pass.plan->out_tile * p.D;
    if (B_::votes_given(p)) {
      // One input capsule after the other, in the order of memory: the votes may not be in the cache.
      for (int64_t row = 0; row < rows; row += some) {
        const int64_t count = row + some < rows ? some : rows - row;
        __builtin_memset(at.sum, 0, static_cast<size_t>(count * L) * sizeof(T));
        for (int64_t i = 0; i < tile.count; ++i) {
          const T* x = tile.votes + (i * rows + row) * L;
          for (int64_t n = 0; n < count * L; n += L) {
            __builtin_prefetch(x + n + kAhead * L, 0, 2);
            store<L>(at.sum + n, load<L>(at.sum + n) + load<L>(x + n));
          }
        }
        join_sums(pass, tile, at, row, count);
      }
      return;
    }
    Tile part = tile;
    for (int64_t row = 0; row < rows; row += some) {
      const int64_t count = row + some < rows ? some : rows - row;
      if (B_::pose_matrices(p.P)) {
        part.weights = tile.weights + row / p.P * K;
        plain_poses(part, p, at, count, at.sum);
      } else {
        part.weights = tile.weights + row * K;
        plain_rows(part, at.u, K * L, K, count, at.sum);
      }
      join_sums(pass, tile, at, row, count);
    }
  }

  // plain_rows() for pose matrices, one pose after the other.
  static void plain_poses(const Tile& tile, const Problem& p, const LanesAccumulateScratch<T>& at, int64_t rows,
                          T* sum) {
    const int64_t R = p.R();
    for (int64_t pose = 0; pose < p.P; ++pose) {
      plain_rows(tile, at.u + pose * p.K * L, p.pose_size() * L, p.K, rows / p.P, at.x);
      for (int64_t row = 0; row < rows / p.P; ++row)
        store<L>(sum + (row / R * p.D + pose * R + row % R) * L, load<L>(at.x + row * L));
    }
  }

  // Whether an input capsule has the same coupling with every output capsule, and second moments are wanted.
  static bool is_alike(const AccumulatePass<T>& pass, const Tile& tile) {
    const Problem& p = *pass.problem;
    const bool scored = tile.score.linear != nullptr || p.logits.data != nullptr || tile.gradient.linear != nullptr;
    const bool written = pass.coupling.data != nullptr || pass.lse.data != nullptr;
    const bool masked = tile.valid != nullptr || tile.outputs.valid != nullptr;
    return p.normalize == Normalize::out && pass.second.high != nullptr && !scored && !written && !masked &&
           !B_::pose_matrices(p.P);
  }

  // The first iteration of such a pass. As in plain_block(), the sums of N rows stay in registers over the whole chunk:
  // from row `row` of the weights and row `to` of the sums on.
  template <int N>
  static CAPSFAST_INLINE void alike_block(const Problem& p, const Tile& tile, const LanesAccumulateScratch<T>& at,
                                          const V* equal, int64_t row, int64_t to) {
    const int64_t K = B_::K_of(p.K);
    const T* activation = p.activation.data == nullptr ? nullptr : at.activation;
    V first[N] = {}, second[N] = {};
    for (int64_t i = 0; i < tile.count; ++i) {
      V x[N];
      B_::template votes_block<N, true>(
          tile.weights + i * tile.pitch + row * K, at.u + i * K * L, tile.center + row * L, K, x);
      const V c = activation == nullptr ? *equal : *equal * load<L>(activation + i * L);
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) {
        const V cx = c * x[n];
        first[n] += cx;
        second[n] += cx * x[n];
      }
    }
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) {
      store<L>(at.sum + (to + n) * L, first[n]);
      store<L>(at.second + (to + n) * L, second[n]);
    }
  }

  static void alike(const AccumulatePass<T>& pass, const Tile& tile, const LanesAccumulateScratch<T>& at) {
    const Problem& p = *pass.problem;
    constexpr int N = B_::R / 2;  // rows whose votes and two sums fit the registers
    const V equal = V{} + T(1) / static_cast<T>(p.J + (p.leaky ? 1 : 0));
    const int64_t all = p.J * p.D, some = pass.plan->out_tile * p.D;
    for (int64_t from = 0; from < all; from += some) {
      const int64_t rows = from + some < all ? some : all - from;
      int64_t row = 0;
      for (; row + N <= rows; row += N) alike_block<N>(p, tile, at, &equal, from + row, row);
      if (row < rows && rows >= N) {
        alike_block<N>(p, tile, at, &equal, from + rows - N, rows - N);
      } else {
        for (; row < rows; ++row) alike_block<1>(p, tile, at, &equal, from + row, row);
      }
      join_sums(pass, tile, at, from, rows);
    }
    if (pass.mass.high == nullptr) return;
    V mass = V{};
    for (int64_t i = 0; i < tile.count; ++i)
      mass += p.activation.data == nullptr ? equal : equal * load<L>(at.activation + i * L);
    for (int64_t j = 0; j < p.J; ++j) store<L>(at.mass + j * L, mass);
  }

  static void clear_sums(const AccumulatePass<T>& pass, const LanesAccumulateScratch<T>& at, int64_t rows) {
    const size_t bytes = static_cast<size_t>(rows * L) * sizeof(T);
    __builtin_memset(at.sum, 0, bytes);
    if (Q && pass.second.high != nullptr) __builtin_memset(at.second, 0, bytes);
  }

  // Adds at.sum and at.second to the sums of the pass: `rows` rows of the tile, from `row` on.
  static void join_sums(const AccumulatePass<T>& pass, const Tile& tile, const LanesAccumulateScratch<T>& at,
                        int64_t row, int64_t rows) {
    const int64_t to = (tile.t * pass.problem->J * pass.problem->D + row) * L;
    Coefficients::join(at.sum, rows, pass.first, to);
    if (Q && pass.second.high != nullptr) Coefficients::join(at.second, rows, pass.second, to);
  }

  static void run(const AccumulatePass<T>& pass, const Range& range, T* scratch) {
    const Problem& p = *pass.problem;
    const int64_t J = p.J, JD = p.J * p.D;
    const LanesAccumulateScratch<T> at(p, *pass.plan, scratch);
    Tile tile{};
    for (int64_t i0 = range.i0; i0 < range.i1; i0 += tile.count) {
      tile.begin_chunk(p, i0, range.i1, pass.plan->chunk, at.weights);
      for (int64_t t = range.tile0; t < range.tile1; ++t) {
        const int64_t vectors = t * JD * L, scalars = t * J * L;
        tile.center = from(pass.center, vectors);
        tile.score = pass.score.from(vectors, scalars);
        tile.gradient = pass.gradient.from(vectors, scalars);
        tile.outputs = Coefficients::Couplings::OutputNumbers::of(pass, scalars, scalars);
        tile.begin(p, t, tile.center, at);
        if (pass.unweighted) {
          plain(pass, tile, at);
          continue;
        }
        __builtin_memset(at.norm, 0, static_cast<size_t>(J * L) * sizeof(T));
        if (pass.mass.high != nullptr) __builtin_memset(at.mass, 0, static_cast<size_t>(J * L) * sizeof(T));
        if (B_::votes_given(p)) {
          chunk_given(pass, tile, at);
        } else if (Q && is_alike(pass, tile)) {
          if constexpr (Q) alike(pass, tile, at);
        } else {
          chunk(pass, tile, at);
        }
        if (p.softmax_in() && tile.outputs.in_max == nullptr) Coefficients::join(at.norm, J, pass.norm, scalars);
        if (pass.mass.high != nullptr) Coefficients::join(at.mass, J, pass.mass, scalars);
      }
    }
  }
};

}  // namespace capsfast::CAPSFAST_TARGET
