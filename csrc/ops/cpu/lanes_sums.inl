// Sums over a chunk of input capsules in the lanes layout, and how they join the sums of a pass.
#pragma once

#include "../../cpu/vec.inl"
#include "kernel.h"
#include "lanes_packing.inl"

template <class T, int L_>
struct LanesSums {
  static constexpr int L = L_;
  static constexpr int kTogether = LanesPacking<T, L>::kSums;  // sums that stay in registers over a chunk
  using V = Vec<T, L>;

  static CAPSFAST_INLINE void join(V x, const Sum<T>& sum, int64_t to) {
    V h = load<L>(sum.high + to), l = load<L>(sum.low + to);
    add_exactly(x, &h, &l);
    store<L>(sum.high + to, h);
    store<L>(sum.low + to, l);
  }

  // Adds `rows` rows of a sum of the chunk, from [rows][L], to the sum of the pass from `to` on.
  static CAPSFAST_INLINE void join(const T* from, int64_t rows, const Sum<T>& sum, int64_t to) {
    for (int64_t n = 0; n < rows * L; n += L) join(load<L>(from + n), sum, to + n);
  }

  // Adds the votes of a chunk, [count][J D][L], weighted by e [count][J][L], to the sums of tile t.
  template <bool Q, class Pass>
  static CAPSFAST_INLINE void add_chunk(const Pass& pass, int64_t t, int64_t count, const T* votes, const T* e) {
    for (int64_t j = 0; j < pass.problem->J; ++j) add_rows<Q, kTogether>(pass, t, count, votes, e, j, 0);
  }

 private:
  // Adds components d to D of the votes for output capsule j: N at a time, then half as many for the rest.
  template <bool Q, int N, class Pass>
  static CAPSFAST_INLINE void add_rows(const Pass& pass, int64_t t, int64_t count, const T* votes, const T* e,
                                       int64_t j, int64_t d) {
    const int64_t J = pass.problem->J, D = pass.problem->D;
    const bool squares = Q && pass.second.high != nullptr;
    for (; d + N <= D; d += N) {
      V first[N] = {}, second[N] = {};
      for (int64_t i = 0; i < count; ++i) {
        const T* x = votes + ((i * J + j) * D + d) * L;
        const V c = load<L>(e + (i * J + j) * L);
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) {
          const V v = load<L>(x + n * L), cv = c * v;
          first[n] += cv;
          if (squares) second[n] += cv * v;
        }
      }
      const int64_t to = ((t * J + j) * D + d) * L;
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) {
        join(first[n], pass.first, to + n * L);
        if (squares) join(second[n], pass.second, to + n * L);
      }
    }
    if constexpr (N > 1) add_rows<Q, N / 2>(pass, t, count, votes, e, j, d);
  }
};
