// Building blocks of the rows layout for votes [B, I, 1, D] that all output capsules share, like the keys of an
// attention. The votes of a block of input capsules are a matrix, so sums over the block, and sums over the output
// capsules, are products of matrices. Keys has the interface of Rows.
#pragma once

#include "../../cpu/vec.inl"
#include "scratch.h"
#include "gather.inl"
#include "products.inl"
#include "rows.inl"

namespace capsfast::CAPSFAST_TARGET {

template <class T>
struct Keys : RowsBlock<T, Products<T>::L>, Products<T> {
  using Products<T>::L;
  using typename Products<T>::V;
  static constexpr bool kMatrices = true;

  // Votes of a block of input capsules: vote n at at[n pitch], padded with zeros to whole vectors. transposed [D][L].
  struct Votes {
    const T* at;
    int64_t pitch;
    const T* transposed;
  };

  static CAPSFAST_INLINE int64_t sum_pitch(int64_t D) { return (D + L - 1) / L * L; }

  // buffer [L][sum_pitch]: a copy, where votes can't be used in place. transposed [sum_pitch][L].
  static CAPSFAST_ONCE void read(const Problem& p, int64_t b, int64_t i0, int64_t count, T* buffer, T* transposed,
                                 Votes* to) {
    const View& view = p.votes;
    const int64_t D = p.D, padded = sum_pitch(D);
    const bool in_place = D == padded && p.mask.data == nullptr && view.storage == kStorage<T> && view.stride[3] == 1;
    const int64_t from = b * view.stride[0] + i0 * view.stride[1];
    *to = {buffer, padded, transposed};
    if (in_place) *to = {static_cast<const T*>(view.data) + from, view.stride[1], transposed};
    for (int64_t n = 0; n < L && !in_place; ++n) {
      T* const row = buffer + n * padded;
      const bool here = n < count && (p.mask.data == nullptr || p.mask.at(b, i0 + n));
      if (here) gather<T>(view, from + n * view.stride[1], {1, 1, D}, {0, 0, view.stride[3]}, row);
      for (int64_t d = here ? D : 0; d < padded; ++d) row[d] = 0;
    }
    prefetch_rows<T, L>(to->at + 2 * L * to->pitch, to->pitch, padded);
    for (int64_t d = 0; d < padded; d += L) {
      V m[L];
#pragma GCC unroll 16
      for (int n = 0; n < L; ++n) m[n] = n < count ? load<L>(to->at + n * to->pitch + d) : V{};
      transpose<T, L>(m);
#pragma GCC unroll 16
      for (int n = 0; n < L; ++n) store<L>(transposed + (d + n) * L, m[n]);
    }
  }

  // out [J][L]: products of the votes with the linear form.
  static void dots(const Votes& votes, int64_t, const Form<T>& p, const T*, int64_t J, int64_t D, T*, T* out) {
    Products<T>::product(J, {p.linear, D, 1, D}, {votes.transposed, L, L}, 1, {out, L, L});
  }

  // sum[j] += c[j][n] votes[n], for `count` input capsules n and all j; sum [J][sum_pitch].
  static void add_scaled(const T* c, const Votes& votes, int64_t count, const T*, int64_t J, int64_t D, T* sum, T*) {
    Products<T>::template product<false, L>(
        J, {c, L, 1, count}, {votes.at, votes.pitch, L}, sum_pitch(D) / L, {sum, sum_pitch(D), L, true});
  }

  static CAPSFAST_ONCE void join_rows(const T* sum, int64_t J, int64_t D, T* high, T* low) {
    for (int64_t j = 0; j < J; ++j, sum += sum_pitch(D), high += D, low += D) {
      int64_t d = 0;
      for (; d + L <= D; d += L) {
        V h = load<L>(high + d), l = load<L>(low + d);
        add_exactly(load<L>(sum + d), &h, &l);
        store<L>(high + d, h);
        store<L>(low + d, l);
      }
      for (; d < D; ++d) add_exactly(sum[d], high + d, low + d);
    }
  }

  // to [L][sum_pitch] += coefficients [J][L] times vectors [J][D], for input capsules n < count. If D is not a multiple
  // of L, vectors are first copied to padded [J][sum_pitch].
  static CAPSFAST_ONCE void add_gradients(const T* coefficients, const T* vectors, int64_t count, int64_t J, int64_t D,
                                          T* padded, T* to) {
    const int64_t pitch = sum_pitch(D);
    for (int64_t j = 0; j < J && pitch != D; ++j) {
      __builtin_memcpy(padded + j * pitch, vectors + j * D, static_cast<size_t>(D) * sizeof(T));
      for (int64_t d = D; d < pitch; ++d) padded[j * pitch + d] = 0;
    }
    Products<T>::template product<false, 1>(
        count, {coefficients, 1, L, J}, {pitch == D ? vectors : padded, pitch, L}, pitch / L, {to, pitch, L, true});
  }
};

}  // namespace capsfast::CAPSFAST_TARGET
