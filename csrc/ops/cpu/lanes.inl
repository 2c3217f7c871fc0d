// Building blocks of the lanes layout: one vector holds one number of L samples. A row is an index (j, d) of the votes.
//
// R rows of votes stay in registers while their K products are added. Each weight is broadcast from memory by the
// multiply-add that uses it. With K = 8 that is 8 loads and 8 multiply-adds a row, so that a core with two load ports
// and two multiply-add ports keeps all four busy.

template <class T, int K_>
struct Lanes : Coupling<T, kLanes<T>> {
  static constexpr int L = kLanes<T>;
  static constexpr int R = kRegisters / 2;
  using V = Vec<T, L>;

  // rows[n] = w[n] . u for n < N. w [N][K], u [K][L].
  template <int N>
  static CAPSFAST_INLINE void votes_block(const T* w, const T* u, int64_t K, V* rows) {
    // Fetches the weights of the next block into the cache while this one is computed.
    if constexpr (K_ > 0 && N == R) {
#pragma GCC unroll 16
      for (int n = 0; n < N * K_ * static_cast<int>(sizeof(T)); n += 64) {
        __builtin_prefetch(reinterpret_cast<const char*>(w + N * K_) + n);
      }
    }
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) rows[n] = V{};
    if constexpr (K_ > 0) {
#pragma GCC unroll 16
      for (int k = 0; k < K_; ++k) {
        const V uk = load<L>(u + k * L);
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) rows[n] += uk * w[n * K_ + k];
      }
    } else {
      for (int64_t k = 0; k < K; ++k) {
        const V uk = load<L>(u + k * L);
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) rows[n] += uk * w[n * K + k];
      }
    }
  }

  // Clears the lanes for which valid [L] is 0. Does nothing if `valid` is null.
  template <int N>
  static CAPSFAST_INLINE void keep_valid(const T* valid, V* rows) {
    if (valid == nullptr) return;
    const V ok = load<L>(valid);
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) rows[n] = ok > V{} ? rows[n] : V{};
  }

  template <int N>
  static CAPSFAST_INLINE void votes_stored(const T* w, const T* u, const T* valid, int64_t K, T* x) {
    V rows[N];
    votes_block<N>(w, u, K, rows);
    keep_valid<N>(valid, rows);
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) store<L>(x + n * L, rows[n]);
  }

  // x[row] = w[row] . u. w [rows][K], u [K][L], x [rows][L]. Masked lanes become 0 even if the weight holds NaN.
  static CAPSFAST_INLINE void votes(const T* w, const T* u, const T* valid, int64_t K, int64_t rows, T* x) {
    int64_t row = 0;
    for (; row + R <= rows; row += R) votes_stored<R>(w + row * K, u, valid, K, x + row * L);
    if (row == rows) return;
    if (rows >= R) {  // the last R rows as a full block; some of them are computed a second time
      row = rows - R;
      votes_stored<R>(w + row * K, u, valid, K, x + row * L);
      return;
    }
    for (; row + 4 <= rows; row += 4) votes_stored<4>(w + row * K, u, valid, K, x + row * L);
    for (; row < rows; ++row) votes_stored<1>(w + row * K, u, valid, K, x + row * L);
  }

  // Computes the votes of `outputs` output capsules and, for each of `sets` arrays p[set] [outputs D][L], the dot
  // products out[set][j] = votes[j] . p[set][j]. If D is a multiple of R these are taken from registers, and votes are
  // stored only if x is not null. Else votes are stored to x or, if x is null, to `spare`; both are [outputs D][L].
  static CAPSFAST_INLINE void scored_votes(const T* w, const T* u, const T* valid, int64_t K, int64_t outputs,
                                           int64_t D, T* x, T* spare, int64_t sets, const T* const* p, T* const* out) {
    if (D % R != 0) {
      T* votes_at = x != nullptr ? x : spare;
      votes(w, u, valid, K, outputs * D, votes_at);
      for (int64_t set = 0; set < sets; ++set) {
        for (int64_t j = 0; j < outputs; ++j)
          store<L>(out[set] + j * L, dot(votes_at + j * D * L, p[set] + j * D * L, D));
      }
      return;
    }
    for (int64_t j = 0; j < outputs; ++j) {
      for (int64_t d = 0; d < D; d += R) {
        const int64_t row = j * D + d;
        V rows[R];
        votes_block<R>(w + row * K, u, K, rows);
        keep_valid<R>(valid, rows);
        for (int64_t set = 0; set < sets; ++set) {
          const T* q = p[set] + row * L;
          V even = d == 0 ? V{} : load<L>(out[set] + j * L), odd = V{};
#pragma GCC unroll 16
          for (int n = 0; n < R; n += 2) {
            even += rows[n] * load<L>(q + n * L);
            odd += rows[n + 1] * load<L>(q + (n + 1) * L);
          }
          store<L>(out[set] + j * L, even + odd);
        }
        if (x == nullptr) continue;
#pragma GCC unroll 16
        for (int n = 0; n < R; ++n) store<L>(x + (row + n) * L, rows[n]);
      }
    }
  }

  // The sum of x[d] p[d] over d < n, in four chains, which hide the latency of the additions.
  static CAPSFAST_INLINE V dot(const T* x, const T* p, int64_t n) {
    V a[4] = {V{}, V{}, V{}, V{}};
    int64_t d = 0;
    for (; d + 4 <= n; d += 4) {
#pragma GCC unroll 4
      for (int c = 0; c < 4; ++c) a[c] += load<L>(x + (d + c) * L) * load<L>(p + (d + c) * L);
    }
    for (; d < n; ++d) a[0] += load<L>(x + d * L) * load<L>(p + d * L);
    return (a[0] + a[1]) + (a[2] + a[3]);
  }

  // y[d] += c x[d] for d < n
  static CAPSFAST_INLINE void add_scaled(V c, const T* x, int64_t n, T* y) {
#pragma GCC unroll 4
    for (int64_t d = 0; d < n; ++d) store<L>(y + d * L, load<L>(y + d * L) + c * load<L>(x + d * L));
  }

  // Transposes from[l] [count] of each sample l < samples to `to` [count][L]. Lanes from `samples` on become 0.
  static void interleave(const T* const* from, int64_t samples, int64_t count, T* to) {
    int64_t n = 0;
    for (; n + L <= count; n += L) {
      V m[L];
#pragma GCC unroll 16
      for (int l = 0; l < L; ++l) m[l] = l < samples ? load<L>(from[l] + n) : V{};
      transpose<T, L>(m);
#pragma GCC unroll 16
      for (int l = 0; l < L; ++l) store<L>(to + (n + l) * L, m[l]);
    }
    for (; n < count; ++n) {
      for (int l = 0; l < L; ++l) to[n * L + l] = l < samples ? from[l][n] : T(0);
    }
  }

  // The opposite of interleave().
  static void deinterleave(const T* from, int64_t samples, int64_t count, T* const* to) {
    int64_t n = 0;
    for (; n + L <= count; n += L) {
      V m[L];
#pragma GCC unroll 16
      for (int l = 0; l < L; ++l) m[l] = load<L>(from + (n + l) * L);
      transpose<T, L>(m);
      for (int64_t l = 0; l < samples; ++l) store<L>(to[l] + n, m[l]);
    }
    for (; n < count; ++n) {
      for (int64_t l = 0; l < samples; ++l) to[l][n] = from[n * L + l];
    }
  }

  // Copies [b0, b0 + samples) x [i0, i0 + n1) x [0, n2) of a [B, I, n2] tensor to lanes, `to` [n1][n2][L]. If it is not
  // contiguous and of type T it is first copied to `buffer` [L][n1][n2].
  static void pack(const View& view, int64_t b0, int64_t samples, int64_t i0, int64_t n1, int64_t n2, T* buffer,
                   T* to) {
    const int64_t n[3] = {1, n1, n2}, s[3] = {0, view.stride[1], view.stride[2]};
    const T* from[L] = {};
    for (int64_t l = 0; l < samples; ++l) {
      const int64_t offset = (b0 + l) * view.stride[0] + i0 * view.stride[1];
      if (is_run<T>(view, n, s)) {
        from[l] = static_cast<const T*>(view.data) + offset;
      } else {
        gather<T>(view, offset, n, s, buffer + l * n1 * n2);
        from[l] = buffer + l * n1 * n2;
      }
    }
    interleave(from, samples, n1 * n2, to);
  }

  // The opposite of pack().
  static void unpack(const T* from, int64_t b0, int64_t samples, int64_t i0, int64_t n1, int64_t n2, T* buffer,
                     const View& view) {
    const int64_t n[3] = {1, n1, n2}, s[3] = {0, view.stride[1], view.stride[2]};
    const bool run = is_run<T>(view, n, s);
    T* to[L] = {};
    for (int64_t l = 0; l < samples; ++l) {
      const int64_t offset = (b0 + l) * view.stride[0] + i0 * view.stride[1];
      to[l] = run ? static_cast<T*>(view.data) + offset : buffer + l * n1 * n2;
    }
    deinterleave(from, samples, n1 * n2, to);
    if (run) return;
    for (int64_t l = 0; l < samples; ++l) {
      scatter<T>(view, (b0 + l) * view.stride[0] + i0 * view.stride[1], n, s, to[l]);
    }
  }

  // Copies the poses of a chunk to u [chunk][K][L], with zeros for masked capsules. If there is a mask it is copied to
  // valid [chunk][L] as 1 or 0.
  static void pack_poses(const Problem& p, int64_t b0, int64_t samples, int64_t i0, int64_t count, T* buffer, T* u,
                         T* valid) {
    pack(p.u, b0, samples, i0, count, p.K, buffer, u);
    if (p.mask.data == nullptr) return;
    for (int64_t i = 0; i < count; ++i) {
      for (int l = 0; l < L; ++l) valid[i * L + l] = l < samples && p.mask.at(b0 + l, i0 + i) ? T(1) : T(0);
      const V ok = load<L>(valid + i * L);
      for (int64_t k = 0; k < p.K; ++k) {
        T* uk = u + (i * p.K + k) * L;
        store<L>(uk, ok > V{} ? load<L>(uk) : V{});
      }
    }
  }

  // Copies the logits of a chunk: to [chunk][J][L] if they differ between samples, else to [chunk][J].
  static void pack_logits(const Problem& p, int64_t b0, int64_t samples, int64_t i0, int64_t count, T* buffer, T* to) {
    if (p.logits.stride[0] != 0) {
      pack(p.logits, b0, samples, i0, count, p.J, buffer, to);
      return;
    }
    gather<T>(p.logits, i0 * p.logits.stride[1], {1, count, p.J}, {0, p.logits.stride[1], p.logits.stride[2]}, to);
  }

  // If `out`, writes lanes [J][L] of input capsule i to `view` [B, I, J]. Else adds `view` to them.
  template <bool out>
  static void transfer(const View& view, int64_t b0, int64_t samples, int64_t i, int64_t J, T* lanes) {
    for (int64_t l = 0; l < samples; ++l) {
      int64_t at = (b0 + l) * view.stride[0] + i * view.stride[1];
      for (int64_t j = 0; j < J; ++j, at += view.stride[2]) {
        if constexpr (out) {
          write<T>(view, at, lanes[j * L + l]);
        } else {
          lanes[j * L + l] += read<T>(view, at);
        }
      }
    }
  }

  // The weights [J D K] of `count` input capsules, *pitch elements apart (0 if shared): in place if they are contiguous
  // and of type T, else copied to `buffer`.
  static const T* weight_chunk(const Problem& p, int64_t i0, int64_t count, T* buffer, int64_t* pitch) {
    const View& w = p.weight;
    const int64_t n[3] = {p.J, p.D, p.K}, s[3] = {w.stride[1], w.stride[2], w.stride[3]};
    if (is_run<T>(w, n, s)) {
      *pitch = w.stride[0];
      return static_cast<const T*>(w.data) + i0 * w.stride[0];
    }
    *pitch = w.stride[0] == 0 ? 0 : p.J * p.D * p.K;
    for (int64_t i = 0; i < (*pitch == 0 ? 1 : count); ++i) {
      gather<T>(w, (i0 + i) * w.stride[0], n, s, buffer + i * *pitch);
    }
    return buffer;
  }
};
