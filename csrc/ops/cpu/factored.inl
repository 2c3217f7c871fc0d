// Routing without votes (see factored_kernels.h). A block of samples stays in the cache for all iterations. All sums
// are products of matrices.
#pragma once

#include "../../cpu/kernel.h"
#include "factored_kernels.h"

#if CAPSFAST_HAS_TARGET
#include "../../cpu/begin_target.inl"
#include "../../cpu/vec.inl"
#include "coupling.inl"
#include "gather.inl"
#include "products.inl"

namespace capsfast::CAPSFAST_TARGET {

template <class T>
struct Factored : Products<T> {
  using Products<T>::L, Products<T>::product, Products<T>::dot;
  using typename Products<T>::V;
  using Couplings = Coupling<T, L>;
  static constexpr int64_t kMostSamples = 16;

  struct Block {
    const FactoredCall<T>& call;
    const Problem& p;
    const FactoredScratch<T>& at;
    int64_t b0, samples;
    int64_t used[kMostSamples];  // for each sample, blocks up to the last block that is not all masked

    Block(const FactoredCall<T>& call, const FactoredScratch<T>& at, int64_t b0, int64_t end)
        : call(call), p(*call.problem), at(at), b0(b0), samples(call.samples < end - b0 ? call.samples : end - b0) {}

    int64_t rows() const { return samples * p.J; }
    int64_t inputs() const { return call.blocks * L; }
    int64_t size() const { return inputs() * p.J; }  // coefficients of a sample
    int64_t last() const { return p.iterations - 1; }
    int64_t sets() const { return 2 * p.iterations - 1; }
    int64_t capsules(int64_t k) const { return k * L + L <= p.I ? L : p.I - k * L; }  // of block k

    T* packed(int64_t n) const { return at.U + n * inputs() * call.Kp; }
    const T* U(int64_t n) const {
      return call.in_place ? static_cast<const T*>(p.u.data) + (b0 + n) * p.u.stride[0] : packed(n);
    }
    int64_t U_row() const { return call.in_place ? p.u.stride[1] : call.Kp; }
    T* Ut(int64_t n) const { return at.Ut + n * inputs() * call.Kp; }
    T* logits(int64_t n) const { return at.logits + (call.same_start() ? 0 : n * size()); }
    // Null if there is no mask and all lanes of block k have an input capsule.
    T* valid(int64_t n, int64_t k) const {
      if (p.mask.data == nullptr) return k * L + L <= p.I ? nullptr : at.valid;
      return at.valid + (n * call.blocks + k) * L;
    }
    T* valid_out(int64_t n) const { return p.out_mask.data == nullptr ? nullptr : at.valid_out + n * p.J * L; }
    bool is_valid_out(int64_t n, int64_t j) const { return p.out_mask.data == nullptr || p.out_mask.at(b0 + n, j); }
    // [rows][Kp] and [rows][Dp] of an iteration.
    T* of(T* array, int64_t t) const { return array + t * rows() * call.Kp; }
    T* wide(T* array, int64_t t) const { return array + t * rows() * call.Dp; }
    // For the backward.
    T* Z(int64_t t) const { return of(at.right, t); }
    T* dq(int64_t t) const { return of(at.right, p.iterations + t); }
    T* ds(int64_t t) const { return wide(at.left, t); }
    T* outputs(int64_t t) const { return wide(at.left, p.iterations + t); }
    T* dZ(int64_t t) const { return of(at.back, t); }
    // The q that iteration t > 0 scored with.
    T* q(int64_t t) const { return of(at.back, p.iterations + t - 1); }
    // The factors of the vectors that add up to du: the coupling of iteration t and, for t > 0, the gradient of its
    // logits.
    T* coupling(int64_t n, int64_t t) const { return at.coefficients + (n * sets() + t) * size(); }
    T* dl(int64_t n, int64_t t) const { return t == 0 ? at.c : coupling(n, p.iterations + t - 1); }
    T* inverse(int64_t n, int64_t t) const { return at.inverses + (n * p.iterations + t) * p.J * L; }
  };

  // Rows [samples J][Dp] times W, and [samples J][Kp] times its transpose.
  static void by_W(const FactoredCall<T>& call, int64_t samples, const T* a, T* c, bool add = false) {
    by_matrices(call, samples, a, call.Dp, call.problem->D, call.W, c, call.Kp, add);
  }
  static void by_transpose(const FactoredCall<T>& call, int64_t samples, const T* a, T* c) {
    by_matrices(call, samples, a, call.Kp, call.problem->K, call.Wt, c, call.Dp, false);
  }
  static CAPSFAST_ONCE void by_matrices(const FactoredCall<T>& call, int64_t samples, const T* a, int64_t a_row,
                                        int64_t count, const T* matrix, T* c, int64_t c_row, bool add) {
    const int64_t J = call.problem->J, G = call.matrices, M = G == 1 ? samples * J : samples;
    for (int64_t g = 0; g < G; ++g)
      product(M, {a + g * a_row, G * a_row, 1, count}, {matrix + g * count * c_row, c_row, L}, c_row / L,
              {c + g * c_row, G * c_row, L, add});
  }

  // Blocks [from, to) of the input capsules of a sample.
  struct Span {
    int64_t from, to;
  };

  // How many blocks of input capsules a span has. Its coefficients then stay in the first cache.
  static CAPSFAST_INLINE int64_t span_length(const Block& block) {
    constexpr int64_t kNumbers = (16 * 1024) / sizeof(T), kLongest = 512 / L;
    const int64_t fit = kNumbers / (block.p.J * L);
    return fit < 4 ? 4 : fit > kLongest ? kLongest : fit;
  }

  template <class F>
  static CAPSFAST_INLINE void for_spans(const Block& block, int64_t n, const F& f) {
    const int64_t used = block.used[n], step = span_length(block);
    for (int64_t k = 0; k < used; k += step) f(Span{k, k + step < used ? k + step : used});
  }

  // Sums [J][Kp] of the poses of a span of sample n, weighted by the coefficients c.
  static CAPSFAST_ONCE void weighted(const Block& block, int64_t n, const T* c, Span span, T* to) {
    const int64_t J = block.p.J, Kp = block.call.Kp, U_row = block.U_row();
    // A copy has rows of zeros beyond the last input capsule; poses in place do not.
    const int64_t rest = block.call.in_place && span.to * L > block.p.I ? block.p.I % L : 0;
    const int64_t whole = span.to - span.from - (rest > 0);
    const T *const from = c + span.from * J * L, *const U = block.U(n) + span.from * L * U_row;
    Products<T>::template product<false, L>(J, {from, L, 1, L, whole, J * L}, {U, U_row, L}, Kp / L, {to, Kp, L});
    if (rest == 0) return;
    Products<T>::template product<false, L>(
        J, {from + whole * J * L, L, 1, rest}, {U + whole * L * U_row, U_row, L}, Kp / L, {to, Kp, L, true});
  }

  // Sets `to` [size] to the sum, over the spans of sample n, of what f(span, part) writes to a part; if `add`, adds
  // this sum to `to`. Rounding errors of these additions are kept, so a long sum is as exact as a span.
  template <class F>
  static CAPSFAST_INLINE void sum_spans(const Block& block, int64_t n, int64_t size, bool add, T* to, const F& f) {
    if (!add && block.used[n] > 0 && block.used[n] <= span_length(block)) return f(Span{0, block.used[n]}, to);
    T *const part = block.at.part, *const low = block.at.low;
    if (!add) __builtin_memset(to, 0, static_cast<size_t>(size) * sizeof(T));
    __builtin_memset(low, 0, static_cast<size_t>(size) * sizeof(T));
    for_spans(block, n, [&](Span span) {
      if (!add && span.from == 0) return f(span, to);
      f(span, part);
      for (int64_t k = 0; k < size; k += L) {
        V high = load<L>(to + k), rounded = load<L>(low + k);
        add_exactly(load<L>(part + k), &high, &rounded);
        store<L>(to + k, high);
        store<L>(low + k, rounded);
      }
    });
    for (int64_t k = 0; k < size; k += L) store<L>(to + k, load<L>(to + k) + load<L>(low + k));
  }

  // Dot products [blocks][J][L] of the poses of sample n with vectors [J][Kp].
  static CAPSFAST_ONCE void scores(const Block& block, int64_t n, const T* vectors, Span span, T* c) {
    const int64_t J = block.p.J, Kp = block.call.Kp;
    product(J, {vectors, Kp, 1, block.p.K}, {block.Ut(n) + span.from * Kp * L, L, Kp * L}, span.to - span.from,
            {c + span.from * J * L, L, J * L});
  }

  static CAPSFAST_ONCE void pack(Block& block) {
    const Problem& p = block.p;
    for (int64_t n = 0; n < block.samples; ++n) {
      block.used[n] = p.mask.data == nullptr ? block.call.blocks : 0;
      for (int64_t k = 0; k < block.call.blocks; ++k) {
        if (T* const valid = block.valid(n, k); valid != nullptr) {
          bool some = false;
          for (int64_t l = 0; l < L; ++l) {
            const bool here = k * L + l < p.I && (p.mask.data == nullptr || p.mask.at(block.b0 + n, k * L + l));
            valid[l] = here ? T(1) : T(0);
            some = some || here;
          }
          if (some) block.used[n] = k + 1;
        }
        pack_capsules(block, n, k);
      }
      for (int64_t j = 0; j < p.J && p.out_mask.data != nullptr; ++j)
        store<L>(block.valid_out(n) + j * L, broadcast<L>(block.is_valid_out(n, j) ? T(1) : T(0)));
      if (!block.call.same_start()) pack_logits(block, n);
    }
  }

  static CAPSFAST_ONCE void pack_capsules(const Block& block, int64_t n, int64_t k) {
    const Problem& p = block.p;
    const int64_t Kp = block.call.Kp, row = block.U_row(), count = block.capsules(k);
    const T* const valid = block.valid(n, k);
    if (!block.call.in_place) {
      T* to = block.packed(n) + k * L * Kp;
      const int64_t from = (block.b0 + n) * p.u.stride[0] + k * L * p.u.stride[1];
      for (int64_t l = 0; l < L; ++l, to += Kp) {
        const bool here = l < count && (valid == nullptr || valid[l] > 0);
        if (here) gather<T>(p.u, from + l * p.u.stride[1], {1, 1, p.K}, {0, 0, p.u.stride[2]}, to);
        for (int64_t c = here ? p.K : 0; c < Kp; ++c) to[c] = 0;
      }
    }
    const T* const from = block.U(n) + k * L * row;
    T* const to = block.Ut(n) + k * L * Kp;
    if (block.call.in_place) prefetch_rows<T, L>(from + 2 * L * row, row, Kp);
    for (int64_t c = 0; c < Kp; c += L) {
      V m[L];
#pragma GCC unroll 16
      for (int l = 0; l < L; ++l) m[l] = !block.call.in_place || l < count ? load<L>(from + l * row + c) : V{};
      transpose<T, L>(m);
#pragma GCC unroll 16
      for (int l = 0; l < L; ++l) store<L>(to + (c + l) * L, m[l]);
    }
  }

  static void pack_logits(const Block& block, int64_t n) {
    const Problem& p = block.p;
    if (p.logits.data == nullptr) return;
    __builtin_memset(block.logits(n), 0, static_cast<size_t>(block.size()) * sizeof(T));
    for (int64_t k = 0; k < block.call.blocks; ++k)
      Couplings::template transfer<false, 1>(
          p.logits, block.b0 + n, k * L, block.capsules(k), p.J, block.logits(n) + k * p.J * L);
  }

  // Makes logits and couplings of iteration 0, if all samples have the same.
  static CAPSFAST_ONCE void start(const FactoredCall<T>& call, const FactoredScratch<T>& at) {
    Block block(call, at, 0, 1);
    block.used[0] = call.blocks;
    if (T* const valid = block.valid(0, call.blocks - 1); call.problem->mask.data == nullptr && valid != nullptr)
      for (int64_t l = 0; l < L; ++l) valid[l] = l < block.capsules(call.blocks - 1) ? T(1) : T(0);
    if (!call.same_start()) return;
    pack_logits(block, 0);
    __builtin_memset(at.start, 0, static_cast<size_t>(block.size()) * sizeof(T));
    normalize(block, 0, 0, {0, call.blocks}, at.start, at.inverse);
  }

  // The coupling coefficients of sample n in iteration t, which scores with q [J][Kp].
  static void couple(const Block& block, int64_t n, int64_t t, const T* q, Span span, T* c, T* inverse) {
    const int64_t from = span.from * block.p.J * L;
    const size_t bytes = static_cast<size_t>((span.to - span.from) * block.p.J * L) * sizeof(T);
    if (t == 0 && block.call.same_start()) {
      __builtin_memcpy(c + from, block.at.start + from, bytes);
      __builtin_memcpy(inverse, block.at.inverse, static_cast<size_t>(block.p.J * L) * sizeof(T));
      return;
    }
    if (t > 0) {
      scores(block, n, q, span, c);
    } else {
      __builtin_memset(c + from, 0, bytes);
    }
    normalize(block, n, t, span, c, inverse);
  }

  // From scores to coupling coefficients; `inverse` as in FactoredScratch.
  static CAPSFAST_ONCE void normalize(const Block& block, int64_t n, int64_t t, Span span, T* c, T* inverse) {
    const Problem& p = block.p;
    const int64_t J = p.J;
    const bool prior = p.logits.data != nullptr && (p.squash.accumulate || t == 0);
    const T masked = Couplings::masked_logit(p.normalize);
    for (int64_t k = span.from; k < span.to; ++k) {
      T* const b = c + k * J * L;
      if (prior) Couplings::add(block.logits(n) + k * J * L, J, b);
      Couplings::mask(block.valid(n, k), block.valid_out(n), J, masked, b);
      if (!p.softmax_in()) Couplings::softmax_out(J, p.leaky, nullptr, b);
    }
    if (p.softmax_in()) softmax_in(J, span.to, p.leaky, c, inverse);
  }

  static CAPSFAST_ONCE void softmax_in(int64_t J, int64_t blocks, bool leaky, T* c, T* inverse) {
    for (int64_t j = 0; j < J; ++j) {
      V most = broadcast<L>(leaky ? T(0) : kLowest<T>), total{};
      for (int64_t k = 0; k < blocks; ++k) most = max(most, load<L>(c + (k * J + j) * L));
      const T m = largest<T, L>(most);
      for (int64_t k = 0; k < blocks; ++k) {
        const V e = exp<L>(load<L>(c + (k * J + j) * L) - m);
        store<L>(c + (k * J + j) * L, e);
        total += e;
      }
      const T all = sum<T, L>(total) + (leaky ? exp<L>(broadcast<L>(-m))[0] : T(0)), scale = all == 0 ? T(0) : 1 / all;
      for (int64_t k = 0; k < blocks; ++k) store<L>(c + (k * J + j) * L, load<L>(c + (k * J + j) * L) * scale);
      store<L>(inverse + j * L, broadcast<L>(scale));
    }
  }

  // From the gradient of couplings to the gradient of logits, in place.
  static CAPSFAST_ONCE void differentiate(const Block& block, int64_t n, int64_t t, Span span, const T* c, T* dc) {
    const int64_t J = block.p.J;
    if (!block.p.softmax_in()) {
      for (int64_t k = span.from; k < span.to; ++k)
        Couplings::softmax_out_backward(J, c + k * J * L, nullptr, dc + k * J * L);
      return;
    }
    T* const mean = block.at.mean;
    for (int64_t j = 0; j < J; ++j) {
      V total{};
      for (int64_t k = 0; k < span.to; ++k) total += load<L>(c + (k * J + j) * L) * load<L>(dc + (k * J + j) * L);
      store<L>(mean + j * L, broadcast<L>(sum<T, L>(total)));
    }
    for (int64_t k = 0; k < span.to; ++k)
      Couplings::softmax_in_backward(J, block.inverse(n, t), c + k * J * L, mean, nullptr, dc + k * J * L);
  }

  // z of iteration 0, if capsules differ only in whether they are masked.
  static CAPSFAST_ONCE void uniform(const Block& block, int64_t n, T* z) {
    const Problem& p = block.p;
    const int64_t Kp = block.call.Kp, rows = block.call.in_place ? p.I : block.used[n] * L;
    int64_t inputs = 0, outputs = 0;
    for (int64_t i = 0; i < p.I; ++i) inputs += p.mask.data == nullptr || p.mask.at(block.b0 + n, i);
    for (int64_t j = 0; j < p.J; ++j) outputs += block.is_valid_out(n, j);
    const int64_t entries = (p.softmax_in() ? inputs : outputs) + (p.leaky ? 1 : 0);
    const T one = 1, share = entries == 0 ? T(0) : 1 / static_cast<T>(entries);
    sum_spans(block, n, Kp, false, z, [&](Span span, T* to) {
      const int64_t from = span.from * L, count = (span.to * L < rows ? span.to * L : rows) - from;
      product(1, {&one, 0, 0, count}, {block.U(n) + from * block.U_row(), block.U_row(), L}, Kp / L, {to, Kp, L});
    });
    for (int64_t k = 0; k < Kp; k += L) store<L>(z + k, load<L>(z + k) * share);
    for (int64_t j = p.J - 1; j >= 0; --j) {
      if (block.is_valid_out(n, j)) {
        __builtin_memmove(z + j * Kp, z, static_cast<size_t>(Kp) * sizeof(T));
      } else {
        __builtin_memset(z + j * Kp, 0, static_cast<size_t>(Kp) * sizeof(T));
      }
    }
  }

  static void add_bias(const Block& block, T* s) {
    if (block.call.bias == nullptr) return;
    const int64_t size = block.p.J * block.call.Dp;
    for (int64_t n = 0; n < block.samples; ++n, s += size) {
      for (int64_t k = 0; k < size; k += L) store<L>(s + k, load<L>(s + k) + load<L>(block.call.bias + k));
    }
  }

  static void forward(const FactoredCall<T>& call, int64_t begin, int64_t end, T* memory) {
    const Problem& p = *call.problem;
    const FactoredScratch<T> at(call, memory, false);
    const int64_t J = p.J, K = p.K, Kp = call.Kp, Dp = call.Dp, r = p.iterations;
    T* const kept = static_cast<T*>(call.out.s);
    start(call, at);
    for (int64_t b0 = begin; b0 < end; b0 += call.samples) {
      Block block(call, at, b0, end);
      pack(block);
      for (int64_t t = 0; t < r; ++t) {
        const bool wanted = t == block.last() && call.out.coupling.data != nullptr;
        for (int64_t n = 0; n < block.samples; ++n) {
          T* const z = at.Z + n * J * Kp;
          if (t == 0 && p.logits.data == nullptr && !wanted) {
            uniform(block, n, z);
          } else {
            const auto coefficients = [&](Span span) {
              couple(block, n, t, at.q + n * J * Kp, span, at.c, at.inverse);
            };
            // A softmax over the input capsules needs all of them at once.
            if (p.softmax_in()) coefficients({0, block.used[n]});
            sum_spans(block, n, J * Kp, false, z, [&](Span span, T* to) {
              if (!p.softmax_in()) coefficients(span);
              weighted(block, n, at.c, span, to);
            });
          }
          if (wanted) write_coupling(block, n);
          for (int64_t j = 0; j < J; ++j)
            __builtin_memcpy(kept + ((t * p.B + b0 + n) * J + j) * K, z + j * Kp, static_cast<size_t>(K) * sizeof(T));
        }
        by_transpose(call, block.samples, at.Z, at.s);
        add_bias(block, at.s);
        for (int64_t m = 0; m < block.rows(); ++m) {
          const T factor = squash_factor(block, t, m, dot(at.s + m * Dp, at.s + m * Dp, Dp));
          for (int64_t d = 0; d < Dp; d += L) store<L>(at.s + m * Dp + d, load<L>(at.s + m * Dp + d) * factor);
        }
        // If logits accumulate, the outputs of an iteration count in all later iterations.
        if (t < block.last()) by_W(call, block.samples, at.s, at.q, p.squash.accumulate && t > 0);
      }
      for (int64_t m = 0; m < block.rows(); ++m) {
        const View& v = call.out.v;
        const int64_t to = (b0 + m / J) * v.stride[0] + m % J * v.stride[1];
        scatter<T>(v, to, {1, 1, p.D}, {0, 0, v.stride[2]}, at.s + m * Dp);
      }
    }
  }

  // The factor of the squash for the weighted sum m of an iteration, with squared length n.
  static T squash_factor(const Block& block, int64_t t, int64_t m, T n) {
    if (!block.is_valid_out(m / block.p.J, m % block.p.J)) return 0;
    return block.p.squash.factor(t == block.last(), n);
  }

  static CAPSFAST_ONCE void write_coupling(const Block& block, int64_t n) {
    const int64_t J = block.p.J;
    for (int64_t k = 0; k < block.call.blocks; ++k) {
      T* const c = block.at.c + k * J * L;
      if (k >= block.used[n]) __builtin_memset(c, 0, static_cast<size_t>(J * L) * sizeof(T));
      Couplings::template transfer<true, 1>(block.call.out.coupling, block.b0 + n, k * L, block.capsules(k), J, c);
    }
  }

  static void backward(const FactoredCall<T>& call, int64_t begin, int64_t end, T* memory,
                       const FactoredSums<T>& sums) {
    const Problem& p = *call.problem;
    const FactoredScratch<T> at(call, memory, true);
    const int64_t last = p.iterations - 1, since = p.gradient_last ? last : 0, J = p.J, Dp = call.Dp;
    start(call, at);
    for (int64_t b0 = begin; b0 < end; b0 += call.samples) {
      Block block(call, at, b0, end);
      pack(block);
      restore(block);
      if (call.need_logits)
        __builtin_memset(at.dlogits, 0, static_cast<size_t>(block.samples * block.size()) * sizeof(T));
      for (int64_t m = 0; m < block.rows(); ++m) {
        const View& dv = call.in.dv;
        T* const ds = block.ds(last) + m * Dp;
        gather<T>(dv, (b0 + m / J) * dv.stride[0] + m % J * dv.stride[1], {1, 1, p.D}, {0, 0, dv.stride[2]}, ds);
        for (int64_t d = p.D; d < Dp; ++d) ds[d] = 0;
      }
      for (int64_t t = last; t >= since; --t) {
        if (t < last) by_transpose(call, block.samples, block.dq(t), block.ds(t));
        differentiate_squash(block, t);
        by_W(call, block.samples, block.ds(t), block.dZ(t));
        iteration_gradients(block, t, t > since);
      }
      if (call.need_weight) weight_gradients(block, since, sums.dW);
      for (int64_t m = 0; m < (last + 1 - since) * block.rows() && call.need_bias; ++m) {
        for (int64_t d = 0; d < p.D; ++d)
          sums.dbias[m % J * p.D + d] += static_cast<double>(block.ds(since)[m * Dp + d]);
      }
      for (int64_t n = 0; n < block.samples; ++n) {
        if (call.du.data != nullptr) input_gradients(block, n, since);
        if (call.need_logits) logit_gradients(block, n, sums);
      }
    }
    fence();
  }

  // Computes from z: W z, the factors of the squash, the outputs and q.
  static CAPSFAST_ONCE void restore(const Block& block) {
    const Problem& p = block.p;
    const FactoredScratch<T>& at = block.at;
    const int64_t M = block.rows(), J = p.J, K = p.K, Kp = block.call.Kp, Dp = block.call.Dp, last = block.last();
    const T* const kept = static_cast<const T*>(block.call.in.s) + block.b0 * J * K;
    for (int64_t t = 0; t <= last; ++t) {
      for (int64_t m = 0; m < M; ++m) {
        T* const z = block.Z(t) + m * Kp;
        __builtin_memcpy(z, kept + (t * p.B * J + m) * K, static_cast<size_t>(K) * sizeof(T));
        for (int64_t k = K; k < Kp; ++k) z[k] = 0;
      }
    }
    by_transpose(block.call, (last + 1) * block.samples, block.Z(0), at.sums);
    for (int64_t t = 0; t <= last; ++t) {
      add_bias(block, block.wide(at.sums, t));
      for (int64_t m = 0; m < M; ++m) {
        const T *const s = block.wide(at.sums, t) + m * Dp, n = dot(s, s, Dp), f = squash_factor(block, t, m, n);
        at.f[t * M + m] = f;
        at.squares[t * M + m] = n;
        for (int64_t d = 0; d < Dp && t < last; d += L) store<L>(block.outputs(t) + m * Dp + d, load<L>(s + d) * f);
      }
    }
    if (last > 0) by_W(block.call, last * block.samples, block.outputs(0), block.q(1));
    // If logits accumulate, the outputs of an iteration count in all later iterations.
    for (int64_t t = 2; t <= last && p.squash.accumulate; ++t) {
      for (int64_t k = 0; k < M * Kp; k += L)
        store<L>(block.q(t) + k, load<L>(block.q(t) + k) + load<L>(block.q(t - 1) + k));
    }
  }

  // From the gradient of the outputs of an iteration to ds, in place.
  static CAPSFAST_ONCE void differentiate_squash(const Block& block, int64_t t) {
    const int64_t M = block.rows(), Dp = block.call.Dp;
    for (int64_t m = 0; m < M; ++m) {
      const T* const s = block.wide(block.at.sums, t) + m * Dp;
      T* const ds = block.ds(t) + m * Dp;
      const bool valid = block.is_valid_out(m / block.p.J, m % block.p.J);
      const T factor = block.at.f[t * M + m], n = block.at.squares[t * M + m];
      const T along = valid ? block.p.squash.slope(t == block.last(), n, dot(s, ds, Dp)) : T(0);
      for (int64_t d = 0; d < Dp; d += L) store<L>(ds + d, load<L>(ds + d) * factor + load<L>(s + d) * along);
    }
  }

  // Computes the coupling of an iteration; from dz also the gradient of its logits and, with `query`, dq.
  static CAPSFAST_ONCE void iteration_gradients(const Block& block, int64_t t, bool query) {
    const Problem& p = block.p;
    const int64_t J = p.J, Kp = block.call.Kp, size = block.size();
    const View& dcoupling = block.call.in.dcoupling;
    const bool prior = block.call.need_logits && (p.squash.accumulate || t == 0);
    const bool add = p.squash.accumulate && t < block.last();
    for (int64_t n = 0; n < block.samples; ++n) {
      T *const c = block.coupling(n, t), *const dl = block.dl(n, t), *const total = block.at.dlogits + n * size;
      const auto coefficients = [&](Span span) {
        couple(block, n, t, t == 0 ? nullptr : block.q(t) + n * J * Kp, span, c, block.inverse(n, t));
        if (!query && !prior) return;
        scores(block, n, block.dZ(t) + n * J * Kp, span, dl);
        for (int64_t k = span.from; k < span.to && t == block.last() && dcoupling.data != nullptr; ++k)
          Couplings::template transfer<false, 1>(dcoupling, block.b0 + n, k * L, block.capsules(k), J, dl + k * J * L);
        differentiate(block, n, t, span, c, dl);
        for (int64_t k = span.from * J * L; k < span.to * J * L && prior; k += L)
          store<L>(total + k, load<L>(total + k) + load<L>(dl + k));
      };
      if (p.softmax_in()) coefficients({0, block.used[n]});
      if (!query) {
        if (!p.softmax_in()) for_spans(block, n, coefficients);
        continue;
      }
      T* const dq = block.dq(t - 1) + n * J * Kp;
      if (add) __builtin_memcpy(dq, block.dq(t) + n * J * Kp, static_cast<size_t>(J * Kp) * sizeof(T));
      sum_spans(block, n, J * Kp, add, dq, [&](Span span, T* to) {
        if (!p.softmax_in()) coefficients(span);
        weighted(block, n, dl, span, to);
      });
    }
  }

  // dW = sum over samples and iterations of ds z and, except in the last iteration, of outputs dq.
  static CAPSFAST_ONCE void weight_gradients(const Block& block, int64_t since, T* dW) {
    const FactoredCall<T>& call = block.call;
    const int64_t D = block.p.D, Kp = call.Kp, Dp = call.Dp, G = call.matrices;
    const int64_t rows = (since == 0 ? block.sets() : 1) * block.rows() / G;
    for (int64_t g = 0; g < G; ++g)
      Products<T>::template product<false, 1>(
          D, {block.ds(since) + g * Dp, 1, G * Dp, rows}, {block.Z(since) + g * Kp, G * Kp, L}, Kp / L,
          {dW + g * D * Kp, Kp, L, true});
  }

  // du_i = sum_tj (c_ij dz_j + dl_ij q_j), of all iterations at once.
  static CAPSFAST_ONCE void input_gradients(const Block& block, int64_t n, int64_t since) {
    const Problem& p = block.p;
    const int64_t J = p.J, K = p.K, Kp = block.call.Kp, size = J * Kp, sets = since == 0 ? block.sets() : 1;
    T* const vectors = block.at.vectors;
    for (int64_t set = 0; set < sets; ++set) {
      const T* const from = block.of(block.at.back, since + set) + n * size;
      __builtin_memcpy(vectors + set * size, from, static_cast<size_t>(size) * sizeof(T));
    }
    const View& du = block.call.du;
    for (int64_t k = 0; k < block.call.blocks; ++k) {
      const int64_t to = (block.b0 + n) * du.stride[0] + k * L * du.stride[1], count = block.capsules(k);
      T* const rows = block.call.in_place ? static_cast<T*>(du.data) + to : block.at.du;
      const LeftFactor<T> factors{block.coupling(n, since) + k * J * L, 1, L, J, sets, block.size()};
      if (k >= block.used[n]) {
        __builtin_memset(rows, 0, static_cast<size_t>(L * Kp) * sizeof(T));
      } else if (block.call.past_cache) {
        Products<T>::template product<true, 1>(count, factors, {vectors, Kp, L}, Kp / L, {rows, Kp, L});
      } else {
        Products<T>::template product<false, 1>(count, factors, {vectors, Kp, L}, Kp / L, {rows, Kp, L});
      }
      for (int64_t l = 0; l < count && !block.call.in_place; ++l)
        scatter<T>(du, to + l * du.stride[1], {1, 1, K}, {0, 0, 1}, rows + l * Kp);
    }
  }

  static CAPSFAST_ONCE void logit_gradients(const Block& block, int64_t n, const FactoredSums<T>& sums) {
    const int64_t J = block.p.J;
    for (int64_t k = 0; k < block.call.blocks; ++k) {
      T* const from = block.at.dlogits + n * block.size() + k * J * L;
      if (block.call.dlogits.data != nullptr) {
        Couplings::template transfer<true, 1>(block.call.dlogits, block.b0 + n, k * L, block.capsules(k), J, from);
        continue;
      }
      for (int64_t l = 0; l < block.capsules(k); ++l) {
        for (int64_t j = 0; j < J; ++j) sums.dlogits[(k * L + l) * J + j] += static_cast<double>(from[j * L + l]);
      }
    }
  }
};

template <class T>
const FactoredKernels<T>& factored_table() {
  static const FactoredKernels<T> kernels{kLanes<T>, Factored<T>::forward, Factored<T>::backward};
  return kernels;
}

template const FactoredKernels<float>& factored_table<float>();
template const FactoredKernels<double>& factored_table<double>();

}  // namespace capsfast::CAPSFAST_TARGET

#include "../../cpu/end_target.inl"
#endif
