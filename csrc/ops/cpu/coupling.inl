// Routing logits to coupling coefficients and back, on arrays [J][L]. In the lanes layout the lanes are
// samples, in the rows layout input capsules.

template <class T, int L>
struct Coupling {
  using V = Vec<T, L>;
  static constexpr int64_t kPart = 32;  // terms added up before they join a longer sum

  // b[j] += prior logits; then -inf for pairs that a mask takes out.
  static CAPSFAST_INLINE void add_prior(const T* shared, const T* sample, const T* valid_in, const T* valid_out,
                                        int64_t J, T* b) {
    if (shared != nullptr) {
      for (int64_t j = 0; j < J; ++j) store<L>(b + j * L, load<L>(b + j * L) + shared[j]);
    }
    if (sample != nullptr) {
      for (int64_t j = 0; j < J; ++j) store<L>(b + j * L, load<L>(b + j * L) + load<L>(sample + j * L));
    }
    const V out = broadcast<L>(-static_cast<T>(__builtin_inf()));
    if (valid_in != nullptr) {
      const V ok = load<L>(valid_in);
      for (int64_t j = 0; j < J; ++j) store<L>(b + j * L, ok > V{} ? load<L>(b + j * L) : out);
    }
    if (valid_out != nullptr) {
      for (int64_t j = 0; j < J; ++j) store<L>(b + j * L, load<L>(valid_out + j * L) > V{} ? load<L>(b + j * L) : out);
    }
  }

  // b to c = softmax over j, in place. Without any finite logit c is 0.
  static CAPSFAST_INLINE void softmax_out(int64_t J, bool leaky, T* b) {
    V m = broadcast<L>(leaky ? T(0) : kLowest<T>);
    for (int64_t j = 0; j < J; ++j) m = max(m, load<L>(b + j * L));
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
    const V scale = total == V{} ? V{} : T(1) / total;
    for (int64_t j = 0; j < J; ++j) store<L>(b + j * L, load<L>(b + j * L) * scale);
  }

  // b to c = exp(b - max) scale, in place: the softmax over the input capsules, its normaliser given.
  static CAPSFAST_INLINE void softmax_in(int64_t J, const T* in_max, const T* in_scale, T* b) {
    for (int64_t j = 0; j < J; ++j) {
      store<L>(b + j * L, exp<L>(load<L>(b + j * L) - load<L>(in_max + j * L)) * load<L>(in_scale + j * L));
    }
  }

  // dc to db = c (dc - sum_j c dc), in place; with c_dc the sum over i is given instead.
  static CAPSFAST_INLINE void softmax_backward(int64_t J, const T* c, const T* c_dc, T* dc) {
    V total = V{};
    for (int64_t j0 = 0; j0 < J && c_dc == nullptr; j0 += kPart) {
      V part = V{};
      for (int64_t j = j0; j < J && j < j0 + kPart; ++j) part += load<L>(c + j * L) * load<L>(dc + j * L);
      total += part;
    }
    for (int64_t j = 0; j < J; ++j) {
      const V mean = c_dc == nullptr ? total : load<L>(c_dc + j * L);
      store<L>(dc + j * L, load<L>(c + j * L) * (load<L>(dc + j * L) - mean));
    }
  }
};
