// From logits to coupling coefficients and back, on arrays [J][L]. In the lanes layout the L lanes are samples, in the
// rows layout input capsules.
#pragma once

#include "../../cpu/vec.inl"
#include "../../math/softmax.h"
#include "kernels.h"
#include "gather.inl"

namespace capsfast::CAPSFAST_TARGET {

template <class T, int L>
struct Coupling {
  using V = Vec<T, L>;
  static constexpr int64_t kPart = 32;  // terms of a partial sum: long sums add up partial sums, to round less

  // Numbers per lane, [L], that the coupling and its gradient depend on: valid (1 or 0), the arguments activation and
  // lse, and the gradient of the lse of a softmax over the output capsules. Null if absent.
  struct LaneNumbers {
    const T *valid, *activation, *lse, *dlse;
  };
  // Numbers per output capsule: [J][L], or [J] if all lanes agree (see AccumulatePass). Null if absent.
  struct OutputNumbers {
    const T *valid, *in_max, *in_scale, *c_dc, *in_dlse;

    // The numbers of a tile of samples. iteration: where the tile begins in arrays with an axis of iterations.
    template <class Pass>
    static CAPSFAST_INLINE OutputNumbers of(const Pass& pass, int64_t tile, int64_t iteration,
                                            const T* in_dlse = nullptr) {
      return {from(pass.valid_out, tile), from(pass.in_max, iteration), from(pass.in_scale, iteration),
              from(pass.c_dc, iteration), from(in_dlse, iteration)};
    }
  };

  // The logit of a masked entry, which gives it the coupling 0.
  static CAPSFAST_INLINE T masked_logit(Normalize way) {
    return way == Normalize::none ? T(0) : -static_cast<T>(__builtin_inf());
  }

  // If `out`, writes lanes [J][L] to `view` [B, I, J]; else adds `view` to them. `count` lanes, from (b, i) on, run
  // along the axis of samples (0) or of input capsules (1).
  template <bool out, int axis>
  static CAPSFAST_ONCE void transfer(const View& view, int64_t b, int64_t i, int64_t count, int64_t J, T* lanes) {
    for (int64_t l = 0; l < count; ++l) {
      int64_t at = b * view.stride[0] + i * view.stride[1] + l * view.stride[axis];
      for (int64_t j = 0; j < J; ++j, at += view.stride[2]) {
        if constexpr (out) {
          write<T>(view, at, lanes[j * L + l]);
        } else {
          lanes[j * L + l] += read<T>(view, at);
        }
      }
    }
  }

  // Writes the numbers of `count` lanes to `view` [B, I].
  template <int axis>
  static CAPSFAST_ONCE void put(const View& view, int64_t b, int64_t i, int64_t count, const T* lanes) {
    for (int64_t l = 0; l < count; ++l)
      write<T>(view, b * view.stride[0] + i * view.stride[1] + l * view.stride[axis], lanes[l]);
  }
  // The same, 0 where valid [L] is 0.
  template <int axis>
  static CAPSFAST_INLINE void put(const View& view, int64_t b, int64_t i, int64_t count, const T* valid, V value) {
    alignas(sizeof(V)) T lanes[L];
    store<L>(lanes, valid == nullptr ? value : where(load<L>(valid) > V{}, value, V{}));
    put<axis>(view, b, i, count, lanes);
  }

  // Element n of an array: [..][L], or [..] if all lanes agree.
  template <bool LanesAgree>
  static CAPSFAST_INLINE auto parameter(const T* p, int64_t n) {
    if constexpr (LanesAgree) {
      return p[n];
    } else {
      return load<L>(p + n * L);
    }
  }

  // Entries where valid_in [L] or a valid_out is 0 become `masked`. A pointer is null if everything is valid.
  template <bool LanesAgree = false>
  static CAPSFAST_INLINE void mask(const T* valid_in, const T* valid_out, int64_t J, T masked, T* b) {
    if (valid_in != nullptr || valid_out != nullptr) put_masked<LanesAgree>(valid_in, valid_out, J, masked, b);
  }
  template <bool LanesAgree>
  static CAPSFAST_ONCE void put_masked(const T* valid_in, const T* valid_out, int64_t J, T masked, T* b) {
    const V out = broadcast<L>(masked);
    if (valid_in != nullptr) {
      const V ok = load<L>(valid_in);
      for (int64_t j = 0; j < J; ++j) store<L>(b + j * L, where(ok > V{}, load<L>(b + j * L), out));
    }
    if (valid_out != nullptr) {
      for (int64_t j = 0; j < J; ++j)
        store<L>(b + j * L, where(V{} + parameter<LanesAgree>(valid_out, j) > V{}, load<L>(b + j * L), out));
    }
  }

  // Adds a number per output capsule, unless it is null.
  template <bool LanesAgree = false>
  static CAPSFAST_INLINE void add(const T* constant, int64_t J, T* b) {
    if (constant != nullptr) add_each<LanesAgree>(constant, J, b);
  }
  template <bool LanesAgree>
  static CAPSFAST_ONCE void add_each(const T* constant, int64_t J, T* b) {
    for (int64_t j = 0; j < J; ++j) store<L>(b + j * L, load<L>(b + j * L) + parameter<LanesAgree>(constant, j));
  }

  // Multiplies b [J][L] by a number per lane, unless it is null.
  static CAPSFAST_INLINE void weigh(const T* activation, int64_t J, T* b) {
    if (activation != nullptr) multiply_each(activation, J, b);
  }
  static CAPSFAST_ONCE void multiply_each(const T* activation, int64_t J, T* b) {
    const V a = load<L>(activation);
    for (int64_t j = 0; j < J; ++j) store<L>(b + j * L, load<L>(b + j * L) * a);
  }

  // The exponential of any argument. Where exp() does not reach, squares the exponential of x / 2.
  static V exp_of_any(V x) {
    constexpr T most = sizeof(T) == 4 ? T(80) : T(700);
    const V limit = broadcast<L>(most), half = T(0.5) * where(x > T(2) * limit, T(2) * limit, x);
    const V root = exp<L>(half), e = exp<L>(where(x > limit, limit, x));
    return where(x > limit, root * root, e);
  }

  // Replaces logits b [J][L] by R, for all but Normalize::in. lse [L]: the argument of Normalize::lse; where it is
  // -inf, R is 0. lse_out [L]: gets the log-sum-exp of a softmax, unless it is null.
  static CAPSFAST_ONCE void normalize(Normalize way, int64_t J, bool leaky, const T* lse, T* lse_out, T* b) {
    if (way == Normalize::out) return softmax_out(J, leaky, lse_out, b);
    if (way == Normalize::sigmoid) return sigmoid(J, b);
    if (way == Normalize::lse) return exponential(J, lse, b);
  }

  static CAPSFAST_ONCE void sigmoid(int64_t J, T* b) {
    for (int64_t j = 0; j < J; ++j) {
      const V x = load<L>(b + j * L);
      const V e = exp<L>(where(x > V{}, V{} - x, x));
      store<L>(b + j * L, where(x > V{}, broadcast<L>(T(1)), e) / (T(1) + e));
    }
  }

  static CAPSFAST_ONCE void exponential(int64_t J, const T* lse, T* b) {
    const V shift = load<L>(lse);
    const auto nothing = shift == broadcast<L>(-static_cast<T>(__builtin_inf()));
    for (int64_t j = 0; j < J; ++j) {
      const V e = exp_of_any(load<L>(b + j * L) - shift);
      store<L>(b + j * L, where(nothing, V{}, e));
    }
  }

  // Replaces b by c, the softmax over j. If all logits are -inf, c is 0 and the log-sum-exp -inf.
  static CAPSFAST_INLINE void softmax_out(int64_t J, bool leaky, T* lse_out, T* b) {
    // Two chains, because a maximum waits for the one before it.
    V m = broadcast<L>(leaky ? T(0) : kLowest<T>), other = m;
    for (int64_t j = 0; j + 2 <= J; j += 2) {
      m = max(m, load<L>(b + j * L));
      other = max(other, load<L>(b + (j + 1) * L));
    }
    if (J % 2 != 0) m = max(m, load<L>(b + (J - 1) * L));
    m = max(m, other);
    V total = leaky ? exp<L>(V{} - m) : V{};
    for (int64_t j0 = 0; j0 < J; j0 += kPart) {
      V part = V{};
      for (int64_t j = j0; j < J && j < j0 + kPart; ++j) {
        const V e = exp<L>(load<L>(b + j * L) - m);
        store<L>(b + j * L, e);
        part += e;
      }
      total += part;
    }
    const V scale = where(total == V{}, V{}, T(1) / total);
    for (int64_t j = 0; j < J; ++j) store<L>(b + j * L, load<L>(b + j * L) * scale);
    if (lse_out == nullptr) return;
    T totals[L];
    store<L>(totals, total);
    store<L>(lse_out, m);
    for (int l = 0; l < L; ++l) lse_out[l] += static_cast<T>(__builtin_log(static_cast<double>(totals[l])));
  }

  // Replaces b by c = exp(b - in_max) in_scale: the softmax over the input capsules with a known normaliser.
  template <bool LanesAgree = false>
  static CAPSFAST_ONCE void softmax_in(int64_t J, const T* in_max, const T* in_scale, T* b) {
    for (int64_t j = 0; j < J; ++j) {
      const V e = exp<L>(load<L>(b + j * L) - parameter<LanesAgree>(in_max, j));
      store<L>(b + j * L, e * parameter<LanesAgree>(in_scale, j));
    }
  }

  // Replaces dc, the gradient of R, by dl, the gradient of the logits. For a softmax see the next functions.
  static CAPSFAST_ONCE void derivative(Normalize way, int64_t J, const T* c, T* dc) {
    if (way == Normalize::none) return;
    for (int64_t j = 0; j < J; ++j) {
      const V slope = way == Normalize::sigmoid ? load<L>(c + j * L) * (T(1) - load<L>(c + j * L)) : load<L>(c + j * L);
      store<L>(dc + j * L, slope * load<L>(dc + j * L));
    }
  }

  // The sum over j of x[j] y[j], or of x[j] if y is null, in parts.
  static CAPSFAST_INLINE V total(int64_t J, const T* x, const T* y) {
    V all = V{};
    for (int64_t j0 = 0; j0 < J; j0 += kPart) {
      V part = V{};
      for (int64_t j = j0; j < J && j < j0 + kPart; ++j) {
        part += y == nullptr ? load<L>(x + j * L) : load<L>(x + j * L) * load<L>(y + j * L);
      }
      all += part;
    }
    return all;
  }

  // Replaces dc by db = c (dc - sum_j c dc + dlse). dlse [L], null without one: the gradient of the lse.
  static CAPSFAST_ONCE void softmax_out_backward(int64_t J, const T* c, const T* dlse, T* dc) {
    V mean = total(J, c, dc);
    if (dlse != nullptr) mean -= load<L>(dlse);
    for (int64_t j = 0; j < J; ++j) store<L>(dc + j * L, load<L>(c + j * L) * (load<L>(dc + j * L) - mean));
  }

  // The same over the input capsules, where c_dc is the sum over i. in_scale, c_dc and dlse: numbers of output
  // capsules.
  template <bool LanesAgree = false>
  static CAPSFAST_ONCE void softmax_in_backward(int64_t J, const T* in_scale, const T* c, const T* c_dc, const T* dlse,
                                                T* dc) {
    for (int64_t j = 0; j < J; ++j) {
      const V coupling = load<L>(c + j * L), rest = load<L>(dc + j * L) - parameter<LanesAgree>(c_dc, j);
      const V db = divided(V{} + parameter<LanesAgree>(in_scale, j), coupling) * rest;
      store<L>(dc + j * L, dlse == nullptr ? db : db + coupling * parameter<LanesAgree>(dlse, j));
    }
  }

  // Replaces dc, the gradient of R activation, by the gradient of the logits.
  template <bool LanesAgree>
  static CAPSFAST_INLINE void differentiate(const Problem& p, const LaneNumbers& lanes, const OutputNumbers& outputs,
                                            const T* c, T* dc) {
    weigh(lanes.activation, p.J, dc);
    if (p.normalize == Normalize::out) {
      softmax_out_backward(p.J, c, lanes.dlse, dc);
    } else if (p.softmax_in()) {
      softmax_in_backward<LanesAgree>(p.J, outputs.in_scale, c, outputs.c_dc, outputs.in_dlse, dc);
    } else {
      derivative(p.normalize, p.J, c, dc);
      if (p.normalize == Normalize::none) mask<LanesAgree>(lanes.valid, outputs.valid, p.J, T(0), dc);
    }
  }

  // In the gradient pass: replaces R and dc of `count` lanes, from (b, i) on, by the coupling and the gradient of the
  // logits, and writes the gradients of activation and lse. axis: of the lanes, as in transfer().
  template <bool LanesAgree, int axis>
  static CAPSFAST_INLINE void finish(const GradientPass<T>& pass, const LaneNumbers& lanes,
                                     const OutputNumbers& outputs, bool last_iteration, int64_t b, int64_t i,
                                     int64_t count, T* c, T* dc) {
    const Problem& p = *pass.problem;
    if (pass.dcoupling.data != nullptr && last_iteration) transfer<false, axis>(pass.dcoupling, b, i, count, p.J, dc);
    if (pass.dactivation.data != nullptr) put<axis>(pass.dactivation, b, i, count, lanes.valid, total(p.J, c, dc));
    differentiate<LanesAgree>(p, lanes, outputs, c, dc);
    if (pass.dlse_given.data != nullptr)
      put<axis>(pass.dlse_given, b, i, count, lanes.valid, V{} - total(p.J, dc, nullptr));
    weigh(lanes.activation, p.J, c);
  }

  // c, or 0 where c is 1 (see kWhole). Decides by in_scale, because c also has the rounding errors of b: 1 / in_scale
  // is the sum of all exp(b - max), whose largest term is 1. A NaN in the other factor stays NaN.
  static CAPSFAST_INLINE V divided(V in_scale, V c) {
    const auto whole = (in_scale > broadcast<L>(kWhole<T>)) & (c > broadcast<L>(T(0.5)));
    return where(whole, V{}, c);
  }
};

}  // namespace capsfast::CAPSFAST_TARGET
