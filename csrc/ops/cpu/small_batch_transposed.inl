// The steps of a small batch for any K and any weight, pose matrices too. The weights of a block and of a few output
// capsules are transposed to lanes once for all samples, and stay in L1.
#pragma once

#include "../../cpu/vec.inl"
#include "kernel.h"
#include "gather.inl"
#include "lanes_packing.inl"
#include "small_batch_rows.inl"

template <class T>
struct SmallBatchTransposed : SmallBatchRows<T> {
  static constexpr int L = kLanes<T>;
  static constexpr int kAhead = SmallBatchRows<T>::kAhead;
  static constexpr int kSums = LanesPacking<T>::kSums;
  using V = Vec<T, L>;
  using Packing = LanesPacking<T>;
  using Block = typename SmallBatchRows<T>::Block;

  // Transposed weights: the lanes of output capsule j, row r, number k of a pose.
  struct Rows {
    const T* at;
    int64_t output, row, number;  // steps of j, r and k
  };

  // Transposes the weights of a block and of output capsules [j0, j1) to at.weight.
  static Rows weights(const Problem& p, const Block& block, int64_t j0, int64_t j1, const SmallBatchScratch<T>& at) {
    const int64_t *stride = p.weight.stride, R = p.R(), size = R * p.K;
    const bool plain = p.weight.storage == kStorage<T>;
    const T* data = static_cast<const T*>(p.weight.data);
    const T* from[L] = {};
    const auto transpose_run = [&](int64_t offset, int64_t count, T* to) {
      for (int64_t l = 0; l < block.count; ++l) from[l] = data + (block.i0 + l) * stride[0] + offset;
      Packing::interleave(from, block.count, count, to);
    };
    if (plain && stride[3] == 1 && stride[2] == p.K) {
      const int64_t together = stride[1] == size ? j1 - j0 : 1;
      for (int64_t j = j0; j < j1; j += together)
        transpose_run(j * stride[1], together * size, at.weight + (j - j0) * size * L);
      return {at.weight, size, p.K, 1};
    }
    if (plain && stride[2] == 1) {
      // Rows are neighbours in memory, as in weights that are stored [.., K, D].
      for (int64_t j = j0; j < j1; ++j) {
        for (int64_t k = 0; k < p.K; ++k)
          transpose_run(j * stride[1] + k * stride[3], R, at.weight + ((j - j0) * size + k * R) * L);
      }
      return {at.weight, size, 1, R};
    }
    for (int64_t l = 0; l < block.count; ++l) {
      T* copy = at.buffer + l * (j1 - j0) * size;
      gather<T>(p.weight, (block.i0 + l) * stride[0] + j0 * stride[1], {j1 - j0, R, p.K},
                {stride[1], stride[2], stride[3]}, copy);
      from[l] = copy;
    }
    Packing::interleave(from, block.count, (j1 - j0) * size, at.weight);
    return {at.weight, size, p.K, 1};
  }

  // For each of S samples: x [r1 - r][L] = rows r to r1 of w [R, K] times u [K][L], N at a time, then half as many for
  // the rest. The poses and votes of two samples are next_u and next_x apart.
  template <int N, int S>
  static CAPSFAST_INLINE void products(const Rows& w, const T* from, const T* u, int64_t next_u, int64_t K, int64_t r,
                                       int64_t r1, T* x, int64_t next_x) {
    for (; r + N <= r1; r += N) {
      V a[S][N] = {};
      for (int64_t k = 0; k < K; ++k) {
        V uk[S];
#pragma GCC unroll 4
        for (int s = 0; s < S; ++s) uk[s] = load<L>(u + s * next_u + k * L);
        const T* wk = from + (r * w.row + k * w.number) * L;
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) {
          const V wn = load<L>(wk + n * w.row * L);
#pragma GCC unroll 4
          for (int s = 0; s < S; ++s) a[s][n] += wn * uk[s];
        }
      }
#pragma GCC unroll 4
      for (int s = 0; s < S; ++s) {
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) {
          T* to = x + s * next_x + (r + n) * L;
          store<L>(to, a[s][n]);
          __builtin_prefetch(to + kAhead * L, 1, 2);
        }
      }
    }
    if constexpr (N > 1) products<N / 2, S>(w, from, u, next_u, K, r, r1, x, next_x);
  }

  // The votes of S samples.
  template <int S>
  static CAPSFAST_INLINE void votes_of(const Problem& p, const Rows& w, int64_t j0, int64_t j1, const T* u, T* x,
                                       int64_t next_x) {
    const int64_t R = p.R();
    for (int64_t j = 0; j < j1 - j0; ++j) {
      for (int64_t pose = 0; pose < p.P; ++pose)
        products<kSums, S>(w, w.at + j * w.output * L, u + pose * p.K * L, p.pose_size() * L, p.K, 0, R,
                           x + (j * p.D + pose * R) * L, next_x);
    }
  }

  // For each of S samples: du[k] += sum over rows r < R of w[r][k] g[r], numbers k to K, N at a time, then half as many
  // for the rest.
  template <int N, int S>
  static CAPSFAST_INLINE void pose_gradient(const Rows& w, const T* from, const T* g, int64_t next_g, int64_t R,
                                            int64_t k, int64_t K, T* du, int64_t next_u) {
    for (; k + N <= K; k += N) {
      V a[S][N] = {};
      for (int64_t r = 0; r < R; ++r) {
        V gr[S];
#pragma GCC unroll 4
        for (int s = 0; s < S; ++s) gr[s] = load<L>(g + s * next_g + r * L);
        const T* wr = from + (r * w.row + k * w.number) * L;
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) {
          const V wn = load<L>(wr + n * w.number * L);
#pragma GCC unroll 4
          for (int s = 0; s < S; ++s) a[s][n] += wn * gr[s];
        }
      }
#pragma GCC unroll 4
      for (int s = 0; s < S; ++s) {
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) {
          T* to = du + s * next_u + (k + n) * L;
          store<L>(to, load<L>(to) + a[s][n]);
        }
      }
    }
    if constexpr (N > 1) pose_gradient<N / 2, S>(w, from, g, next_g, R, k, K, du, next_u);
  }

  // du of S samples from their dvotes for output capsules [j0, j1).
  template <int S>
  static CAPSFAST_INLINE void pose_gradients(const Problem& p, const Rows& w, int64_t j0, int64_t j1, const T* dx,
                                             int64_t next_x, T* du) {
    const int64_t R = p.R();
    for (int64_t j = 0; j < j1 - j0; ++j) {
      for (int64_t pose = 0; pose < p.P; ++pose)
        pose_gradient<kSums, S>(w, w.at + j * w.output * L, dx + (j * p.D + pose * R) * L, next_x, R, 0, p.K,
                                du + pose * p.K * L, p.pose_size() * L);
    }
  }

  // dw[m][k] += the sum over samples and poses of dx[m] u[k], for M rows and numbers k to K, N at a time, then half as
  // many for the rest. dx and u: arrays of the first sample.
  template <int M, int N>
  static CAPSFAST_INLINE void weight_gradient(const Problem& p, const T* dx, int64_t next_x, const T* u, int64_t k,
                                              T* dw) {
    const int64_t K = p.K;
    for (; k + N <= K; k += N) {
      V a[M][N];
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) a[m][n] = load<L>(dw + (m * K + k + n) * L);
      }
      for (int64_t b = 0; b < p.B; ++b) {
        for (int64_t pose = 0; pose < p.P; ++pose) {
          const T *g = dx + b * next_x + pose * p.R() * L, *uk = u + ((b * p.P + pose) * K + k) * L;
          V gm[M];
#pragma GCC unroll 4
          for (int m = 0; m < M; ++m) gm[m] = load<L>(g + m * L);
#pragma GCC unroll 8
          for (int n = 0; n < N; ++n) {
            const V un = load<L>(uk + n * L);
#pragma GCC unroll 4
            for (int m = 0; m < M; ++m) a[m][n] += gm[m] * un;
          }
        }
      }
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) store<L>(dw + (m * K + k + n) * L, a[m][n]);
      }
    }
    if constexpr (N > 1) weight_gradient<M, N / 2>(p, dx, next_x, u, k, dw);
  }
};
