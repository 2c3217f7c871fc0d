// The products of the gradient pass in the lanes layout: du = W^T dvotes and dW = sum_b dvotes u^T.
//
// dW is a sum over samples, which are the lanes. So a block of L rows (j, d) of dvotes is transposed in registers. Then
// its rows lie along the lanes, and each number of the pose of a sample is broadcast. Multiply-adds sum over the
// samples into accumulators [K][L], which are transposed back once a chunk. Long sums (du over all rows, dW over all
// samples) are sums of block sums, so the error grows with the number of blocks only.
#pragma once

#include "../../cpu/vec.inl"
#include "scratch.h"
#include "lanes.inl"
#include "lanes_packing.inl"

namespace capsfast::CAPSFAST_TARGET {

template <class T, int L_, int K_>
struct LanesProducts : Lanes<T, L_, K_> {
  using V = typename Lanes<T, L_, K_>::V;
  using typename LanesPacking<T, L_>::Register;
  static constexpr int L = L_;
  static constexpr int W = kLanes<T>;
  static constexpr int kPoses = LanesPacking<T, L>::kSums;
  static constexpr int kProducts = L == W ? 8 : kRegisters * 3 / 4 * W / L;  // sums that take rows from memory

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

  // Calls f(count, k) for numbers [k, k + count) of all K, where count is a constant. There are as few blocks of at
  // most N as possible, of about the same size.
  template <int N, int k = 0, class F>
  static CAPSFAST_INLINE void in_blocks(int64_t K, const F& f) {
    if constexpr (LanesProducts::kConstantK) {
      constexpr int blocks = (K_ - k + N - 1) / N, count = (K_ - k + blocks - 1) / blocks;
      f(std::integral_constant<int, count>{}, k);
      if constexpr (k + count < K_) in_blocks<N, k + count>(K, f);
    } else {
      for (int64_t at = 0, blocks = (K + N - 1) / N; at < K; --blocks) {
        const int64_t count = (K - at + blocks - 1) / blocks;
        block_of<N>(count, at, f);
        at += count;
      }
    }
  }
  template <int N, class F>
  static CAPSFAST_INLINE void block_of(int64_t count, int64_t k, const F& f) {
    if (count == N) return f(std::integral_constant<int, N>{}, k);
    if constexpr (N > 1) block_of<N - 1>(count, k, f);
  }

  template <int N>
  static CAPSFAST_INLINE void pose_gradients_of_rows(const T* w, int64_t k, int64_t K, const V* rows, T* du) {
    for (; k + N <= K; k += N) pose_gradient_rows<N>(w + k, K, rows, du + k * L);
    if constexpr (N > 1) pose_gradients_of_rows<N / 2>(w, k, K, rows, du);
  }

  static CAPSFAST_ONCE void pose_gradient(const T* w, int64_t K, const T* dx, int64_t rows, T* du) {
    if constexpr (LanesProducts::kConstantK && K_ <= 16 && L == W) {
      pose_gradient_block<K_>(w, K_, dx, rows, du);
    } else {
      in_blocks<kProducts>(LanesProducts::K_of(K), [&](auto count, int64_t k) {
        pose_gradient_block<decltype(count)::value>(w + k, LanesProducts::K_of(K), dx, rows, du + k * L);
      });
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
    if constexpr (L > W) {
      in_blocks<kProducts>(LanesProducts::K_of(K), [&](auto count, int64_t k) {
        weight_gradient_block<decltype(count)::value>(m, u + k * L, dw + k * L);
      });
    } else if constexpr (LanesProducts::kConstantK && K_ % kPoses == 0) {
#pragma GCC unroll 4
      for (int k = 0; k < K_; k += kPoses) weight_gradient_block<kPoses>(m, u + k * L, dw + k * L);
    } else {
      weight_gradient_blocks<kPoses>(m, u, 0, LanesProducts::K_of(K), dw);
    }
  }

  // m[l] = lane l of rows dx [L][L], along the lanes.
  static CAPSFAST_INLINE void transpose_rows(const T* dx, V* m) {
    T* const to = reinterpret_cast<T*>(m);
    for (int row0 = 0; row0 < L; row0 += W) {
      for (int lane = 0; lane < L; lane += W) {
        Register block[W];
#pragma GCC unroll 16
        for (int n = 0; n < W; ++n) block[n] = load<W>(dx + (row0 + n) * L + lane);
        transpose<T, W>(block);
#pragma GCC unroll 16
        for (int n = 0; n < W; ++n) store<W>(to + (lane + n) * L + row0, block[n]);
      }
    }
  }

  // dw [rows / L][K][L] += sum over samples of dx [rows][L] times u [K][L]. `rows` is a multiple of L.
  static CAPSFAST_ONCE void weight_gradient(const T* u, int64_t K, const T* dx, int64_t rows, T* dw) {
    for (int64_t row = 0; row < rows; row += L) {
      V m[L];
      transpose_rows(dx + row * L, m);
      weight_gradient_rows(m, u, K, dw + row * K);
    }
  }

  // Transposes dw [ceil(rows / L)][K][L] to out [rows][K].
  static CAPSFAST_ONCE void weight_rows(const T* dw, int64_t K, int64_t rows, T* out) {
    for (int64_t row = 0; row < rows; row += W) {
      const int64_t some = row + W < rows ? W : rows - row;
      const T* block = dw + row / L * L * K + row % L;
      if constexpr (LanesProducts::kConstantK && K_ <= W) {
        Register m[W];
#pragma GCC unroll 16
        for (int n = 0; n < W; ++n) m[n] = n < K_ ? load<W>(block + n * L) : Register{};
        transpose<T, W>(m);
        for (int64_t n = 0; n < W && n < some; ++n) __builtin_memcpy(out + (row + n) * K_, &m[n], K_ * sizeof(T));
        continue;
      }
      for (int64_t k = 0; k < K; k += W) {
        const int64_t width = k + W < K ? W : K - k;
        Register m[W];
#pragma GCC unroll 16
        for (int n = 0; n < W; ++n) m[n] = n < width ? load<W>(block + (k + n) * L) : Register{};
        transpose<T, W>(m);
        for (int64_t n = 0; n < W && n < some; ++n) {
          if (width == W) {
            store<W>(out + (row + n) * K + k, m[n]);
          } else {
            store_part<W>(out + (row + n) * K + k, m[n], width);
          }
        }
      }
    }
  }

  // [rows / L][K][L] to [rows][K], in place. block [K][L]: scratch.
  static CAPSFAST_ONCE void transpose_weights(int64_t K, int64_t rows, T* block, T* dw) {
    for (int64_t row = 0; row < rows; row += L, dw += K * L) {
      __builtin_memcpy(block, dw, static_cast<size_t>(K * L) * sizeof(T));
      weight_rows(block, K, L, dw);
    }
  }
};

}  // namespace capsfast::CAPSFAST_TARGET
