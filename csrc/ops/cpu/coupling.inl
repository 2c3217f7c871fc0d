// The softmax and its backward, on arrays [J][L]. In the lanes layout the L lanes are samples, in the rows layout input
// capsules.

template <class T, int L>
struct Coupling {
  using V = Vec<T, L>;
  static constexpr int64_t kPart = 32;  // a long sum is made of sums of so many terms, to round less

  // Adds the prior logits to b [J][L], `shared` [J] or `sample` [J][L]. Then masked entries become -inf, where valid_in
  // [L] or valid_out [J][L] is 0. Each pointer is null if there is nothing of its kind.
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

  // Replaces b by c, the softmax over j. If all logits are -inf, c is 0.
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

  // Replaces b by c = exp(b - in_max) in_scale: the softmax over the input capsules, whose normaliser is known.
  static CAPSFAST_INLINE void softmax_in(int64_t J, const T* in_max, const T* in_scale, T* b) {
    for (int64_t j = 0; j < J; ++j) {
      store<L>(b + j * L, exp<L>(load<L>(b + j * L) - load<L>(in_max + j * L)) * load<L>(in_scale + j * L));
    }
  }

  // Replaces dc by db = c (dc - sum_j c dc). If c_dc [J][L] is not null it holds the sum, over i instead of j.
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
