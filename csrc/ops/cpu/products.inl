// Products of matrices: numbers of the left factor times whole vectors of the right one.
#pragma once

#include "../../cpu/vec.inl"

namespace capsfast::CAPSFAST_TARGET {

// Element (m, k) of a left factor is at[m row + k / inner jump + k % inner step], for k < outer inner.
template <class T>
struct LeftFactor {
  const T* at;
  int64_t row, step, inner, outer = 1, jump = 0;
};

// Vector n of row k stands at at[k row + n column].
template <class T>
struct RightFactor {
  const T* at;
  int64_t row, column;
};

// The same for a result, which is written or added to.
template <class T>
struct ProductResult {
  T* at;
  int64_t row, column;
  bool add = false;
};

template <class T>
struct Products {
  static constexpr int L = kBytes / static_cast<int>(sizeof(T));  // a register
  using V = Vec<T, L>;
  // kRows<N>: rows of a tile that is N vectors wide. The sums of a tile, one row of the right factor and one number of
  // the left factor fill at most three quarters of the registers.
  static constexpr int kWide = kRegisters / 8;
  template <int N>
  static constexpr int kRows = N == 1 ? 8 : kRegisters / (2 * N);

  // Past: stores past the cache, see store_past_cache(). Row: LeftFactor::row if it is a constant, else 0. Dense:
  // vectors of a row of the right factor and of the result are neighbours in memory.
  template <int M, int N, bool Past, int Row, bool Dense>
  static CAPSFAST_INLINE void tile(const LeftFactor<T>& a, const T* b, int64_t b_row, int64_t b_column, T* c,
                                   int64_t c_row, int64_t c_column, bool add) {
    const int64_t row = Row > 0 ? Row : a.row;
    if constexpr (Dense) b_column = c_column = L;
    V sum[M][N];
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sum[m][n] = add ? load<L>(c + m * c_row + n * c_column) : V{};
    }
    for (int64_t outer = 0; outer < a.outer; ++outer) {
      const T* x = a.at + outer * a.jump;
      const T* x4 = x + 4 * row;
      for (int64_t k = 0; k < a.inner; ++k, x += a.step, x4 += a.step, b += b_row) {
        V y[N];
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) y[n] = load<L>(b + n * b_column);
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
          const T factor = m < 4 || Row > 0 ? x[m * row] : x4[(m - 4) * row];
#pragma GCC unroll 4
          for (int n = 0; n < N; ++n) sum[m][n] += y[n] * factor;
        }
      }
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        T* const to = c + m * c_row + n * c_column;
        if constexpr (Past) {
          store_past_cache<L>(to, sum[m][n]);
        } else {
          store<L>(to, sum[m][n]);
        }
      }
    }
  }

  // Rows [m, M) of N vectors: tiles of `rows` rows, then tiles of half as many for the rest.
  template <int rows, int N, bool Past, int Row, bool Dense>
  static CAPSFAST_INLINE void strips(int64_t m, int64_t M, const LeftFactor<T>& a, const T* b,
                                     const RightFactor<T>& right, T* c, const ProductResult<T>& to) {
    for (; m + rows <= M; m += rows) {
      LeftFactor<T> from = a;
      from.at += m * a.row;
      tile<rows, N, Past, Row, Dense>(from, b, right.row, right.column, c + m * to.row, to.row, to.column, to.add);
    }
    if constexpr (rows > 1) strips<rows / 2, N, Past, Row, Dense>(m, M, a, b, right, c, to);
  }

  // N vectors of the right factor at a time, which stay in the first cache for all rows; then half as many for the
  // rest.
  template <int N, bool Past, int Row, bool Dense>
  static CAPSFAST_ONCE void panels(int64_t n, int64_t M, const LeftFactor<T>& a, const RightFactor<T>& b,
                                   int64_t vectors, const ProductResult<T>& c) {
    for (; n + N <= vectors; n += N)
      strips<kRows<N>, N, Past, Row, Dense>(0, M, a, b.at + n * b.column, b, c.at + n * c.column, c);
    if constexpr (N > 1) {
      if (n < vectors) panels<N / 2, Past, Row, Dense>(n, M, a, b, vectors, c);
    }
  }

  // c [M][vectors] = a [M][..] b [..][vectors], or added to c.
  template <bool Past = false, int Row = 0>
  static void product(int64_t M, const LeftFactor<T>& a, const RightFactor<T>& b, int64_t vectors,
                      const ProductResult<T>& c) {
    if (b.column == L && c.column == L) {
      panels<kWide, Past, Row, true>(0, M, a, b, vectors, c);
    } else {
      panels<kWide, Past, Row, false>(0, M, a, b, vectors, c);
    }
  }

  static CAPSFAST_INLINE T dot(const T* x, const T* y, int64_t size) {
    V total{};
    for (int64_t k = 0; k < size; k += L) total += load<L>(x + k) * load<L>(y + k);
    return sum<T, L>(total);
  }
};

}  // namespace capsfast::CAPSFAST_TARGET
