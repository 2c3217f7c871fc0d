// Building blocks of the rows layout: the lanes run along a row of D K numbers of one output capsule.
//
// For few samples, and for votes that exist. With x[m] = w[m] u[m % K] the votes need not even be
// summed over k: agreement = sum_m x[m] V[m / K] and s[m] += c x[m], folded over k once at the end, so
// V is spread to D K numbers and a weight costs three operations. Votes are the case K = 1, u = 1.

template <class T, int L_, int NV, bool votes_given>
struct Rows {
  static constexpr int L = L_;
  using V = Vec<T, L>;

  // M numbers as vectors: NV of them, or any number and a tail.
  static CAPSFAST_INLINE V read_vector(const T* p, int64_t m, int64_t M) {
    if constexpr (NV > 0) return load<L>(p + m);
    return m + L <= M ? load<L>(p + m) : load_part<L>(p + m, M - m);
  }
  static CAPSFAST_INLINE void write_vector(T* p, V x, int64_t m, int64_t M) {
    if (NV > 0 || m + L <= M) {
      store<L>(p + m, x);
    } else {
      store_part<L>(p + m, x, M - m);
    }
  }

  // Lane by lane partial sums of w u p over a row.
  static CAPSFAST_INLINE V partial_dot(const T* w, const T* u, const T* p, int64_t M_given) {
    const int64_t M = NV > 0 ? NV * L : M_given;
    V a = V{};
#pragma GCC unroll 8
    for (int64_t m = 0; m < M; m += L) {
      V x = read_vector(w, m, M);
      if constexpr (!votes_given) x = x * read_vector(u, m, M);
      a += x * read_vector(p, m, M);
    }
    return a;
  }

  // out[j] = sum of w u p over row j, for all j; out has room for J rounded up to L.
  static CAPSFAST_INLINE void dots(const T* w, const T* u, const T* p, int64_t J, int64_t M, T* out) {
    for (int64_t j0 = 0; j0 < J; j0 += L) {
      V part[L];
      if (j0 + L <= J) {
#pragma GCC unroll 16
        for (int n = 0; n < L; ++n) part[n] = partial_dot(w + (j0 + n) * M, u, p + (j0 + n) * M, M);
      } else {
        for (int n = 0; n < L; ++n) part[n] = j0 + n < J ? partial_dot(w + (j0 + n) * M, u, p + (j0 + n) * M, M) : V{};
      }
      store<L>(out + j0, sums<T, L>(part));
    }
  }

  // sum[j] += c[j] w u for all j.
  static CAPSFAST_INLINE void add_scaled(const T* c, const T* w, const T* u, int64_t J, int64_t M_given, T* sum) {
    const int64_t M = NV > 0 ? NV * L : M_given;
    for (int64_t j = 0; j < J; ++j) {
#pragma GCC unroll 8
      for (int64_t m = 0; m < M; m += L) {
        V x = read_vector(w + j * M, m, M) * c[j];
        if constexpr (!votes_given) x = x * read_vector(u, m, M);
        write_vector(sum + j * M, read_vector(sum + j * M, m, M) + x, m, M);
      }
    }
  }

  // [rows] numbers, each K times: to[row K + k] = from[row].
  static void spread(const T* from, int64_t rows, int64_t K, T* to) {
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t k = 0; k < K; ++k) to[row * K + k] = from[row];
    }
  }

  // A pose of K numbers, D times over.
  static void repeat(const T* pose, int64_t D, int64_t K, T* to) {
    for (int64_t d = 0; d < D; ++d) {
      for (int64_t k = 0; k < K; ++k) to[d * K + k] = pose[k];
    }
  }

  // to[row] += sum over k of from[row K + k]
  static void fold(const T* from, int64_t rows, int64_t K, T* to) {
    for (int64_t row = 0; row < rows; ++row) {
      T total = 0;
      for (int64_t k = 0; k < K; ++k) total += from[row * K + k];
      to[row] += total;
    }
  }

  static T horizontal_max(V v) {
    T m = v[0];
    for (int l = 1; l < L; ++l) m = v[l] > m ? v[l] : m;
    return m;
  }

  // Adds the prior logits of capsule i of sample b to scores [J rounded up to L]; -inf for what the masks
  // take out and for the lanes behind J.
  static CAPSFAST_INLINE void add_prior(const Problem& p, int64_t b, int64_t i, const T* valid_out, int64_t width, T* scores) {
    const int64_t J = p.J;
    const T out = -static_cast<T>(__builtin_inf());
    if (p.logits.data != nullptr) {
      const int64_t at = b * p.logits.stride[0] + i * p.logits.stride[1];
      for (int64_t j = 0; j < J; ++j) scores[j] += read<T>(p.logits, at + j * p.logits.stride[2]);
    }
    for (int64_t j = J; j < width; ++j) scores[j] = out;
    if (valid_out != nullptr) {
      for (int64_t j = 0; j < J; ++j) scores[j] = valid_out[j] > 0 ? scores[j] : out;
    }
    if (p.mask.data != nullptr && !p.mask.at(b, i)) {
      for (int64_t j = 0; j < J; ++j) scores[j] = out;
    }
  }

  // Scores to c = softmax over j. Without any finite logit c is 0.
  static CAPSFAST_INLINE void softmax_out(int64_t width, bool leaky, T* scores) {
    V m = broadcast<L>(leaky ? T(0) : kLowest<T>);
    for (int64_t j = 0; j < width; j += L) m = max(m, load<L>(scores + j));
    m = broadcast<L>(horizontal_max(m));
    V totals = V{};
    for (int64_t j = 0; j < width; j += L) {
      const V e = exp<L>(load<L>(scores + j) - m);
      store<L>(scores + j, e);
      totals += e;
    }
    T total = sum<T, L>(totals);
    if (leaky) total += exp<L>(V{} - m)[0];
    const T scale = total == 0 ? T(0) : 1 / total;
    for (int64_t j = 0; j < width; j += L) store<L>(scores + j, load<L>(scores + j) * scale);
  }

  static CAPSFAST_INLINE void softmax_in(int64_t width, const T* lse, T* scores) {
    for (int64_t j = 0; j < width; j += L) store<L>(scores + j, exp<L>(load<L>(scores + j) - load<L>(lse + j)));
  }

  // dc to db = c (dc - sum_j c dc); with c_dc the sum over i is given instead.
  static CAPSFAST_INLINE void softmax_backward(int64_t width, const T* c, const T* c_dc, T* dc) {
    V totals = V{};
    if (c_dc == nullptr) {
      for (int64_t j = 0; j < width; j += L) totals += load<L>(c + j) * load<L>(dc + j);
      totals = broadcast<L>(sum<T, L>(totals));
    }
    for (int64_t j = 0; j < width; j += L) {
      const V mean = c_dc == nullptr ? totals : load<L>(c_dc + j);
      store<L>(dc + j, load<L>(c + j) * (load<L>(dc + j) - mean));
    }
  }

  static void add_from(const View& view, int64_t at, int64_t J, T* to) {
    for (int64_t j = 0; j < J; ++j) to[j] += read<T>(view, at + j * view.stride[2]);
  }

  // The row [J][D K] of capsule i (of sample b, for votes): in place or copied to `buffer`. A masked
  // capsule's votes read as zeros; a masked pose is zero instead.
  static const T* row(const Problem& p, int64_t b, int64_t i, T* buffer) {
    const View& view = votes_given ? p.votes : p.weight;
    const int axis = votes_given ? 2 : 1;
    int64_t n[3] = {p.J, p.D, p.K}, s[3] = {view.stride[axis], view.stride[axis + 1], 1};
    if constexpr (!votes_given) s[2] = view.stride[3];
    const int64_t at = votes_given ? b * view.stride[0] + i * view.stride[1] : i * view.stride[0];
    if (votes_given && p.mask.data != nullptr && !p.mask.at(b, i)) {
      __builtin_memset(buffer, 0, static_cast<size_t>(p.J * p.D) * sizeof(T));
      return buffer;
    }
    if (is_run<T>(view, n, s)) return static_cast<const T*>(view.data) + at;
    gather<T>(view, at, n, s, buffer);
    return buffer;
  }

  // Pose of capsule i of sample b, D times over, zeros where masked.
  static void pose(const Problem& p, int64_t b, int64_t i, T* one, T* repeated) {
    if constexpr (votes_given) return;
    const bool masked = p.mask.data != nullptr && !p.mask.at(b, i);
    const int64_t at = b * p.u.stride[0] + i * p.u.stride[1];
    for (int64_t k = 0; k < p.K; ++k) one[k] = masked ? T(0) : read<T>(p.u, at + k * p.u.stride[2]);
    repeat(one, p.D, p.K, repeated);
  }
};
