// Building blocks of the lanes layout: one vector holds one number of L samples. A row is an index (j, d) of the votes.
//
// R rows of votes stay in registers while their K products are added. With AVX-512 a multiply-add broadcasts its weight
// from memory. With K = 8 this is 8 loads and 8 multiply-adds a row, which keeps two load ports and two multiply-add
// ports busy. On other instruction sets a weight takes a load of its own. There a vector of a tile has several
// registers, so that one load serves several multiply-adds.
#pragma once

#include "../../cpu/vec.inl"
#include "scratch.h"
#include "coupling.inl"
#include "lanes_packing.inl"

namespace capsfast::CAPSFAST_TARGET {

template <class T, int L_, int K_>
struct Lanes : Coupling<T, L_>, LanesPacking<T, L_> {
  static constexpr int L = L_;
  static constexpr int R = kRegisters / 2 * kLanes<T> / L;
  using V = Vec<T, L>;

  // rows[n] += w[n] . u from k on, S products at a time, then half as many for the rest. K is known only at run time,
  // so each row takes an address; S products share this address.
  template <int N, int S>
  static CAPSFAST_INLINE void add_products(const T* w, const T* u, int64_t k, int64_t K, V* rows) {
    for (; k + S <= K; k += S) {
      if constexpr (N == R) {
        constexpr int kStep = N * S * static_cast<int>(sizeof(T));
        const char* const next = reinterpret_cast<const char*>(w + N * K) + k * N * static_cast<int64_t>(sizeof(T));
#pragma GCC unroll 16
        for (int n = 0; n < kStep; n += 64) __builtin_prefetch(next + n);
      }
      V uk[S];
#pragma GCC unroll 4
      for (int s = 0; s < S; ++s) uk[s] = load<L>(u + (k + s) * L);
      const T* row = w + k;
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n, row += K) {
#pragma GCC unroll 4
        for (int s = 0; s < S; ++s) rows[n] += uk[s] * row[s];
      }
    }
    if constexpr (S > 1) add_products<N, S / 2>(w, u, k, K, rows);
  }

  // rows[n] = w[n] . u, less center [N][L] if Q
  template <int N, bool Q>
  static CAPSFAST_INLINE void votes_block(const T* w, const T* u, const T* center, int64_t K, V* rows) {
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) rows[n] = Q ? V{} - load<L>(center + n * L) : V{};
    if constexpr (kConstantK) {
      // Prefetches the weights of the next block.
      if constexpr (N == R) {
#pragma GCC unroll 16
        for (int n = 0; n < N * K_ * static_cast<int>(sizeof(T)); n += 64) {
          __builtin_prefetch(reinterpret_cast<const char*>(w + N * K_) + n);
        }
      }
#pragma GCC unroll 16
      for (int k = 0; k < K_; ++k) {
        const V uk = load<L>(u + k * L);
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) rows[n] += uk * w[n * K_ + k];
      }
    } else {
      add_products<N, 4>(w, u, 0, K, rows);
    }
  }

  // Whether K is a template constant. Then poses are vectors, and votes are made from a weight.
  static constexpr bool kConstantK = K_ > 0;
  static CAPSFAST_INLINE int64_t K_of(int64_t K) { return kConstantK ? K_ : K; }
  static CAPSFAST_INLINE bool pose_matrices(int64_t P) { return !kConstantK && P > 1; }
  static CAPSFAST_INLINE bool votes_given(const Problem& p) { return !kConstantK && p.votes_in_lanes(); }
  // Rows of an output capsule in the weight of an input capsule, and the size of the poses of an input capsule.
  static CAPSFAST_INLINE int64_t weight_rows_of(const Problem& p) { return kConstantK ? p.D : p.R(); }
  static CAPSFAST_INLINE int64_t pose_size_of(const Problem& p) { return kConstantK ? K_ : p.pose_size(); }

  // Clears the lanes for which valid [L] is 0. Does nothing if `valid` is null.
  template <int N>
  static CAPSFAST_INLINE void keep_valid(const T* valid, V* rows) {
    if (valid == nullptr) return;
    const V ok = load<L>(valid);
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) rows[n] = where(ok > V{}, rows[n], V{});
  }

  template <int N, bool Q>
  static CAPSFAST_INLINE void votes_stored(const T* w, const T* u, const T* valid, const T* center, int64_t K, T* x) {
    V rows[N];
    votes_block<N, Q>(w, u, center, K, rows);
    keep_valid<N>(valid, rows);
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) store<L>(x + n * L, rows[n]);
  }

  // votes() of pose matrices: u [P][K][L], w [rows][K] for rows (j, r) of a pose's votes, x [rows / R][P][R][L].
  template <bool Q>
  static CAPSFAST_INLINE void votes_of_poses(const T* w, const T* u, const T* valid, const T* center, int64_t K,
                                             int64_t rows, int64_t P, int64_t R_given, T* x) {
    for (int64_t p = 0; p < P; ++p, u += K * L) {
      // Stores the rows (j, r) of this pose to x in their order.
      int64_t r = 0, at = p * R_given * L;
      const auto stored = [&](auto count, int64_t row) {
        constexpr int N = decltype(count)::value;
        V block[N];
        votes_block<N, false>(w + row * K, u, nullptr, K, block);
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) {
          if constexpr (Q) block[n] -= load<L>(center + at);
          keep_valid<1>(valid, block + n);
          store<L>(x + at, block[n]);
          const bool last = ++r == R_given;
          at += last ? ((P - 1) * R_given + 1) * L : L;
          if (last) r = 0;
        }
      };
      int64_t row = 0;
      for (; row + R <= rows; row += R) stored(std::integral_constant<int, R>{}, row);
      for (; row + 4 <= rows; row += 4) stored(std::integral_constant<int, 4>{}, row);
      for (; row < rows; ++row) stored(std::integral_constant<int, 1>{}, row);
    }
  }

  // x = w . u for `outputs` output capsules, less center if Q, both [outputs D][L]. w [outputs D / P][K], u [P K][L]: P
  // poses share the weight. Masked lanes become 0 even if the weight holds NaN.
  template <bool Q>
  static CAPSFAST_ONCE void votes(const T* w, const T* u, const T* valid, const T* center, int64_t K, int64_t P,
                                  int64_t outputs, int64_t D, T* x) {
    if (pose_matrices(P)) return votes_of_poses<Q>(w, u, valid, center, K, outputs * (D / P), P, D / P, x);
    const int64_t rows = outputs * D;
    const auto stored = [&](auto count, int64_t row) {
      constexpr int N = decltype(count)::value;
      votes_stored<N, Q>(w + row * K, u, valid, center + (Q ? row * L : 0), K, x + row * L);
    };
    int64_t row = 0;
    for (; row + R <= rows; row += R) stored(std::integral_constant<int, R>{}, row);
    if (row == rows) return;
    // The last R rows as a full block, which computes some rows a second time.
    if (rows >= R) return stored(std::integral_constant<int, R>{}, rows - R);
    for (; row + 4 <= rows; row += 4) stored(std::integral_constant<int, 4>{}, row);
    for (; row < rows; ++row) stored(std::integral_constant<int, 1>{}, row);
  }

  // Applies each of `sets` forms p[set], q[set] [outputs D] (a dot product unless Q) to the votes x [outputs D][L].
  template <bool Q, bool LanesAgree>
  static CAPSFAST_INLINE void score_stored(const T* x, int64_t outputs, int64_t D, int64_t sets, const T* const* p,
                                           const T* const* q, T* const* out) {
    for (int64_t set = 0; set < sets; ++set) {
      for (int64_t j = 0; j < outputs; ++j) {
        const int64_t row = j * D * (LanesAgree ? 1 : L);
        const T *vote = x + j * D * L, *linear = p[set] == nullptr ? nullptr : p[set] + row;
        if constexpr (Q) {
          store<L>(out[set] + j * L, form<LanesAgree>(vote, linear, q[set] + row, D));
        } else {
          store<L>(out[set] + j * L, dot<LanesAgree>(vote, linear, D));
        }
      }
    }
  }

  // Computes the votes of `outputs` output capsules and, for each of `sets` arrays p[set] [outputs D][L], the dot
  // products out[set][j] = votes[j] . p[set][j]. If Q, votes are less the center, and squares of votes . q[set] are
  // added; a null p[set] adds nothing. If D is a multiple of R, products take votes from registers, and votes are
  // stored only if x is not null. Otherwise, and for pose matrices, votes are stored to x or, if x is null, to `spare`;
  // both are [outputs D][L].
  template <bool Q>
  static CAPSFAST_INLINE void scored_votes(const T* w, const T* u, const T* valid, const T* center, int64_t K,
                                           int64_t P, int64_t outputs, int64_t D, T* x, T* spare, int64_t sets,
                                           const T* const* p, const T* const* q, T* const* out) {
    if (D % R != 0 || pose_matrices(P)) {
      T* votes_at = x != nullptr ? x : spare;
      votes<Q>(w, u, valid, center, K, P, outputs, D, votes_at);
      return score_stored<Q, false>(votes_at, outputs, D, sets, p, q, out);
    }
    for (int64_t j = 0; j < outputs; ++j) {
      for (int64_t d = 0; d < D; d += R) {
        const int64_t row = j * D + d;
        V rows[R];
        votes_block<R, Q>(w + row * K, u, center + (Q ? row * L : 0), K, rows);
        keep_valid<R>(valid, rows);
        for (int64_t set = 0; set < sets; ++set) {
          const T *linear = p[set] == nullptr ? nullptr : p[set] + row * L, *square = Q ? q[set] + row * L : nullptr;
          V even = d == 0 ? V{} : load<L>(out[set] + j * L), odd = V{};
          if (Q && linear == nullptr) {
#pragma GCC unroll 16
            for (int n = 0; n < R; n += 2) {
              even += rows[n] * rows[n] * load<L>(square + n * L);
              odd += rows[n + 1] * rows[n + 1] * load<L>(square + (n + 1) * L);
            }
            store<L>(out[set] + j * L, even + odd);
            continue;
          }
#pragma GCC unroll 16
          for (int n = 0; n < R; n += 2) {
            if constexpr (Q) {
              even += rows[n] * (load<L>(linear + n * L) + rows[n] * load<L>(square + n * L));
              odd += rows[n + 1] * (load<L>(linear + (n + 1) * L) + rows[n + 1] * load<L>(square + (n + 1) * L));
            } else {
              even += rows[n] * load<L>(linear + n * L);
              odd += rows[n + 1] * load<L>(linear + (n + 1) * L);
            }
          }
          store<L>(out[set] + j * L, even + odd);
        }
        if (x == nullptr) continue;
#pragma GCC unroll 16
        for (int n = 0; n < R; ++n) store<L>(x + (row + n) * L, rows[n]);
      }
    }
  }

  // scored_votes() as a function call, for loops that inlining does not make faster.
  template <bool Q>
  static CAPSFAST_ONCE void scored_votes_apart(const T* w, const T* u, const T* valid, const T* center, int64_t K,
                                               int64_t P, int64_t outputs, int64_t D, T* x, T* spare, int64_t sets,
                                               const T* const* p, const T* const* q, T* const* out) {
    scored_votes<Q>(w, u, valid, center, K, P, outputs, D, x, spare, sets, p, q, out);
  }

  // The sum of x[d] p[d] over d < n. Four chains hide the latency of the additions.
  template <bool LanesAgree>
  static CAPSFAST_INLINE V dot(const T* x, const T* p, int64_t n) {
    V a[4] = {V{}, V{}, V{}, V{}};
    int64_t d = 0;
    for (; d + 4 <= n; d += 4) {
#pragma GCC unroll 4
      for (int c = 0; c < 4; ++c) a[c] += load<L>(x + (d + c) * L) * Lanes::template parameter<LanesAgree>(p, d + c);
    }
    for (; d < n; ++d) a[0] += load<L>(x + d * L) * Lanes::template parameter<LanesAgree>(p, d);
    return (a[0] + a[1]) + (a[2] + a[3]);
  }

  // The sum of x[d] p[d] + x[d]^2 q[d] over d < n. With p null: of x[d]^2 q[d] alone.
  template <bool LanesAgree>
  static CAPSFAST_INLINE V form(const T* x, const T* p, const T* q, int64_t n) {
    V a[4] = {V{}, V{}, V{}, V{}};
    int64_t d = 0;
    if (p == nullptr) {
#pragma GCC unroll 4
      for (; d < n; ++d) {
        const V v = load<L>(x + d * L);
        a[0] += v * v * Lanes::template parameter<LanesAgree>(q, d);
      }
      return a[0];
    }
    for (; d + 4 <= n; d += 4) {
#pragma GCC unroll 4
      for (int c = 0; c < 4; ++c) {
        const V v = load<L>(x + (d + c) * L);
        a[c] +=
            v * (Lanes::template parameter<LanesAgree>(p, d + c) + v * Lanes::template parameter<LanesAgree>(q, d + c));
      }
    }
    for (; d < n; ++d) {
      const V v = load<L>(x + d * L);
      a[0] += v * (Lanes::template parameter<LanesAgree>(p, d) + v * Lanes::template parameter<LanesAgree>(q, d));
    }
    return (a[0] + a[1]) + (a[2] + a[3]);
  }

  // y[d] += c x[d] and z[d] += c x[d]^2 for d < n
  static CAPSFAST_INLINE void add_scaled_squares(V c, const T* x, int64_t n, T* y, T* z) {
#pragma GCC unroll 4
    for (int64_t d = 0; d < n; ++d) {
      const V v = load<L>(x + d * L), cv = c * v;
      store<L>(y + d * L, load<L>(y + d * L) + cv);
      store<L>(z + d * L, load<L>(z + d * L) + cv * v);
    }
  }

  // The same for two votes: y and z, half of the memory traffic of a vote, are read and written once for both.
  static CAPSFAST_INLINE void add_scaled_squares(V c, const T* x, V c2, const T* x2, int64_t n, T* y, T* z) {
#pragma GCC unroll 4
    for (int64_t d = 0; d < n; ++d) {
      const V v = load<L>(x + d * L), v2 = load<L>(x2 + d * L), cv = c * v, cv2 = c2 * v2;
      store<L>(y + d * L, load<L>(y + d * L) + cv + cv2);
      store<L>(z + d * L, load<L>(z + d * L) + cv * v + cv2 * v2);
    }
  }

  // y[d] += c x[d] for d < n
  static CAPSFAST_INLINE void add_scaled(V c, const T* x, int64_t n, T* y) {
#pragma GCC unroll 4
    for (int64_t d = 0; d < n; ++d) store<L>(y + d * L, load<L>(y + d * L) + c * load<L>(x + d * L));
  }
};

}  // namespace capsfast::CAPSFAST_TARGET
