// Building blocks of the rows layout: the lanes run along a row of D K numbers of one output capsule.
//
// For few samples, and for votes that exist. With x[m] = w[m] u[m % K] the votes need not even be
// summed over k: agreement = sum_m x[m] V[m / K] and s[m] += c x[m], folded over k once at the end, so
// V is spread to D K numbers and a weight costs two operations. Votes are the case K = 1, u = 1.
//
// L input capsules make a block: the L partial sums of one output capsule are added up by one
// transposing tree, which leaves the scores as [J][L] with the capsules in the lanes.

// How the poses meet a row: votes have none, one register holds them if K divides L, else [D K] numbers.
enum class Pose { none, one_register, repeated };

template <class T, int L_, int NV, Pose kind>
struct Rows : Coupling<T, L_> {
  static constexpr int L = L_;
  static constexpr bool votes_given = kind == Pose::none;
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
      if constexpr (kind == Pose::repeated) x = x * read_vector(u, m, M);
      a += x * read_vector(p, m, M);
    }
    if constexpr (kind == Pose::one_register) a = a * load<L>(u);
    return a;
  }

  // out[j][n] = sum of w u p over row j of capsule n, for `count` capsules.
  static CAPSFAST_INLINE void dots(const T* const* w, const T* u, int64_t count, const T* p, int64_t J, int64_t M, T* out) {
    for (int64_t j = 0; j < J; ++j) {
      V part[L];
      if (count == L) {
#pragma GCC unroll 16
        for (int n = 0; n < L; ++n) part[n] = partial_dot(w[n] + j * M, u + n * kPitch(M), p + j * M, M);
      } else {
        for (int n = 0; n < L; ++n) part[n] = n < count ? partial_dot(w[n] + j * M, u + n * kPitch(M), p + j * M, M) : V{};
      }
      store<L>(out + j * L, sums<T, L>(part));
    }
  }

  // Numbers that the pose of one capsule takes.
  static CAPSFAST_INLINE int64_t kPitch(int64_t M) { return kind == Pose::none ? 0 : kind == Pose::one_register ? L : M; }

  // sum[j] += c[j L] w u for all j, of one capsule.
  static CAPSFAST_INLINE void add_scaled(const T* c, const T* w, const T* u, int64_t J, int64_t M_given, T* sum) {
    const int64_t M = NV > 0 ? NV * L : M_given;
    for (int64_t j = 0; j < J; ++j) {
      V cu = broadcast<L>(c[j * L]);
      if constexpr (kind == Pose::one_register) cu = cu * load<L>(u);
#pragma GCC unroll 8
      for (int64_t m = 0; m < M; m += L) {
        V x = read_vector(w + j * M, m, M);
        if constexpr (kind == Pose::repeated) x = x * read_vector(u, m, M);
        write_vector(sum + j * M, read_vector(sum + j * M, m, M) + cu * x, m, M);
      }
    }
  }

  // [rows] numbers, each K times: to[row K + k] = from[row].
  static void spread(const T* from, int64_t rows, int64_t K, T* to) {
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t k = 0; k < K; ++k) to[row * K + k] = from[row];
    }
  }

  // A pose of K numbers over and over, `count` numbers in all.
  static void repeat(const T* pose, int64_t count, int64_t K, T* to) {
    for (int64_t n = 0; n < count; n += K) {
      for (int64_t k = 0; k < K; ++k) to[n + k] = pose[k];
    }
  }

  // high[row] + low[row] += sum over k of from[row K + k]
  static void fold(const T* from, int64_t rows, int64_t K, T* high, T* low) {
    for (int64_t row = 0; row < rows; ++row) {
      T total = 0;
      for (int64_t k = 0; k < K; ++k) total += from[row * K + k];
      add_exactly(total, high + row, low + row);
    }
  }

  // Adds the prior logits of capsules i0 ... of sample b to scores [J][L]; -inf for what the masks take
  // out and for the lanes behind `count`.
  static void add_prior(const Problem& p, int64_t b, int64_t i0, int64_t count, const T* valid_out, T* scores) {
    const int64_t J = p.J;
    const T out = -static_cast<T>(__builtin_inf());
    for (int64_t n = 0; n < L; ++n) {
      const bool valid = n < count && (p.mask.data == nullptr || p.mask.at(b, i0 + n));
      if (!valid) {
        for (int64_t j = 0; j < J; ++j) scores[j * L + n] = out;
      } else if (p.logits.data != nullptr) {
        const int64_t at = b * p.logits.stride[0] + (i0 + n) * p.logits.stride[1];
        for (int64_t j = 0; j < J; ++j) scores[j * L + n] += read<T>(p.logits, at + j * p.logits.stride[2]);
      }
    }
    if (valid_out == nullptr) return;
    for (int64_t j = 0; j < J; ++j) {
      if (!(valid_out[j] > 0)) store<L>(scores + j * L, broadcast<L>(out));
    }
  }

  // Softmax over the input capsules, its normaliser per output capsule given.
  static void softmax_in(int64_t J, const T* in_max, const T* in_scale, T* scores) {
    for (int64_t j = 0; j < J; ++j) store<L>(scores + j * L, exp<L>(load<L>(scores + j * L) - in_max[j]) * in_scale[j]);
  }

  // dc to db; with c_dc the sum over i of c dc is given per output capsule.
  static void softmax_backward(int64_t J, const T* c, const T* c_dc, T* dc) {
    if (c_dc == nullptr) return Coupling<T, L>::softmax_backward(J, c, nullptr, dc);
    for (int64_t j = 0; j < J; ++j) store<L>(dc + j * L, load<L>(c + j * L) * (load<L>(dc + j * L) - c_dc[j]));
  }

  // [J][L] of capsules i0 ... to a [B, I, J] tensor (out), or added from it.
  template <bool out>
  static void transfer(const View& view, int64_t b, int64_t i0, int64_t count, int64_t J, T* lanes) {
    for (int64_t n = 0; n < count; ++n) {
      int64_t at = b * view.stride[0] + (i0 + n) * view.stride[1];
      for (int64_t j = 0; j < J; ++j, at += view.stride[2]) {
        if constexpr (out) {
          write<T>(view, at, lanes[j * L + n]);
        } else {
          lanes[j * L + n] += read<T>(view, at);
        }
      }
    }
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

  // Poses of capsules i0 ... of sample b, repeated as the kind wants it, zeros where masked.
  static void poses(const Problem& p, int64_t b, int64_t i0, int64_t count, T* one, T* repeated) {
    if constexpr (votes_given) return;
    const int64_t pitch = kPitch(p.D * p.K);
    for (int64_t n = 0; n < count; ++n) {
      const bool masked = p.mask.data != nullptr && !p.mask.at(b, i0 + n);
      const int64_t at = b * p.u.stride[0] + (i0 + n) * p.u.stride[1];
      for (int64_t k = 0; k < p.K; ++k) one[k] = masked ? T(0) : read<T>(p.u, at + k * p.u.stride[2]);
      repeat(one, pitch, p.K, repeated + n * pitch);
    }
  }

  // The rows of a block: in place, or gathered to `buffer` [L][J D K].
  static void rows(const Problem& p, int64_t b, int64_t i0, int64_t count, T* buffer, const T** to) {
    const int64_t size = p.J * p.D * p.K;
    for (int64_t n = 0; n < count; ++n) to[n] = row(p, b, i0 + n, buffer + n * size);
  }
};
