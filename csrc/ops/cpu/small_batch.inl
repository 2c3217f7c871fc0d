// The two steps of a small batch that need the weight: making its votes, and at the end of the backward du and dW from
// dvotes. Between them the passes of the lanes layout route the votes. The lanes are input capsules; L of them are a
// block. A vote takes K multiply-adds for a block, and no sum goes across lanes.
#pragma once

#include "../../cpu/kernel.h"
#include "scratch.h"

#if CAPSFAST_HAS_TARGET
#include "../../cpu/begin_target.inl"
#include "../../cpu/vec.inl"
#include "gather.inl"
#include "lanes_packing.inl"
#include "small_batch_rows.inl"

namespace capsfast::CAPSFAST_TARGET {

// The steps of a small batch for any K and any weight, pose matrices too. The weights of a block and of a few output
// capsules are transposed to lanes once for all samples, and stay in L1.
template <class T>
struct SmallBatchTransposed : SmallBatchRows<T> {
  static constexpr int L = kLanes<T>;
  static constexpr int kAhead = SmallBatchRows<T>::kAhead;
  static constexpr int kSums = LanesPacking<T>::kSums;
  using V = Vec<T, L>;
  using Packing = LanesPacking<T>;
  using Block = typename SmallBatchRows<T>::Block;

  // Transposed weights. The lanes of output capsule j, row r and number k are at[(j output + r row + k number) L].
  struct Rows {
    const T* at;
    int64_t output, row, number;  // steps of j, r and k, in vectors
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

template <class T>
struct SmallBatch : SmallBatchTransposed<T> {
  static constexpr int L = kLanes<T>;
  using V = Vec<T, L>;
  using B_ = SmallBatchTransposed<T>;
  using Packing = LanesPacking<T>;
  using Block = typename B_::Block;
  using Rows = typename B_::Rows;

  // [B, I, n] as [I, B, n], because packing turns the first axis into lanes.
  static View by_capsule(View view) {
    const int64_t sample = view.stride[0];
    view.stride[0] = view.stride[1];
    view.stride[1] = sample;
    return view;
  }

  // Copies the poses of a block to at.u [B][P K][L], zeros for masked capsules even if their poses hold NaN.
  static void poses(const Problem& p, const Block& block, const SmallBatchScratch<T>& at) {
    const int64_t size = p.pose_size();
    for (int64_t b = 0; b < p.B; ++b) {
      T* u = at.u + b * size * L;
      Packing::pack(by_capsule(p.u), block.i0, block.count, b, 1, size, at.buffer, u);
      if (p.mask.data == nullptr) continue;
      for (int64_t l = 0; l < L; ++l) at.valid[b * L + l] = l < block.count && p.mask.at(b, block.i0 + l) ? T(1) : T(0);
      keep_valid(at.valid + b * L, size, u);
    }
  }

  // Makes numbers [rows][L] of masked capsules zeros.
  static void keep_valid(const T* valid, int64_t rows, T* numbers) {
    const V ok = load<L>(valid);
    for (int64_t n = 0; n < rows * L; n += L) store<L>(numbers + n, ok > V{} ? load<L>(numbers + n) : V{});
  }

  // See SmallBatchKernels.
  static void fold(const Sum<T>& lanes, const T* factor, int64_t J, int64_t size, const Sum<T>& to) {
    for (int64_t n = 0; n < J * size; ++n) {
      V x = load<L>(lanes.high + n * L) + load<L>(lanes.low + n * L);
      if (factor != nullptr) x *= load<L>(factor + n / size * L);
      add_exactly(sum<T, L>(x), to.high + n, to.low + n);
    }
  }

  // Writes the votes of blocks [n0, n1) to `votes` [B][ceil(I / L)][J D][L].
  static void votes(const Problem& p, int64_t n0, int64_t n1, T* votes, T* scratch) {
    const SmallBatchScratch<T> at(p, L, scratch);
    const int64_t sample = (p.I + L - 1) / L * p.J * p.D * L;
    for (int64_t n = n0; n < n1; ++n) {
      const Block block = B_::block_of(p, n);
      poses(p, block, at);
      const bool done = B_::votes_of_block(p, block, at.u, sample, votes + n * p.J * p.D * L);
      for (int64_t j0 = done ? p.J : 0; j0 < p.J; j0 += at.outputs) {
        const int64_t j1 = Packing::min(p.J, j0 + at.outputs);
        const Rows w = B_::weights(p, block, j0, j1, at);
        const auto x = [&](int64_t b) { return votes + b * sample + (n * p.J + j0) * p.D * L; };
        const auto u = [&](int64_t b) { return at.u + b * p.pose_size() * L; };
        int64_t b = 0;
        for (; b + 2 <= p.B; b += 2) B_::template votes_of<2>(p, w, j0, j1, u(b), x(b), sample);
        if (b < p.B) B_::template votes_of<1>(p, w, j0, j1, u(b), x(b), sample);
      }
      for (int64_t b = 0; b < p.B && p.mask.data != nullptr; ++b)
        keep_valid(at.valid + b * L, p.J * p.D, votes + b * sample + n * p.J * p.D * L);
    }
  }

  // Computes du and dW of the input capsules of blocks [n0, n1) from dvotes. First makes dvotes of masked capsules
  // zeros.
  static void gradients(const SmallBatchGradients<T>& out, const Problem& p, int64_t n0, int64_t n1, T* scratch) {
    const SmallBatchScratch<T> at(p, L, scratch);
    const int64_t R = p.R(), sample = (p.I + L - 1) / L * p.J * p.D * L, size = p.pose_size();
    const bool want_u = out.du.data != nullptr, want_w = out.dweight.data != nullptr;
    for (int64_t n = n0; n < n1; ++n) {
      const Block block = B_::block_of(p, n);
      poses(p, block, at);
      T* const dvotes = out.dvotes + n * p.J * p.D * L;
      for (int64_t b = 0; b < p.B && p.mask.data != nullptr; ++b)
        keep_valid(at.valid + b * L, p.J * p.D, dvotes + b * sample);
      const bool done_u = !want_u || B_::pose_gradient_of_block(p, block, dvotes, sample, at, out.du);
      const bool done_w = !want_w || weight_gradient_of_block(out, p, block, dvotes, sample, at);
      if (done_u && done_w) continue;
      __builtin_memset(at.du, 0, static_cast<size_t>(p.B * size * L) * sizeof(T));
      const bool of_components = !done_u && p.B == 1 && B_::components_together(p);
      if (of_components) B_::pose_gradient_of_components(p, block, dvotes, at);
      for (int64_t j0 = 0; j0 < p.J; j0 += at.outputs) {
        const int64_t j1 = Packing::min(p.J, j0 + at.outputs);
        const T* const dx = dvotes + j0 * p.D * L;
        if (!done_u && !of_components) {
          const Rows w = B_::weights(p, block, j0, j1, at);
          int64_t b = 0;
          for (; b + 2 <= p.B; b += 2)
            B_::template pose_gradients<2>(p, w, j0, j1, dx + b * sample, sample, at.du + b * size * L);
          if (b < p.B) B_::template pose_gradients<1>(p, w, j0, j1, dx + b * sample, sample, at.du + b * size * L);
        }
        if (done_w) continue;
        begin_weight(out, p, block, j0, j1, at);
        for (int64_t j = 0; j < j1 - j0; ++j) {
          const T* g = dx + j * p.D * L;
          T* dw = at.dweight + j * R * p.K * L;
          int64_t r = 0;
          for (; r + 2 <= R; r += 2)
            B_::template weight_gradient<2, B_::kSums>(p, g + r * L, sample, at.u, 0, dw + r * p.K * L);
          if (r < R) B_::template weight_gradient<1, B_::kSums>(p, g + r * L, sample, at.u, 0, dw + r * p.K * L);
        }
        finish_weight(out, p, block, j0, j1, at);
      }
      for (int64_t b = 0; b < p.B && !done_u; ++b) {
        T* du = at.du + b * size * L;
        if (p.mask.data != nullptr) keep_valid(at.valid + b * L, size, du);
        Packing::unpack(du, block.i0, block.count, b, 1, size, at.buffer, by_capsule(out.du));
      }
    }
  }

  // Whether dW is added up in place.
  static bool in_place(const SmallBatchGradients<T>& out) {
    return out.dweight_sum == nullptr && out.dweight.storage == kStorage<T>;
  }
  static T* weight_gradient_of(const SmallBatchGradients<T>& out, const Problem& p, int64_t i, int64_t j) {
    return static_cast<T*>(out.dweight.data) + i * p.weight_size() + j * p.R() * p.K;
  }

  // Writes dW of a block as whole vectors, if possible. Returns whether it did.
  static bool weight_gradient_of_block(const SmallBatchGradients<T>& out, const Problem& p, const Block& block,
                                       const T* dx, int64_t sample, const SmallBatchScratch<T>& at) {
    if (!in_place(out)) return false;
    T* to[L];
    for (int64_t l = 0; l < block.count; ++l) to[l] = weight_gradient_of(out, p, block.i0 + l, 0);
    return B_::with_rows(p, block, p.J * p.D, [&](auto K) {
      if (p.B == 1) {
        B_::template weight_gradient_of_one<decltype(K)::value>(dx, at.u, p.J * p.D, out.add, to);
      } else {
        B_::template weight_gradient_of_rows<decltype(K)::value>(dx, at.u, p.J * p.D, p.B, sample, out.add, to);
      }
    });
  }

  // Writes the initial value of dW of a block and of output capsules [j0, j1) to at.dweight.
  static void begin_weight(const SmallBatchGradients<T>& out, const Problem& p, const Block& block, int64_t j0,
                           int64_t j1, const SmallBatchScratch<T>& at) {
    const int64_t size = (j1 - j0) * p.R() * p.K;
    if (!out.add || !in_place(out)) {
      __builtin_memset(at.dweight, 0, static_cast<size_t>(size * L) * sizeof(T));
      return;
    }
    const T* from[L] = {};
    for (int64_t l = 0; l < block.count; ++l) from[l] = weight_gradient_of(out, p, block.i0 + l, j0);
    Packing::interleave(from, block.count, size, at.dweight);
  }

  // Writes at.dweight to dW or, for a shared weight, adds its lanes to dweight_sum.
  static void finish_weight(const SmallBatchGradients<T>& out, const Problem& p, const Block& block, int64_t j0,
                            int64_t j1, const SmallBatchScratch<T>& at) {
    const int64_t size = (j1 - j0) * p.R() * p.K, from = j0 * p.R() * p.K;
    if (out.dweight_sum != nullptr) {
      for (int64_t n = 0; n < size; ++n)
        add_exactly(sum<T, L>(load<L>(at.dweight + n * L)), out.dweight_sum + from + n, out.dweight_low + from + n);
      return;
    }
    T* to[L] = {};
    for (int64_t l = 0; l < block.count; ++l)
      to[l] = in_place(out) ? weight_gradient_of(out, p, block.i0 + l, j0) : at.buffer + l * size;
    Packing::deinterleave(at.dweight, block.count, size, to);
    for (int64_t l = 0; l < block.count && !in_place(out); ++l)
      scatter<T>(out.dweight, (block.i0 + l) * p.weight_size() + from, {1, 1, size}, {0, 0, 1}, to[l]);
  }
};

template <class T>
SmallBatchKernels<T> small_batch_kernels() {
  return {SmallBatch<T>::votes, SmallBatch<T>::gradients, SmallBatch<T>::fold};
}

template SmallBatchKernels<float> small_batch_kernels<float>();
template SmallBatchKernels<double> small_batch_kernels<double>();

}  // namespace capsfast::CAPSFAST_TARGET

#include "../../cpu/end_target.inl"
#endif
