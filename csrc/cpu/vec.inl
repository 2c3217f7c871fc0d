// Vectors of one instruction set.
//
// A Vec<T, L> is a compiler vector of L lanes with the compiler's operators; a * b + c contracts to a fused
// multiply-add. The including file defines kBytes, the width of a register in bytes, and kTileBytes: see kTileLanes.
#pragma once

#include "kernel.h"

#if defined(__clang__)
#pragma clang fp contract(fast)
#endif

namespace capsfast::CAPSFAST_TARGET {

// A vector longer than a register: two halves. The compiler has vectors of any length, but GCC keeps vectors that fit
// no register in memory from one round of a loop to the next.
template <class Half>
struct Pair {
  Half low, high;
};

template <class T, int L, bool fits = (sizeof(T) * L <= kBytes)>
struct VecOf {
  typedef T type __attribute__((vector_size(sizeof(T) * L)));
};
template <class T>
struct VecOf<T, 1, true> {
  using type = T;
};
template <class T, int L>
struct VecOf<T, L, false> {
  using type = Pair<typename VecOf<T, L / 2>::type>;
};
template <class T, int L>
using Vec = typename VecOf<T, L>::type;

template <class V>
inline constexpr bool kIsPair = false;
template <class Half>
inline constexpr bool kIsPair<Pair<Half>> = true;

#define CAPSFAST_PAIR_OPERATOR(op)                                             \
  template <class Half>                                                        \
  CAPSFAST_INLINE auto operator op(const Pair<Half>& a, const Pair<Half>& b) { \
    return Pair<decltype(a.low op b.low)>{a.low op b.low, a.high op b.high};   \
  }                                                                            \
  template <class Half, class T>                                               \
  CAPSFAST_INLINE auto operator op(const Pair<Half>& a, T b) {                 \
    return Pair<decltype(a.low op b)>{a.low op b, a.high op b};                \
  }                                                                            \
  template <class Half, class T>                                               \
  CAPSFAST_INLINE auto operator op(T a, const Pair<Half>& b) {                 \
    return Pair<decltype(a op b.low)>{a op b.low, a op b.high};                \
  }
CAPSFAST_PAIR_OPERATOR(+)
CAPSFAST_PAIR_OPERATOR(-)
CAPSFAST_PAIR_OPERATOR(*)
CAPSFAST_PAIR_OPERATOR(/)
CAPSFAST_PAIR_OPERATOR(<)
CAPSFAST_PAIR_OPERATOR(>)
CAPSFAST_PAIR_OPERATOR(==)
CAPSFAST_PAIR_OPERATOR(&)
#undef CAPSFAST_PAIR_OPERATOR

template <class Half, class Other>
CAPSFAST_INLINE void operator+=(Pair<Half>& a, const Other& b) {
  a = a + b;
}
template <class Half, class Other>
CAPSFAST_INLINE void operator-=(Pair<Half>& a, const Other& b) {
  a = a - b;
}
template <class Half, class Other>
CAPSFAST_INLINE void operator*=(Pair<Half>& a, const Other& b) {
  a = a * b;
}

// An integer of the size of T.
template <class T>
using IntOf = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;

template <class T>
inline constexpr T kLowest =
    sizeof(T) == 4 ? static_cast<T>(-3.4028234663852886e38) : static_cast<T>(-1.7976931348623157e308);

// Lanes of a full register.
template <class T>
inline constexpr int kLanes = kBytes / static_cast<int>(sizeof(T));

// Lanes of a vector of a tile of samples. One register, if a multiply-add can broadcast its factor from memory.
// Otherwise a broadcast is an instruction of its own, so a vector has several registers that share it.
template <class T>
inline constexpr int kTileLanes = kTileBytes / static_cast<int>(sizeof(T));

template <int L, class T>
CAPSFAST_INLINE Vec<T, L> load(const T* p) {
  if constexpr (kIsPair<Vec<T, L>>) {
    return {load<L / 2>(p), load<L / 2>(p + L / 2)};
  } else {
    Vec<T, L> v;
    __builtin_memcpy(&v, p, sizeof(v));
    return v;
  }
}

template <int L, class T>
CAPSFAST_INLINE void store(T* p, Vec<T, L> v) {
  if constexpr (kIsPair<Vec<T, L>>) {
    store<L / 2>(p, v.low);
    store<L / 2>(p + L / 2, v.high);
  } else {
    __builtin_memcpy(p, &v, sizeof(v));
  }
}

// a in the lanes where the mask holds, else b.
template <class Mask, class V>
CAPSFAST_INLINE V where(Mask mask, V a, V b) {
  if constexpr (kIsPair<V>) {
    return {where(mask.low, a.low, b.low), where(mask.high, a.high, b.high)};
  } else {
    return mask ? a : b;
  }
}

// Stores past the cache: the cache line is not read before it is written. p is a multiple of the size of a vector.
// Other threads see the numbers after fence().
template <int L, class T>
CAPSFAST_INLINE void store_past_cache(T* p, Vec<T, L> v) {
#if CAPSFAST_X86
  if constexpr (L * sizeof(T) == 64 && sizeof(T) == 4) {
    _mm512_stream_ps(p, v);
  } else if constexpr (L * sizeof(T) == 64) {
    _mm512_stream_pd(p, v);
  } else if constexpr (L * sizeof(T) == 32 && sizeof(T) == 4) {
    _mm256_stream_ps(p, v);
  } else if constexpr (L * sizeof(T) == 32) {
    _mm256_stream_pd(p, v);
  } else {
    store<L>(p, v);
  }
#else
  store<L>(p, v);
#endif
}

CAPSFAST_INLINE void fence() {
#if CAPSFAST_X86
  __builtin_ia32_sfence();
#endif
}

// Asks for `count` rows of `size` numbers that come from memory: the hardware looks ahead within a page only.
template <class T, int count>
CAPSFAST_INLINE void prefetch_rows(const T* rows, int64_t pitch, int64_t size) {
  for (int row = 0; row < count; ++row, rows += pitch) {
    for (int64_t n = 0; n < size; n += 64 / int64_t{sizeof(T)}) __builtin_prefetch(rows + n);
  }
}

template <int L, class T>
CAPSFAST_INLINE Vec<T, L> broadcast(T x) {
  return x - Vec<T, L>{};
}

#if CAPSFAST_X86
// Loads the first n < L lanes with the masks of AVX-512 and AVX2. A template is compiled only where it is called, so
// the portable kernels may include it.
template <int L, class T>
CAPSFAST_INLINE Vec<T, L> load_masked(const T* p, int64_t n) {
  if constexpr (kBytes == 64) {
    const auto mask = static_cast<uint16_t>((1u << n) - 1);
    if constexpr (sizeof(T) == 4) {
      if constexpr (L == 16) return _mm512_maskz_loadu_ps(mask, p);
      if constexpr (L == 8) return _mm256_maskz_loadu_ps(static_cast<uint8_t>(mask), p);
    } else {
      if constexpr (L == 8) return _mm512_maskz_loadu_pd(static_cast<uint8_t>(mask), p);
      if constexpr (L == 4) return _mm256_maskz_loadu_pd(static_cast<uint8_t>(mask), p);
    }
  } else {
    Vec<IntOf<T>, L> lane;
    for (int l = 0; l < L; ++l) lane[l] = l;
    const auto mask = reinterpret_cast<Vec<long long, 4>>(lane < static_cast<IntOf<T>>(n));
    if constexpr (sizeof(T) == 4) return _mm256_maskload_ps(p, mask);
    if constexpr (sizeof(T) == 8) return _mm256_maskload_pd(p, mask);
  }
}
#endif

// The first n < L lanes come from p, the others are 0.
template <int L, class T>
CAPSFAST_INLINE Vec<T, L> load_part(const T* p, int64_t n) {
  if constexpr (kIsPair<Vec<T, L>>) {
    constexpr int H = L / 2;
    if (n < H) return {load_part<H>(p, n), Vec<T, H>{}};
    return {load<H>(p), load_part<H>(p + H, n - H)};
  } else {
#if CAPSFAST_X86
    if constexpr (kBytes >= 32 && L * sizeof(T) >= 32) return load_masked<L>(p, n);
#endif
    // In registers: a load from memory that was just stored to would wait. Longer vectors have masks.
    Vec<T, L> v{};
    for (int l = 0; l < L; ++l) {
      if (l < n) v[l] = p[l];
    }
    return v;
  }
}

// Copies n < 2 H numbers as two runs, which may overlap. The length of a run is the largest power of two that fits.
template <int H, class T>
CAPSFAST_INLINE void copy_part(T* p, const T* from, int64_t n) {
  if (n >= H) {
    __builtin_memcpy(p, from, H * sizeof(T));
    __builtin_memcpy(p + n - H, from + n - H, H * sizeof(T));
  } else if constexpr (H > 1) {
    copy_part<H / 2>(p, from, n);
  }
}

template <int L, class T>
CAPSFAST_INLINE void store_part(T* p, Vec<T, L> v, int64_t n) {
  alignas(sizeof(T) * L) T lanes[L];
  store<L>(lanes, v);
  copy_part<L / 2>(p, lanes, n);
}

// Adds x to *high, and the rounding error of this addition to *low (Knuth's two-sum).
template <class V>
CAPSFAST_INLINE void add_exactly(V x, V* high, V* low) {
  const V total = *high + x, back = total - *high;
  *low += (*high - (total - back)) + (x - back);
  *high = total;
}

// x with zeros in its first n < L lanes.
template <class T, int L>
CAPSFAST_INLINE Vec<T, L> clear_first(Vec<T, L> x, int64_t n) {
  Vec<T, L> lane;
  for (int l = 0; l < L; ++l) lane[l] = static_cast<T>(l);
  return lane < static_cast<T>(n) ? Vec<T, L>{} : x;
}

// The result is b where a is not greater. So a NaN in b is kept, and a NaN in a is dropped. Dropping is harmless in a
// softmax: the exponential of the NaN logit is NaN again.
template <class V>
CAPSFAST_INLINE V max(V a, V b) {
#if CAPSFAST_X86
  // GCC makes two instructions of the comparison and the choice.
  if constexpr (std::is_same_v<V, Vec<float, 16>> && kBytes == 64) return _mm512_maskz_max_ps(0xFFFF, a, b);
  if constexpr (std::is_same_v<V, Vec<float, 8>> && kBytes >= 32) return _mm256_max_ps(a, b);
#endif
  return where(a > b, a, b);
}

template <class T, int L>
CAPSFAST_INLINE bool any_different(Vec<T, L> a, Vec<T, L> b) {
  if constexpr (kIsPair<Vec<T, L>>) {
    return any_different<T, L / 2>(a.low, b.low) || any_different<T, L / 2>(a.high, b.high);
  } else {
    const auto mask = a != b;
    IntOf<T> some = 0;
    for (int l = 0; l < L; ++l) some |= mask[l];
    return some != 0;
  }
}

// Picks lanes of a (0 to L - 1) and b (L to 2 L - 1) in a constant order.

template <class T, int L, int... N>
CAPSFAST_INLINE Vec<T, L> shuffle_of(Vec<T, L> a, Vec<T, L> b, std::integer_sequence<int, N...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, N...);
#else
  return __builtin_shuffle(a, b, Vec<IntOf<T>, L>{N...});
#endif
}

// Which lane of (a, b) becomes lane n when a and b exchange blocks of H lanes. The exchange has two results; `high`
// selects the second.
constexpr int block_lane(int n, int L, int H, bool high) {
  const bool odd = (n / H) % 2 != 0;
  if (!high) return odd ? L + n - H : n;
  return odd ? L + n : n + H;
}
template <int L, int H, bool high, int... N>
constexpr auto block_sequence(std::integer_sequence<int, N...>) {
  return std::integer_sequence<int, block_lane(N, L, H, high)...>{};
}

template <class T, int L, int H, bool high>
CAPSFAST_INLINE Vec<T, L> swap_blocks(Vec<T, L> a, Vec<T, L> b) {
  return shuffle_of<T, L>(a, b, block_sequence<L, H, high>(std::make_integer_sequence<int, L>{}));
}

// Takes two lanes of each group of four lanes of a and b: the first two or, if `high`, the last two. Lanes of a and b
// alternate in the result.
template <class T, int L, bool high, int... N>
CAPSFAST_INLINE Vec<T, L> alternate(Vec<T, L> a, Vec<T, L> b, std::integer_sequence<int, N...>) {
  return shuffle_of<T, L>(
      a, b, std::integer_sequence<int, (N / 4 * 4 + N % 4 / 2 + (high ? 2 : 0) + (N % 2 != 0 ? L : 0))...>{});
}

// Transposes the L x L matrix m in place, in log2(L) rounds. A round exchanges off-diagonal blocks of H x H. For
// numbers of 4 bytes the last two rounds have instructions of their own, in the other order.
template <class T, int L, int H = L / 2>
CAPSFAST_INLINE void transpose(Vec<T, L>* m) {
  if constexpr (H == 2 && sizeof(T) == 4) {
    constexpr auto lanes = std::make_integer_sequence<int, L>{};
#pragma GCC unroll 16
    for (int i = 0; i < L; i += 4) {
      const Vec<T, L> first = alternate<T, L, false>(m[i], m[i + 1], lanes),
                      second = alternate<T, L, true>(m[i], m[i + 1], lanes),
                      third = alternate<T, L, false>(m[i + 2], m[i + 3], lanes),
                      fourth = alternate<T, L, true>(m[i + 2], m[i + 3], lanes);
      m[i] = swap_blocks<T, L, 2, false>(first, third);
      m[i + 1] = swap_blocks<T, L, 2, true>(first, third);
      m[i + 2] = swap_blocks<T, L, 2, false>(second, fourth);
      m[i + 3] = swap_blocks<T, L, 2, true>(second, fourth);
    }
  } else if constexpr (H >= 1) {
#pragma GCC unroll 16
    for (int i = 0; i < L; ++i) {
      if ((i / H) % 2 == 0) {
        const Vec<T, L> a = m[i], b = m[i + H];
        m[i] = swap_blocks<T, L, H, false>(a, b);
        m[i + H] = swap_blocks<T, L, H, true>(a, b);
      }
    }
    transpose<T, L, H / 2>(m);
  }
}

// Lane n of the result is the sum of the lanes of m[n]. With another H: lane 2 g H + n is the sum of group g of 2 H
// neighbouring lanes of m[n]. Overwrites m.
template <class T, int L, int H = L / 2>
CAPSFAST_INLINE Vec<T, L> sums(Vec<T, L>* m) {
  if constexpr (H >= 1) {
#pragma GCC unroll 16
    for (int i = 0; i < H; ++i) {
      // Folds vectors i and i + H into one vector. Its blocks of H lanes belong to vector i and to vector i + H in
      // turn.
      m[i] = swap_blocks<T, L, H, false>(m[i], m[i + H]) + swap_blocks<T, L, H, true>(m[i], m[i + H]);
    }
    return sums<T, L, H / 2>(m);
  } else {
    return m[0];
  }
}

// Lane n of the result is lane n ^ H of v.
template <class T, int L, int H, int... N>
CAPSFAST_INLINE Vec<T, L> swapped(Vec<T, L> v, std::integer_sequence<int, N...>) {
  return shuffle_of<T, L>(v, v, std::integer_sequence<int, (N ^ H)...>{});
}

template <class T, int L, int H = L / 2>
CAPSFAST_INLINE T sum(Vec<T, L> v) {
  if constexpr (kIsPair<Vec<T, L>>) {
    return sum<T, L / 2>(v.low + v.high);
  } else {
    if constexpr (H >= 1) return sum<T, L, H / 2>(v + swapped<T, L, H>(v, std::make_integer_sequence<int, L>{}));
    return v[0];
  }
}

// May drop NaN lanes, as max() does.
template <class T, int L, int H = L / 2>
CAPSFAST_INLINE T largest(Vec<T, L> v) {
  if constexpr (H >= 1) return largest<T, L, H / 2>(max(v, swapped<T, L, H>(v, std::make_integer_sequence<int, L>{})));
  return v[0];
}

// The exponential of arguments below 80, which is enough for a softmax: it subtracts the maximum first.
// exp(x) = 2^n 2^f with n = round(x / ln 2) and |f| <= 1/2. NaN stays NaN; a result that underflows is 0.
//
// The multiply-add that forms f = x / ln 2 - n does not round x / ln 2, so the error is smaller than the error that
// rounding x itself makes. Adding `shift`, 1.5 times 2 to the number of bits of a mantissa, leaves n in the low bits.
template <class T>
struct ExpNumbers {
  static constexpr float lowest = -87.3f, shift = 12582912.f;
  static constexpr int degree = 7, mantissa = 23, bias = 127;
};
template <>
struct ExpNumbers<double> {
  static constexpr double lowest = -708.3, shift = 6755399441055744.0;
  // The remainder of the Taylor series at ln 2 / 2 is 4e-18.
  static constexpr int degree = 13, mantissa = 52, bias = 1023;
};

// (ln 2)^i / i!
constexpr double power_of_two_term(int i) { return i == 0 ? 1.0 : power_of_two_term(i - 1) * 0.6931471805599453 / i; }

template <class T, int L>
CAPSFAST_INLINE Vec<T, L> exp_of(Vec<T, L> x) {
  using Numbers = ExpNumbers<T>;
  using V = Vec<T, L>;
  using Int = IntOf<T>;
  // AVX-512 multiplies by a power of 2, and leaves out lanes, in one instruction.
  constexpr bool kScales = kBytes == 64 && L * sizeof(T) == 64;
  const V lowest = broadcast<L>(Numbers::lowest), shift = broadcast<L>(Numbers::shift);
  const auto tiny = x < lowest;
  const V y = kScales ? x : tiny ? lowest : x;
  const V shifted = y * T(1.4426950408889634) + shift, n = shifted - shift, f = y * T(1.4426950408889634) - n;
  V p = broadcast<L>(T(power_of_two_term(Numbers::degree)));
#pragma GCC unroll 16
  for (int i = Numbers::degree - 1; i >= 0; --i) p = p * f + T(power_of_two_term(i));
#if CAPSFAST_X86
  if constexpr (kScales && sizeof(T) == 4)
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, lowest, _CMP_NLT_UQ), p, n);
  if constexpr (kScales && sizeof(T) == 8)
    return _mm512_maskz_scalef_pd(_mm512_cmp_pd_mask(x, lowest, _CMP_NLT_UQ), p, n);
#endif
  Vec<Int, L> bits, zero;
  __builtin_memcpy(&bits, &shifted, sizeof(bits));
  __builtin_memcpy(&zero, &shift, sizeof(zero));
  bits = ((bits - zero) + Numbers::bias) << Numbers::mantissa;
  V scale;
  __builtin_memcpy(&scale, &bits, sizeof(scale));
  p = p * scale;
  return tiny ? V{} : p;
}

template <int L, class V>
CAPSFAST_INLINE V exp(V x) {
  if constexpr (kIsPair<V>) {
    return {exp<L / 2>(x.low), exp<L / 2>(x.high)};
  } else {
    return exp_of<std::decay_t<decltype(x[0])>, L>(x);
  }
}

}  // namespace capsfast::CAPSFAST_TARGET
