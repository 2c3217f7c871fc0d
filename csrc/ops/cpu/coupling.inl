// Routing logits to coupling coefficients and back, on arrays [J][L]. In the lanes layout the lanes are
// samples, in the rows layout input capsules.

template <class T, int L>
struct Coupling {
  using V = Vec<T, L>;

  // b[j] += prior logits; then -inf for pairs that a mask takes out.
  static CAPSFAST_INLINE void add_prior(const T* shared, const T* sample, const T* valid_in, const T* valid_out, int64_t J, T* b) {
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
    for (int64_t j = 0; j < J; ++j) {
      const V e = exp<L>(load<L>(b + j * L) - m);
      store<L>(b + j * L, e);
      total += e;
    }
    const V scale = total == V{} ? V{} : T(1) / total;
    for (int64_t j = 0; j < J; ++j) store<L>(b + j * L, load<L>(b + j * L) * scale);
  }

  // b to c = exp(b - lse), in place; lse is +inf where there is no finite logit.
  static CAPSFAST_INLINE void softmax_in(int64_t J, const T* lse, T* b) {
    for (int64_t j = 0; j < J; ++j) store<L>(b + j * L, exp<L>(load<L>(b + j * L) - load<L>(lse + j * L)));
  }

  // dc to db = c (dc - sum_j c dc), in place; with c_dc the sum over i is given instead.
  static CAPSFAST_INLINE void softmax_backward(int64_t J, const T* c, const T* c_dc, T* dc) {
    V total = V{};
    if (c_dc == nullptr) {
      for (int64_t j = 0; j < J; ++j) total += load<L>(c + j * L) * load<L>(dc + j * L);
    }
    for (int64_t j = 0; j < J; ++j) {
      const V mean = c_dc == nullptr ? total : load<L>(c_dc + j * L);
      store<L>(dc + j * L, load<L>(c + j * L) * (load<L>(dc + j * L) - mean));
    }
  }
};
