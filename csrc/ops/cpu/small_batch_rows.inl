// The steps of a small batch if the weight of an input capsule consists of whole vectors: rows (j, d) of K = 4, 8 or 16
// numbers, or components d that are neighbours in memory. Registers hold L vectors, one of each input capsule of a
// block.
#pragma once

#include "../../cpu/vec.inl"
#include "scratch.h"
#include "gather.inl"
#include "lanes_packing.inl"

namespace capsfast::CAPSFAST_TARGET {

template <class T>
struct SmallBatchRows {
  using Packing = LanesPacking<T>;
  static constexpr int L = kLanes<T>;
  static constexpr int kAhead = 64;  // vectors between prefetching and writing votes; each sample is a stream
  using V = Vec<T, L>;

  // Input capsules [i0, i0 + count), count at most L.
  struct Block {
    int64_t i0, count;
  };
  static Block block_of(const Problem& p, int64_t n) { return {n * L, Packing::min(L, p.I - n * L)}; }

  // How the weight of an input capsule lies in memory: `count` runs of `rows` rows, `pitch` apart. count is 0 if the
  // weight lies otherwise.
  struct Runs {
    int64_t count, rows, pitch;
  };

  // Transposes the matrix of L / K x L / K blocks of K lanes.
  template <int K, int H = L / 2>
  static CAPSFAST_INLINE void transpose_blocks(V* m) {
    if constexpr (H >= K) {
      constexpr int kStep = H / K;
#pragma GCC unroll 16
      for (int i = 0; i < L / K; ++i) {
        if ((i / kStep) % 2 == 0) {
          const V a = m[i], b = m[i + kStep];
          m[i] = swap_blocks<T, L, H, false>(a, b);
          m[i + kStep] = swap_blocks<T, L, H, true>(a, b);
        }
      }
      transpose_blocks<K, H / 2>(m);
    }
  }

  static constexpr int64_t kNear = 256 * 1024;  // most bytes of weights that stay in the caches until the next block
  static constexpr int kStepsAhead = 16;        // vectors of an input capsule between prefetching and reading weights

  // Prefetches as many weights as one step reads, while the step reads number `at` of each input capsule. The weights
  // of L input capsules are read in turn, a piece of each; no processor foresees this order. If next is not null,
  // prefetches the next block in the order of memory, else the weights that follow in each input capsule.
  static CAPSFAST_INLINE void ask(const T* next, const T* const* from, int64_t at) {
    if (next != nullptr) {
#pragma GCC unroll 16
      for (int l = 0; l < L; ++l) __builtin_prefetch(next + (at + l) * L, 0, 2);
    } else {
#pragma GCC unroll 16
      for (int l = 0; l < L; ++l) __builtin_prefetch(from[l] + at + kStepsAhead * L, 0, 2);
    }
  }

  // The votes of a single sample, without transposing the weights: L / K rows (j, d) of K numbers at a time, in one
  // vector of each input capsule. sums() adds up products over the K numbers and moves input capsules to lanes at once.
  // from[l]: the weights of input capsule l. rows: a multiple of L / K. next: as in ask().
  template <int K>
  static CAPSFAST_INLINE void votes_of_one(const T* const* from, const T* next, const T* u, int64_t rows, T* x) {
    constexpr int G = L / K;
    V pose[L];
    for (int l = 0; l < L; ++l) {
      T repeated[L];
      for (int n = 0; n < L; ++n) repeated[n] = u[n % K * L + l];
      pose[l] = load<L>(repeated);
    }
    for (int64_t row = 0; row < rows; row += G) {
      ask(next, from, row * K);
      V votes[G];
#pragma GCC unroll 16
      for (int c = 0; c < G; ++c) {
        V m[K];
#pragma GCC unroll 16
        for (int q = 0; q < K; ++q) m[q] = load<L>(from[c * K + q] + row * K) * pose[c * K + q];
        votes[c] = sums<T, L, K / 2>(m);
      }
      transpose_blocks<K>(votes);
#pragma GCC unroll 16
      for (int g = 0; g < G; ++g) store<L>(x + (row + g) * L, votes[g]);
    }
  }

  // The votes of several samples: L / K rows are transposed at a time and stay in registers for all samples.
  template <int K>
  static CAPSFAST_INLINE void votes_of_rows(const T* const* from, const T* next, const T* u, int64_t rows,
                                            int64_t samples, int64_t next_x, T* x) {
    constexpr int G = L / K;
    for (int64_t row = 0; row < rows; row += G) {
      ask(next, from, row * K);
      V w[L];
#pragma GCC unroll 16
      for (int l = 0; l < L; ++l) w[l] = load<L>(from[l] + row * K);
      transpose<T, L>(w);
      T* to = x + row * L;
      for (int64_t b = 0; b < samples; ++b, to += next_x) {
        V even[G] = {}, odd[G] = {};
#pragma GCC unroll 16
        for (int k = 0; k < K; k += 2) {
          const V u0 = load<L>(u + (b * K + k) * L), u1 = load<L>(u + (b * K + k + 1) * L);
#pragma GCC unroll 16
          for (int g = 0; g < G; ++g) {
            even[g] += w[g * K + k] * u0;
            odd[g] += w[g * K + k + 1] * u1;
          }
        }
#pragma GCC unroll 16
        for (int g = 0; g < G; ++g) {
          store<L>(to + g * L, even[g] + odd[g]);
          __builtin_prefetch(to + (g + kAhead) * L, 1, 2);
        }
      }
    }
  }

  // The votes of one sample if components d of the weight are neighbours in memory, as in weights that are stored [..,
  // K, D]. The votes of an input capsule lie along the lanes and are then transposed. D is a multiple of L.
  static void votes_of_components(const Problem& p, const Block& block, const T* u, T* x) {
    const int64_t *stride = p.weight.stride, size = p.weight_size();
    // Prefetches the next block as ask() does, if input capsules follow each other in memory, in all or within an
    // output capsule.
    const bool more = block.i0 + 2 * L <= p.I && (stride[0] == size || stride[0] == p.D * p.K);
    for (int64_t j = 0; j < p.J; ++j) {
      const T* const next = !more ? nullptr : weight_of(p, block.i0 + L) + (stride[0] == size ? 0 : j * stride[1]);
      for (int64_t d = 0; d < p.D; d += L) {
        V votes[L] = {};
        for (int64_t l = 0; l < block.count; ++l) {
          const T* w = weight_of(p, block.i0 + l) + j * stride[1] + d;
          for (int64_t k = 0; k < p.K && next != nullptr; ++k)
            __builtin_prefetch(next + (((stride[0] == size ? j : 0) * L + l) * p.D + d) * p.K + k * L, 0, 2);
          V even = V{}, odd = V{};
          int64_t k = 0;
          for (; k + 2 <= p.K; k += 2) {
            even += load<L>(w + k * stride[3]) * u[k * L + l];
            odd += load<L>(w + (k + 1) * stride[3]) * u[(k + 1) * L + l];
          }
          if (k < p.K) even += load<L>(w + k * stride[3]) * u[k * L + l];
          votes[l] = even + odd;
        }
        transpose<T, L>(votes);
#pragma GCC unroll 16
        for (int n = 0; n < L; ++n) store<L>(x + (j * p.D + d + n) * L, votes[n]);
      }
    }
  }
  static bool components_together(const Problem& p) {
    return p.weight.storage == kStorage<T> && p.weight.stride[2] == 1 && p.weight.stride[3] != 1 && p.P == 1 &&
           p.D % L == 0;
  }

  // du of one sample for such a weight, with the dvotes of an input capsule along the lanes.
  static void pose_gradient_of_components(const Problem& p, const Block& block, const T* dx,
                                          const SmallBatchScratch<T>& at) {
    const int64_t* stride = p.weight.stride;
    T* const du = at.du;
    for (int64_t j = 0; j < p.J; ++j) {
      for (int64_t d = 0; d < p.D; d += L) {
        V g[L];
#pragma GCC unroll 16
        for (int n = 0; n < L; ++n) g[n] = load<L>(dx + (j * p.D + d + n) * L);
        transpose<T, L>(g);
        for (int64_t k = 0; k < p.K; ++k) {
          V products[L];
          for (int64_t l = 0; l < L; ++l) {
            const T* w = weight_of(p, block.i0 + (l < block.count ? l : 0)) + j * stride[1] + k * stride[3] + d;
            products[l] = load<L>(w) * g[l];
          }
          store<L>(du + k * L, load<L>(du + k * L) + sums<T, L>(products));
        }
      }
    }
  }

  // dW of L / K rows at a time, in registers until they are transposed. to[l]: dW of input capsule l, added to if
  // `add`.
  template <int K>
  static CAPSFAST_INLINE void weight_gradient_of_rows(const T* dx, const T* u, int64_t rows, int64_t samples,
                                                      int64_t next_x, bool add, T* const* to) {
    constexpr int G = L / K;
    for (int64_t row = 0; row < rows; row += G) {
      V a[L] = {};
      const T* g = dx + row * L;
      for (int64_t b = 0; b < samples; ++b, g += next_x) {
        V gr[G];
#pragma GCC unroll 16
        for (int n = 0; n < G; ++n) gr[n] = load<L>(g + n * L);
#pragma GCC unroll 16
        for (int k = 0; k < K; ++k) {
          const V uk = load<L>(u + (b * K + k) * L);
#pragma GCC unroll 16
          for (int n = 0; n < G; ++n) a[n * K + k] += gr[n] * uk;
        }
      }
      transpose<T, L>(a);
#pragma GCC unroll 16
      for (int l = 0; l < L; ++l) {
        T* here = to[l] + row * K;
        store<L>(here, add ? load<L>(here) + a[l] : a[l]);
      }
    }
  }

  // dW of one sample: one input capsule after the other, in the order of memory.
  template <int K>
  static CAPSFAST_INLINE void weight_gradient_of_one(const T* dx, const T* u, int64_t rows, bool add, T* const* to) {
    for (int64_t l = 0; l < L; ++l) {
      T numbers[K];
      for (int k = 0; k < K; ++k) numbers[k] = u[k * L + l];
      const Vec<T, K> pose = load<K>(numbers);
      T* here = to[l];
      for (int64_t row = 0; row < rows; ++row, here += K) {
        const Vec<T, K> term = pose * dx[row * L + l];
        store<K>(here, add ? load<K>(here) + term : term);
      }
    }
  }

  // du of input capsule l for S samples: each row of the weight times its dvotes, which are strided.
  template <int K, int S>
  static CAPSFAST_INLINE void pose_gradient_of_rows(const Runs& runs, const T* w, const T* dx, int64_t next_x,
                                                    int64_t b, int64_t i, bool valid, const View& du) {
    constexpr int kChains = 4;
    Vec<T, K> a[S][kChains] = {};
    for (int64_t n = 0; n < runs.count; ++n, w += runs.pitch, dx += runs.rows * L) {
      int64_t row = 0;
      for (; row + kChains <= runs.rows; row += kChains) {
#pragma GCC unroll 4
        for (int c = 0; c < kChains; ++c) {
          const Vec<T, K> wc = load<K>(w + (row + c) * K);
#pragma GCC unroll 4
          for (int s = 0; s < S; ++s) a[s][c] += wc * dx[s * next_x + (row + c) * L];
        }
      }
      for (; row < runs.rows; ++row) {
        for (int s = 0; s < S; ++s) a[s][0] += load<K>(w + row * K) * dx[s * next_x + row * L];
      }
    }
    for (int s = 0; s < S; ++s) {
      const auto total = (a[s][0] + a[s][1]) + (a[s][2] + a[s][3]);
      T numbers[K] = {};
      if (valid) store<K>(numbers, total);
      scatter<T>(du, (b + s) * du.stride[0] + i * du.stride[1], {1, 1, K}, {0, 0, 1}, numbers);
    }
  }

  // Calls f(constant K) if whole vectors of rows hold the weights of full blocks: K is 4, 8 or 16 and divides L.
  template <class F>
  static bool with_rows(const Problem& p, const Block& block, int64_t rows, const F& f) {
    if (p.P > 1 || p.K > L || block.count < L || rows % (L / p.K) != 0) return false;
    if constexpr (L >= 8) {
      if (p.K == 8) {
        f(std::integral_constant<int, 8>{});
        return true;
      }
    }
    if constexpr (L >= 4) {
      if (p.K == 4) {
        f(std::integral_constant<int, 4>{});
        return true;
      }
    }
    if constexpr (L >= 16) {
      if (p.K == 16) {
        f(std::integral_constant<int, 16>{});
        return true;
      }
    }
    return false;
  }

  static Runs runs_of(const Problem& p) {
    const int64_t* stride = p.weight.stride;
    if (p.weight.storage != kStorage<T> || stride[3] != 1 || stride[2] != p.K) return {0, 0, 0};
    if (stride[1] == p.D * p.K) return {1, p.J * p.D, 0};
    return {p.J, p.D, stride[1]};
  }
  static const T* weight_of(const Problem& p, int64_t i) {
    return static_cast<const T*>(p.weight.data) + i * p.weight.stride[0];
  }

  // Computes du of a block if possible, and returns whether it did. For more than two samples transposed weights are
  // faster.
  static bool pose_gradient_of_block(const Problem& p, const Block& block, const T* dx, int64_t sample,
                                     const SmallBatchScratch<T>& at, const View& du) {
    const Runs runs = runs_of(p);
    if (p.B > 2 || runs.count == 0) return false;
    return with_rows(p, block, runs.rows, [&](auto constant) {
      constexpr int K = decltype(constant)::value;
      for (int64_t l = 0; l < L; ++l) {
        const T* w = weight_of(p, block.i0 + l);
        const auto valid = [&](int64_t b) { return p.mask.data == nullptr || at.valid[b * L + l] > 0; };
        if (p.B == 2 && valid(0) == valid(1)) {
          pose_gradient_of_rows<K, 2>(runs, w, dx + l, sample, 0, block.i0 + l, valid(0), du);
          continue;
        }
        for (int64_t b = 0; b < p.B; ++b)
          pose_gradient_of_rows<K, 1>(runs, w, dx + b * sample + l, sample, b, block.i0 + l, valid(b), du);
      }
    });
  }

  // Makes the votes of a block in one of these ways if possible, and returns whether it did.
  static bool votes_of_block(const Problem& p, const Block& block, const T* u, int64_t sample, T* x) {
    // For more samples transposed weights are faster.
    if (p.B < 4 && components_together(p)) {
      for (int64_t b = 0; b < p.B; ++b) votes_of_components(p, block, u + b * p.K * L, x + b * sample);
      return true;
    }
    const Runs runs = runs_of(p);
    const int64_t size = runs.rows * p.K;
    const bool more = block.i0 + 2 * L <= p.I && p.weight.stride[0] == size && size * L * int64_t{sizeof(T)} <= kNear;
    return runs.count > 0 && with_rows(p, block, runs.rows, [&](auto K) {
             for (int64_t n = 0; n < runs.count; ++n) {
               const T* from[L];
               for (int64_t l = 0; l < L; ++l) from[l] = weight_of(p, block.i0 + l) + n * runs.pitch;
               const T* const next = more ? weight_of(p, block.i0 + L) + n * runs.pitch : nullptr;
               T* to = x + n * runs.rows * L;
               if (p.B == 1) {
                 votes_of_one<decltype(K)::value>(from, next, u, runs.rows, to);
               } else {
                 votes_of_rows<decltype(K)::value>(from, next, u, runs.rows, p.B, sample, to);
               }
             }
           });
  }
};

}  // namespace capsfast::CAPSFAST_TARGET
