// The products of the gradient pass in the lanes layout: du = W^T dvotes and dW = sum_b dvotes u^T.
//
// dW is a sum over samples, which are the lanes. A block of L rows (j, d) of dvotes is transposed in registers: its
// rows then lie along the lanes, and the numbers of a sample's pose are broadcast. The sum over samples is a chain of
// multiply-adds into accumulators [K][L], which are transposed back once per chunk. Long sums (du over all rows, dW
// over all samples) are sums of the sums of blocks, so their error grows with the number of blocks only.

template <class T, int K_>
struct LanesProducts : Lanes<T, K_> {
  using V = typename Lanes<T, K_>::V;
  static constexpr int L = kLanes<T>;
  static constexpr int kPoses = LanesPacking<T>::kSums;

  // du[k] += sum over rows of w[row][k] dx[row], for the N components k of a pose.
  template <int N>
  static CAPSFAST_INLINE void pose_gradient_block(const T* w, int64_t K, const T* dx, int64_t rows, T* du) {
    V a[N];
#pragma GCC unroll 16
    for (int k = 0; k < N; ++k) a[k] = V{};
    for (int64_t row = 0; row < rows; ++row) {
      const V g = load<L>(dx + row * L);
#pragma GCC unroll 16
      for (int k = 0; k < N; ++k) a[k] += g * w[row * K + k];
    }
#pragma GCC unroll 16
    for (int k = 0; k < N; ++k) store<L>(du + k * L, load<L>(du + k * L) + a[k]);
  }

  // The same for L rows of dvotes that are in registers.
  template <int N>
  static CAPSFAST_INLINE void pose_gradient_rows(const T* w, int64_t K, const V* rows, T* du) {
    V a[N];
#pragma GCC unroll 8
    for (int k = 0; k < N; ++k) a[k] = V{};
#pragma GCC unroll 16
    for (int n = 0; n < L; ++n, w += K) {
#pragma GCC unroll 8
      for (int k = 0; k < N; ++k) a[k] += rows[n] * w[k];
    }
#pragma GCC unroll 8
    for (int k = 0; k < N; ++k) store<L>(du + k * L, load<L>(du + k * L) + a[k]);
  }

  // All poses from k on, N at a time and what is left in half as many.
  template <int N>
  static CAPSFAST_INLINE void pose_gradient_blocks(const T* w, int64_t k, int64_t K, const T* dx, int64_t rows, T* du) {
    for (; k + N <= K; k += N) pose_gradient_block<N>(w + k, K, dx, rows, du + k * L);
    if constexpr (N > 1) pose_gradient_blocks<N / 2>(w, k, K, dx, rows, du);
  }

  template <int N>
  static CAPSFAST_INLINE void pose_gradients_of_rows(const T* w, int64_t k, int64_t K, const V* rows, T* du) {
    for (; k + N <= K; k += N) pose_gradient_rows<N>(w + k, K, rows, du + k * L);
    if constexpr (N > 1) pose_gradients_of_rows<N / 2>(w, k, K, rows, du);
  }

  static CAPSFAST_ONCE void pose_gradient(const T* w, int64_t K, const T* dx, int64_t rows, T* du) {
    if constexpr (K_ > 0 && K_ <= 16) {
      pose_gradient_block<K_>(w, K_, dx, rows, du);
    } else {
      pose_gradient_blocks<8>(w, 0, K, dx, rows, du);
    }
  }

  template <int N>
  static CAPSFAST_INLINE void weight_gradient_block(const V* m, const T* u, T* dw) {
    V a[N];
#pragma GCC unroll 8
    for (int k = 0; k < N; ++k) a[k] = V{};
#pragma GCC unroll 16
    for (int l = 0; l < L; ++l) {
#pragma GCC unroll 8
      for (int k = 0; k < N; ++k) a[k] += m[l] * u[k * L + l];
    }
#pragma GCC unroll 8
    for (int k = 0; k < N; ++k) store<L>(dw + k * L, load<L>(dw + k * L) + a[k]);
  }

  template <int N>
  static CAPSFAST_INLINE void weight_gradient_blocks(const V* m, const T* u, int64_t k, int64_t K, T* dw) {
    for (; k + N <= K; k += N) weight_gradient_block<N>(m, u + k * L, dw + k * L);
    if constexpr (N > 1) weight_gradient_blocks<N / 2>(m, u, k, K, dw);
  }

  // dw [K][L] += sum over samples l of m[l] u[k][l]. m: L rows of dvotes, transposed, in registers.
  static CAPSFAST_INLINE void weight_gradient_rows(const V* m, const T* u, int64_t K, T* dw) {
    if constexpr (K_ > 0 && K_ % kPoses == 0) {
#pragma GCC unroll 4
      for (int k = 0; k < K_; k += kPoses) weight_gradient_block<kPoses>(m, u + k * L, dw + k * L);
    } else {
      weight_gradient_blocks<kPoses>(m, u, 0, K_ > 0 ? K_ : K, dw);
    }
  }

  // dw [rows / L][K][L] += sum over samples of dx [rows][L] times u [K][L]. `rows` is a multiple of L.
  static CAPSFAST_ONCE void weight_gradient(const T* u, int64_t K, const T* dx, int64_t rows, T* dw) {
    for (int64_t row = 0; row < rows; row += L) {
      V m[L];
#pragma GCC unroll 16
      for (int n = 0; n < L; ++n) m[n] = load<L>(dx + (row + n) * L);
      transpose<T, L>(m);
      weight_gradient_rows(m, u, K, dw + row * K);
    }
  }

  // Transposes dw [ceil(rows / L)][K][L] to out [rows][K].
  static CAPSFAST_ONCE void weight_rows(const T* dw, int64_t K, int64_t rows, T* out) {
    for (int64_t row = 0; row < rows; row += L) {
      const int64_t some = row + L < rows ? L : rows - row;
      const T* block = dw + row * K;
      if constexpr (K_ > 0 && K_ <= L) {
        V m[L];
#pragma GCC unroll 16
        for (int n = 0; n < L; ++n) m[n] = n < K_ ? load<L>(block + n * L) : V{};
        transpose<T, L>(m);
        for (int64_t n = 0; n < L && n < some; ++n) __builtin_memcpy(out + (row + n) * K_, &m[n], K_ * sizeof(T));
        continue;
      }
      for (int64_t k = 0; k < K; k += L) {
        const int64_t width = k + L < K ? L : K - k;
        V m[L];
#pragma GCC unroll 16
        for (int n = 0; n < L; ++n) m[n] = n < width ? load<L>(block + (k + n) * L) : V{};
        transpose<T, L>(m);
        for (int64_t n = 0; n < L && n < some; ++n) {
          if (width == L) {
            store<L>(out + (row + n) * K + k, m[n]);
          } else {
            store_part<L>(out + (row + n) * K + k, m[n], width);
          }
        }
      }
    }
  }

  // [rows / L][K][L] to [rows][K] where it stands. block [K][L]: scratch.
  static CAPSFAST_ONCE void transpose_weights(int64_t K, int64_t rows, T* block, T* dw) {
    for (int64_t row = 0; row < rows; row += L, dw += K * L) {
      __builtin_memcpy(block, dw, static_cast<size_t>(K * L) * sizeof(T));
      weight_rows(block, K, L, dw);
    }
  }
};
