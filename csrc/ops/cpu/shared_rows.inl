// Rows of numbers that are whole vectors: products of matrices with a few of them, sums and copies.

template <class T>
struct SharedRows {
  static constexpr int L = kLanes<T>;
  static constexpr int kRows = 4;
  static constexpr int kColumns = kRegisters / 8;  // with kRows they take half of the registers
  using V = Vec<T, L>;

  // Row m of c is the sum over k < n of a[m am + k ak] times row k of b; N vectors of each row.
  // `Past` the cache: see store_past_cache().
  template <int M, int N, bool Past>
  static CAPSFAST_INLINE void tile(const T* a, int64_t am, int64_t ak, int64_t n, const T* b, int64_t ldb, T* c,
                                   int64_t ldc, bool add) {
    V sum[M][N];
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
      for (int l = 0; l < N; ++l) sum[m][l] = add ? load<L>(c + m * ldc + l * L) : V{};
    }
    for (int64_t k = 0; k < n; ++k, a += ak, b += ldb) {
      V x[N];
#pragma GCC unroll 4
      for (int l = 0; l < N; ++l) x[l] = load<L>(b + l * L);
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) {
        const T factor = a[m * am];
#pragma GCC unroll 4
        for (int l = 0; l < N; ++l) sum[m][l] += x[l] * factor;
      }
    }
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
      for (int l = 0; l < N; ++l) {
        T* const to = c + m * ldc + l * L;
        if constexpr (Past) {
          store_past_cache<L>(to, sum[m][l]);
        } else {
          store<L>(to, sum[m][l]);
        }
      }
    }
  }

  template <int M, bool Past>
  static CAPSFAST_ONCE void rows(const T* a, int64_t am, int64_t ak, int64_t n, const T* b, int64_t ldb,
                                 int64_t vectors, T* c, int64_t ldc, bool add) {
    for (; vectors >= kColumns; vectors -= kColumns, b += kColumns * L, c += kColumns * L)
      tile<M, kColumns, Past>(a, am, ak, n, b, ldb, c, ldc, add);
    for (; vectors > 0; --vectors, b += L, c += L) tile<M, 1, Past>(a, am, ak, n, b, ldb, c, ldc, add);
  }

  // c [M][vectors L] = (c if `add`) + a [M][n] b [n][vectors L]; element (m, k) of a is a[m am + k ak].
  template <bool Past = false>
  static void product(int64_t M, const T* a, int64_t am, int64_t ak, int64_t n, const T* b, int64_t ldb,
                      int64_t vectors, T* c, int64_t ldc, bool add = false) {
    for (; M >= kRows; M -= kRows, a += kRows * am, c += kRows * ldc)
      rows<kRows, Past>(a, am, ak, n, b, ldb, vectors, c, ldc, add);
    if (M == 3) rows<3, Past>(a, am, ak, n, b, ldb, vectors, c, ldc, add);
    if (M == 2) rows<2, Past>(a, am, ak, n, b, ldb, vectors, c, ldc, add);
    if (M == 1) rows<1, Past>(a, am, ak, n, b, ldb, vectors, c, ldc, add);
  }

  static CAPSFAST_INLINE T dot(const T* x, const T* y, int64_t size) {
    V total{};
    for (int64_t k = 0; k < size; k += L) total += load<L>(x + k) * load<L>(y + k);
    return sum<T, L>(total);
  }

  // y += x
  static CAPSFAST_INLINE void add_rows(const T* x, int64_t size, T* y) {
    for (int64_t k = 0; k < size; k += L) store<L>(y + k, load<L>(y + k) + load<L>(x + k));
  }

  // Rows times factors.
  static CAPSFAST_INLINE void scale_rows(const T* x, const T* factors, int64_t count, int64_t size, T* y) {
    for (int64_t m = 0; m < count; ++m) {
      for (int64_t k = m * size; k < (m + 1) * size; k += L) store<L>(y + k, load<L>(x + k) * factors[m]);
    }
  }

  // `size` numbers of every row, and zeros in what is left of it.
  template <bool Past = false>
  static CAPSFAST_ONCE void copy_rows(const T* from, int64_t from_row, int64_t count, int64_t size, T* to,
                                      int64_t to_row) {
    for (int64_t m = 0; m < count; ++m, from += from_row, to += to_row) {
      int64_t k = 0;
      for (; k + L <= size; k += L) {
        if constexpr (Past) {
          store_past_cache<L>(to + k, load<L>(from + k));
        } else {
          store<L>(to + k, load<L>(from + k));
        }
      }
      for (; k < size; ++k) to[k] = from[k];
      for (; k < to_row; ++k) to[k] = 0;
    }
  }
};
