// Building blocks of the rows layout: a vector holds L of the D components of one vote. The votes are an input.
//
// L input capsules make a block. The dot products of one output capsule are first L vectors, one for each input
// capsule. One call of sums() adds up the lanes of all L vectors. So the scores of the block are [J][L], with the input
// capsules in the lanes.
#pragma once

#include "../../cpu/vec.inl"
#include "scratch.h"
#include "coupling.inl"
#include "gather.inl"

namespace capsfast::CAPSFAST_TARGET {

// The functions that do not depend on the length of a vote.
template <class T, int L_>
struct RowsBlock : Coupling<T, L_> {
  static constexpr int L = L_;
  using V = Vec<T, L>;

  // Adds from[n] to the sum high[n] + low[n], for n < count.
  static CAPSFAST_ONCE void join(const T* from, int64_t count, T* high, T* low) {
    for (int64_t n = 0; n < count; ++n) add_exactly(from[n], high + n, low + n);
  }

  // Adds the prior logits of input capsules [i0, i0 + count) of sample b to scores [J][L]. Masked entries and the lanes
  // from `count` on become masked_logit().
  static CAPSFAST_INLINE void add_logits(const Problem& p, int64_t b, int64_t i0, int64_t count, const T* valid,
                                         const T* valid_out, T* scores) {
    using B_ = Coupling<T, L>;
    if (p.logits.data != nullptr) B_::template transfer<false, 1>(p.logits, b, i0, count, p.J, scores);
    B_::template mask<true>(valid, valid_out, p.J, B_::masked_logit(p.normalize), scores);
  }

  // The numbers of input capsules [i0, i0 + count), 0 for masked capsules and in the lanes from `count` on.
  static CAPSFAST_ONCE typename Coupling<T, L>::LaneNumbers numbers(
      const Problem& p, const View& dlse, int64_t b, int64_t i0, int64_t count, const RowsScratch<T>& at) {
    const bool all = p.mask.data == nullptr && count == L;
    for (int64_t n = 0; n < L && !all; ++n)
      at.valid[n] = n < count && (p.mask.data == nullptr || p.mask.at(b, i0 + n)) ? T(1) : T(0);
    const auto copied = [&](const View& view, T* to) -> const T* {
      if (view.data == nullptr) return nullptr;
      for (int64_t n = 0; n < L; ++n) {
        const bool valid = all || at.valid[n] > 0;
        to[n] = valid ? read<T>(view, b * view.stride[0] + (i0 + n) * view.stride[1]) : T(0);
      }
      return to;
    };
    return {
        all ? nullptr : at.valid, copied(p.activation, at.activation), copied(p.lse, at.lse), copied(dlse, at.dlse)};
  }

  // Points at[n] to the votes [J][D] of input capsule i0 + n, or [D] if all outputs share them. Contiguous votes of
  // type T are used in place, others are copied to `buffer` [L][J D or D]. Votes of a masked capsule are zeros.
  static CAPSFAST_ONCE void rows(const Problem& p, int64_t b, int64_t i0, int64_t count, T* buffer, const T** at) {
    const View& view = p.votes;
    const int64_t J = p.shared_outputs ? 1 : p.J;
    const int64_t size = p.votes_size(), n[3] = {1, J, p.D}, s[3] = {0, view.stride[2], view.stride[3]};
    const bool run = is_run<T>(view, n, s);
    for (int64_t c = 0; c < count; ++c, buffer += size) {
      const int64_t from = b * view.stride[0] + (i0 + c) * view.stride[1];
      at[c] = buffer;
      if (p.mask.data != nullptr && !p.mask.at(b, i0 + c)) {
        __builtin_memset(buffer, 0, static_cast<size_t>(size) * sizeof(T));
      } else if (run) {
        at[c] = static_cast<const T*>(view.data) + from;
      } else {
        gather<T>(view, from, n, s, buffer);
      }
    }
  }
};

// Q: the center is subtracted from votes, and squares of votes are scored too.
template <class T, int L_, int NV, bool Q>
struct Rows : RowsBlock<T, L_> {
  static constexpr int L = L_;
  static constexpr int64_t kOutputs = 16;  // output capsules scored at a time: their partial sums stay in L1
  static constexpr bool kMatrices = false;
  using V = Vec<T, L>;

  // Votes [J][D] of a block of input capsules, `pitch` numbers from one output capsule to the next.
  struct Votes {
    const T* at[L];
    int64_t pitch;
  };

  static void read(const Problem& p, int64_t b, int64_t i0, int64_t count, T* buffer, T*, Votes* to) {
    to->pitch = p.shared_outputs ? 0 : p.D;
    RowsBlock<T, L_>::rows(p, b, i0, count, buffer, to->at);
  }

  // Where the vector of numbers [d, d + L) of a row begins. The last vector of a row of D >= L numbers ends with the
  // row, and repeats lanes of the vector before: partial reads and writes would be slow. Reading and writing lanes
  // twice does no harm; sums must clear_repeated() first. A shorter row is one partial vector.
  static CAPSFAST_INLINE int64_t begin_of(int64_t d, int64_t D) { return NV > 0 || d + L <= D || D < L ? d : D - L; }

  // The vector of numbers [d, d + L) of the row p. If NV > 0, D is NV L. Lanes from D on are 0 if D < L.
  static CAPSFAST_INLINE V read_vector(const T* p, int64_t d, int64_t D) {
    if (NV > 0 || D >= L) return load<L>(p + begin_of(d, D));
    return load_part<L>(p, D);
  }
  static CAPSFAST_INLINE void write_vector(T* p, V x, int64_t d, int64_t D) {
    if (NV > 0 || D >= L) {
      store<L>(p + begin_of(d, D), x);
    } else {
      store_part<L>(p, x, D);
    }
  }

  // The same for a vote x, less the center if Q.
  static CAPSFAST_INLINE V read_vote(const T* x, const T* center, int64_t d, int64_t D) {
    if constexpr (Q) return read_vector(x, d, D) - read_vector(center, d, D);
    (void)center;
    return read_vector(x, d, D);
  }

  static CAPSFAST_INLINE V clear_repeated(V x, int64_t d, int64_t D) {
    const int64_t begin = begin_of(d, D);
    return begin == d ? x : clear_first<T, L>(x, d - begin);
  }

  // out[j][n] = the form p (without its constant) of votes[n][j], for `count` input capsules n and all j. p and center
  // are [J][D], out is [J][L], part [kOutputs][L][L]. The votes of a capsule are read from end to end, for the
  // prefetcher.
  static CAPSFAST_ONCE void dots(const Votes& votes, int64_t count, const Form<T>& p, const T* center, int64_t J,
                                 int64_t D_given, T* part, T* out) {
    const int64_t D = NV > 0 ? NV * L : D_given;
    for (int64_t j0 = 0; j0 < J; j0 += kOutputs) {
      const int64_t outputs = j0 + kOutputs < J ? kOutputs : J - j0;
      for (int64_t n = 0; n < count; ++n) {
        const T* x = votes.at[n] + j0 * votes.pitch;
        for (int64_t j = 0; j < outputs; ++j, x += votes.pitch) {
          const int64_t row = (j0 + j) * D;
          const T* q = p.linear + row;
          V a = V{};
#pragma GCC unroll 2
          for (int64_t d = 0; d < D; d += L) {
            const V v = read_vote(x, center + (Q ? row : 0), d, D);
            V factor = read_vector(q, d, D);
            if constexpr (Q) factor += v * read_vector(p.square + row, d, D);
            a += clear_repeated(v * factor, d, D);
          }
          store<L>(part + (j * L + n) * L, a);
        }
      }
      for (int64_t j = 0; j < outputs; ++j) {
        V m[L];
#pragma GCC unroll 16
        for (int n = 0; n < L; ++n) m[n] = n < count ? load<L>(part + (j * L + n) * L) : V{};
        store<L>(out + (j0 + j) * L, sums<T, L>(m));
      }
    }
  }

  // sum_pitch: the length of a row of sums, in whole vectors. Repeated lanes of sums mean nothing. Vectors of sums must
  // not overlap as vectors of votes do, because sums are read again right after the write.
  static CAPSFAST_INLINE int64_t size_of(int64_t D) { return NV > 0 ? NV * L : D; }
  static CAPSFAST_INLINE int64_t sum_pitch(int64_t D) { return NV > 0 ? NV * L : (D + L - 1) / L * L; }

  // sum[j] += c[j][n] x and, unless it is null, second[j] += c[j][n] x^2 with x = votes[n][j], for `count` input
  // capsules n and all j. c is [J][L]; votes as above, sum and second are [J][sum_pitch].
  static CAPSFAST_ONCE void add_scaled(const T* c, const Votes& votes, int64_t count, const T* center, int64_t J,
                                       int64_t D_given, T* sum, T* second) {
    const int64_t D = NV > 0 ? NV * L : D_given, row = sum_pitch(D);
    for (int64_t n = 0; n < count; ++n) {
      const T* x = votes.at[n];
      for (int64_t j = 0; j < J; ++j, x += votes.pitch) {
        const V cj = broadcast<L>(c[j * L + n]);
#pragma GCC unroll 2
        for (int64_t d = 0; d < D; d += L) {
          const V v = read_vote(x, center + (Q ? j * D : 0), d, D);
          T* const to = sum + j * row + d;
          store<L>(to, load<L>(to) + cj * v);
          if (!Q || second == nullptr) continue;
          T* const squares = second + j * row + d;
          store<L>(squares, load<L>(squares) + cj * v * v);
        }
      }
    }
  }

  // Adds sums [J][sum_pitch] to high + low [J][D].
  static CAPSFAST_ONCE void join_rows(const T* sum, int64_t J, int64_t D_given, T* high, T* low) {
    const int64_t D = NV > 0 ? NV * L : D_given, row = sum_pitch(D);
    for (int64_t j = 0; j < J; ++j, sum += row, high += D, low += D) {
      for (int64_t d = 0; d < D; d += L) {
        V h = read_vector(high, d, D), l = read_vector(low, d, D);
        add_exactly(clear_repeated(load<L>(sum + d), d, D), &h, &l);
        write_vector(high, h, d, D);
        write_vector(low, l, d, D);
      }
    }
  }
};

// Sums over a chunk of input capsules, and how they join the sums of a pass.
// B_: Rows or Keys, the building blocks.
template <class T, class B_>
struct RowsSums {
  static constexpr int L = B_::L;

  template <class Pass>
  static void clear(const Pass& pass, const RowsScratch<T>& at) {
    const int64_t J = pass.problem->J, sums = J * B_::sum_pitch(pass.problem->D);
    __builtin_memset(at.sum, 0, static_cast<size_t>(sums) * sizeof(T));
    if (pass.mass.high != nullptr) __builtin_memset(at.mass, 0, static_cast<size_t>(J * L) * sizeof(T));
    if (pass.second.high != nullptr) __builtin_memset(at.second, 0, static_cast<size_t>(sums) * sizeof(T));
  }

  // Adds `count` votes of a block, weighted by e [J][L].
  template <class Pass>
  static void add(const Pass& pass, const RowsScratch<T>& at, const typename B_::Votes& votes, int64_t count,
                  const T* center, const T* e) {
    const int64_t J = pass.problem->J;
    T* const second = pass.second.high == nullptr ? nullptr : at.second;
    if (pass.first.high != nullptr) B_::add_scaled(e, votes, count, center, J, pass.problem->D, at.sum, second);
    if (pass.mass.high != nullptr) B_::add(e, J, at.mass);
  }

  // Adds the sums of a chunk to the sums of sample b.
  template <class Pass>
  static void join(const Pass& pass, const RowsScratch<T>& at, int64_t b) {
    const int64_t J = pass.problem->J, D = pass.problem->D, to = b * J * D;
    if (pass.first.high != nullptr) B_::join_rows(at.sum, J, D, pass.first.high + to, pass.first.low + to);
    if (pass.second.high != nullptr) B_::join_rows(at.second, J, D, pass.second.high + to, pass.second.low + to);
    for (int64_t j = 0; j < J && pass.mass.high != nullptr; ++j) {
      const T mass = sum<T, L>(load<L>(at.mass + j * L));
      B_::join(&mass, 1, pass.mass.high + b * J + j, pass.mass.low + b * J + j);
    }
  }
};

}  // namespace capsfast::CAPSFAST_TARGET
