// The two steps of a small batch that need the weight: making its votes, and at the end of the backward du and dW from
// dvotes. Between the two the votes are routed by rows_accumulate.inl and rows_gradient.inl.

template <class T>
struct SmallBatch {
  static constexpr int L = kLanes<T>;
  using V = Vec<T, L>;

  // Adds up groups of K neighbouring lanes. Lane g K + q of the result is the sum of group g of m[q]. Overwrites m.
  template <int K, int H = K / 2>
  static CAPSFAST_INLINE V group_sums(V* m) {
    if constexpr (H >= 1) {
#pragma GCC unroll 16
      for (int q = 0; q < H; ++q)
        m[q] = swap_blocks<T, L, H, false>(m[q], m[q + H]) + swap_blocks<T, L, H, true>(m[q], m[q + H]);
      return group_sums<K, H / 2>(m);
    } else {
      return m[0];
    }
  }

  // A block of L rows with K numbers each is K vectors. Vector q holds rows [q L / K, (q + 1) L / K), so group_sums()
  // leaves the sum of row q L / K + g in lane g K + q. This moves it to the lane of its row.
  template <int K, int... N>
  static CAPSFAST_INLINE V in_order(V v, std::integer_sequence<int, N...>) {
    return shuffle_of<T, L>(v, v, std::integer_sequence<int, (N % (L / K) * K + N / (L / K))...>{});
  }

  // x[row] = w[row] . u, for rows w[row] of K numbers, L rows at a time.
  template <int K>
  static CAPSFAST_INLINE void row_products(const T* w, const T* u, int64_t rows, T* x) {
    alignas(sizeof(V)) T repeated[L];
    for (int l = 0; l < L; ++l) repeated[l] = u[l % K];
    const V pose = load<L>(repeated);
    int64_t row = 0;
    for (; row + L <= rows; row += L) {
      V m[K];
#pragma GCC unroll 16
      for (int q = 0; q < K; ++q) m[q] = load<L>(w + row * K + q * L) * pose;
      store<L>(x + row, in_order<K>(group_sums<K>(m), std::make_integer_sequence<int, L>{}));
    }
    for (; row < rows; ++row) x[row] = product(w + row * K, u, K);
  }

  static CAPSFAST_INLINE T product(const T* w, const T* u, int64_t K) {
    V a = V{};
    int64_t k = 0;
    for (; k + L <= K; k += L) a += load<L>(w + k) * load<L>(u + k);
    T total = sum<T, L>(a);
    for (; k < K; ++k) total += w[k] * u[k];
    return total;
  }

  static void votes_of(const T* w, const T* u, int64_t K, int64_t rows, T* x) {
    if constexpr (L >= 4) {
      if (K == 4) return row_products<4>(w, u, rows, x);
    }
    if constexpr (L >= 8) {
      if (K == 8) return row_products<8>(w, u, rows, x);
    }
    if constexpr (L >= 16) {
      if (K == 16) return row_products<16>(w, u, rows, x);
    }
    for (int64_t row = 0; row < rows; ++row) x[row] = product(w + row * K, u, K);
  }

  // Whether the components d of the weight lie side by side, as in weights that are stored [.., K, D]. Then a vector of
  // votes is a sum over k of vectors of the weight, and nothing is to be moved.
  static bool components_together(const Problem& p) {
    return p.weight.storage == kStorage<T> && p.weight.stride[2] == 1 && p.weight.stride[3] != 1 && p.D >= L / 2;
  }

  static const T* weight_of(const Problem& p, int64_t i, int64_t j) {
    return static_cast<const T*>(p.weight.data) + i * p.weight.stride[0] + j * p.weight.stride[1];
  }

  static void votes_of_components(const Problem& p, int64_t i, const T* u, T* x) {
    // The weight of the input capsule after the next is on its way while this one is worked on.
    const int64_t pitch = p.weight.stride[3], ahead = 2 * p.weight.stride[0];
    for (int64_t j = 0; j < p.J; ++j) {
      const T* w = weight_of(p, i, j);
      for (int64_t d = 0; d < p.D; d += L) {
        const T* from = w + d;
        V even = V{}, odd = V{};
        int64_t k = 0;
        for (; k + 2 <= p.K; k += 2, from += 2 * pitch) {
          __builtin_prefetch(from + ahead);
          __builtin_prefetch(from + pitch + ahead);
          even += lanes(from, p.D - d) * u[k];
          odd += lanes(from + pitch, p.D - d) * u[k + 1];
        }
        if (k < p.K) even += lanes(from, p.D - d) * u[k];
        if (d + L <= p.D) {
          store<L>(x + j * p.D + d, even + odd);
        } else {
          store_part<L>(x + j * p.D + d, even + odd, p.D - d);
        }
      }
    }
  }

  // Whether the matrices [D, K] of the weight lie apart, as in weights that are stored [J, I, D, K].
  static bool matrices_apart(const Problem& p) {
    const int64_t* stride = p.weight.stride;
    return p.weight.storage == kStorage<T> && stride[3] == 1 && stride[2] == p.K && stride[1] != p.D * p.K;
  }

  static void votes_of_matrices(const Problem& p, int64_t i, const T* u, T* x) {
    for (int64_t j = 0; j < p.J; ++j) {
      const T* w = weight_of(p, i, j);
      const char* ahead = reinterpret_cast<const char*>(w + 2 * p.weight.stride[0]);
      for (int64_t n = 0; n < p.D * p.K * static_cast<int64_t>(sizeof(T)); n += 64) __builtin_prefetch(ahead + n);
      votes_of(w, u, p.K, p.D, x + j * p.D);
    }
  }

  // part [K]: scratch.
  static void pose_gradient_of_matrices(const Problem& p, int64_t i, const T* g, T* part, T* du) {
    for (int64_t j = 0; j < p.J; ++j) {
      pose_gradient(weight_of(p, i, j), g + j * p.D, p.K, p.D, j == 0 ? du : part);
      for (int64_t k = 0; k < p.K && j > 0; ++k) du[k] += part[k];
    }
  }

  static V lanes(const T* from, int64_t left) { return left >= L ? load<L>(from) : load_part<L>(from, left); }

  static void pose_gradient_of_components(const Problem& p, int64_t i, const T* g, T* du) {
    constexpr int64_t kTogether = 4;  // poses whose sums are formed at a time
    for (int64_t k0 = 0; k0 < p.K; k0 += kTogether) {
      const int64_t some = k0 + kTogether < p.K ? kTogether : p.K - k0;
      V a[kTogether] = {};
      for (int64_t j = 0; j < p.J; ++j) {
        const T* w = weight_of(p, i, j) + k0 * p.weight.stride[3];
        for (int64_t d = 0; d < p.D; d += L) {
          const V x = lanes(g + j * p.D + d, p.D - d);
          if (some == kTogether) {
#pragma GCC unroll 4
            for (int k = 0; k < kTogether; ++k) a[k] += lanes(w + k * p.weight.stride[3] + d, p.D - d) * x;
          } else {
            for (int64_t k = 0; k < some; ++k) a[k] += lanes(w + k * p.weight.stride[3] + d, p.D - d) * x;
          }
        }
      }
      for (int64_t k = 0; k < some; ++k) du[k0 + k] = sum<T, L>(a[k]);
    }
  }

  // The weight [J D K] of input capsule i: in place if it is a contiguous run of T, else copied to `buffer`.
  static const T* weight_row(const Problem& p, int64_t i, T* buffer) {
    const View& w = p.weight;
    const int64_t n[3] = {p.J, p.D, p.K}, s[3] = {w.stride[1], w.stride[2], w.stride[3]};
    if (is_run<T>(w, n, s)) return static_cast<const T*>(w.data) + i * w.stride[0];
    LanesPacking<T>::copy_weight(p, i, buffer);
    return buffer;
  }

  // Copies the pose of input capsule i of sample b to u [K]; a masked one becomes zeros, even if it holds NaN.
  static void pose_of(const Problem& p, int64_t b, int64_t i, T* u) {
    const bool masked = p.mask.data != nullptr && !p.mask.at(b, i);
    const int64_t at = b * p.u.stride[0] + i * p.u.stride[1];
    for (int64_t k = 0; k < p.K; ++k) u[k] = masked ? T(0) : read<T>(p.u, at + k * p.u.stride[2]);
  }

  // Writes the votes of input capsules [i0, i1) to `votes` [B, I, J, D]. scratch [J D K + K].
  static void votes(const Problem& p, int64_t i0, int64_t i1, T* votes, T* scratch) {
    const int64_t rows = p.J * p.D;
    T* u = scratch + rows * p.K;
    const bool together = components_together(p), apart = matrices_apart(p);
    const T* w = nullptr;
    for (int64_t i = i0; i < i1; ++i) {
      if (!together && !apart && (w == nullptr || p.weight.stride[0] != 0)) w = weight_row(p, i, scratch);
      for (int64_t b = 0; b < p.B; ++b) {
        T* x = votes + (b * p.I + i) * rows;
        pose_of(p, b, i, u);
        if (together) {
          votes_of_components(p, i, u, x);
        } else if (apart) {
          votes_of_matrices(p, i, u, x);
        } else {
          votes_of(w, u, p.K, rows, x);
        }
      }
    }
  }

  // du = sum over rows of g[row] w[row]. With constant K a row of the weight is one vector.
  template <int K>
  static CAPSFAST_INLINE void pose_gradient_of(const T* w, const T* g, int64_t rows, T* du) {
    Vec<T, K> a[4] = {};
    int64_t row = 0;
    for (; row + 4 <= rows; row += 4) {
#pragma GCC unroll 4
      for (int n = 0; n < 4; ++n) a[n] += load<K>(w + (row + n) * K) * g[row + n];
    }
    for (; row < rows; ++row) a[0] += load<K>(w + row * K) * g[row];
    store<K>(du, (a[0] + a[1]) + (a[2] + a[3]));
  }

  static void pose_gradient(const T* w, const T* g, int64_t K, int64_t rows, T* du) {
    if (K == 8) return pose_gradient_of<8>(w, g, rows, du);
    if (K == 4) return pose_gradient_of<4>(w, g, rows, du);
    if (K == 16) return pose_gradient_of<16>(w, g, rows, du);
    for (int64_t k = 0; k < K; ++k) du[k] = 0;
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t k = 0; k < K; ++k) du[k] += g[row] * w[row * K + k];
    }
  }

  // dw[row] = g[row] u, added to dw if `add`.
  template <int K>
  static CAPSFAST_INLINE void weight_gradient_of(const T* u, const T* g, bool add, int64_t rows, T* dw) {
    const Vec<T, K> pose = load<K>(u);
    for (int64_t row = 0; row < rows; ++row, dw += K) {
      const Vec<T, K> term = pose * g[row];
      store<K>(dw, add ? load<K>(dw) + term : term);
    }
  }

  static void weight_gradient(const T* u, const T* g, bool add, int64_t K, int64_t rows, T* dw) {
    if (K == 8) return weight_gradient_of<8>(u, g, add, rows, dw);
    if (K == 4) return weight_gradient_of<4>(u, g, add, rows, dw);
    if (K == 16) return weight_gradient_of<16>(u, g, add, rows, dw);
    for (int64_t row = 0; row < rows; ++row, dw += K) {
      for (int64_t k = 0; k < K; ++k) dw[k] = (add ? dw[k] : T(0)) + g[row] * u[k];
    }
  }

  // Computes du and dW of input capsules [i0, i1) from dvotes. scratch [2 J D K + 3 K].
  static void gradients(const SmallBatchGradients<T>& out, const Problem& p, int64_t i0, int64_t i1, T* scratch) {
    const int64_t rows = p.J * p.D, size = rows * p.K;
    T *u = scratch + 2 * size, *du = u + p.K;
    const bool in_place = out.dweight_sum == nullptr && out.dweight.storage == kStorage<T>;
    const bool together = components_together(p), apart = matrices_apart(p);
    const T* w = nullptr;
    for (int64_t i = i0; i < i1; ++i) {
      if (!together && !apart && (w == nullptr || p.weight.stride[0] != 0)) w = weight_row(p, i, scratch);
      T* dw = in_place ? static_cast<T*>(out.dweight.data) + i * size : scratch + size;
      for (int64_t b = 0; b < p.B; ++b) {
        const T* g = out.dvotes + (b * p.I + i) * rows;
        pose_of(p, b, i, u);
        if (out.du.data != nullptr) {
          if (together) {
            pose_gradient_of_components(p, i, g, du);
          } else if (apart) {
            pose_gradient_of_matrices(p, i, g, du + p.K, du);
          } else {
            pose_gradient(w, g, p.K, rows, du);
          }
          const bool masked = p.mask.data != nullptr && !p.mask.at(b, i);
          for (int64_t k = 0; k < p.K && masked; ++k) du[k] = 0;
          scatter<T>(out.du, b * out.du.stride[0] + i * out.du.stride[1], {1, 1, p.K}, {0, 0, 1}, du);
        }
        if (out.dweight.data != nullptr) weight_gradient(u, g, out.add || b > 0, p.K, rows, dw);
      }
      if (out.dweight.data == nullptr || in_place) continue;
      if (out.dweight_sum == nullptr) {
        scatter<T>(out.dweight, i * size, {1, 1, size}, {0, 0, 1}, dw);
        continue;
      }
      for (int64_t n = 0; n < size; ++n) add_exactly(dw[n], out.dweight_sum + n, out.dweight_low + n);
    }
  }
};
