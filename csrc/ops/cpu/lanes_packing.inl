// Tensors to lanes and back: what the passes read and write besides weights, whatever K is.

template <class T>
struct LanesPacking {
  static constexpr int L = kLanes<T>;
  using V = Vec<T, L>;

  // Transposes from[l] [count] of each sample l < samples to `to` [count][L]. Lanes from `samples` on become 0.
  static CAPSFAST_ONCE void interleave(const T* const* from, int64_t samples, int64_t count, T* to) {
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
  static CAPSFAST_ONCE void deinterleave(const T* from, int64_t samples, int64_t count, T* const* to) {
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
  static CAPSFAST_ONCE void pack(const View& view, int64_t b0, int64_t samples, int64_t i0, int64_t n1, int64_t n2,
                                 T* buffer, T* to) {
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
  static CAPSFAST_ONCE void unpack(const T* from, int64_t b0, int64_t samples, int64_t i0, int64_t n1, int64_t n2,
                                   T* buffer, const View& view) {
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

  // Samples of a tensor [B, n1, n2] to lanes [n1][n2][L], and back.
  static void load_samples(const View& view, int64_t b0, int64_t samples, int64_t n1, int64_t n2, T* buffer, T* to) {
    pack(view, b0, samples, 0, n1, n2, buffer, to);
  }
  static void store_samples(const T* from, int64_t b0, int64_t samples, int64_t n1, int64_t n2, T* buffer,
                            const View& view) {
    unpack(from, b0, samples, 0, n1, n2, buffer, view);
  }

  // Copies the poses of a chunk to u [chunk][K][L], with zeros for masked capsules. If there is a mask it is copied to
  // valid [chunk][L] as 1 or 0.
  static CAPSFAST_ONCE void pack_poses(const Problem& p, int64_t b0, int64_t samples, int64_t i0, int64_t count,
                                       T* buffer, T* u, T* valid) {
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
  static CAPSFAST_ONCE void pack_logits(const Problem& p, int64_t b0, int64_t samples, int64_t i0, int64_t count,
                                        T* buffer, T* to) {
    if (p.logits.stride[0] != 0) {
      pack(p.logits, b0, samples, i0, count, p.J, buffer, to);
      return;
    }
    gather<T>(p.logits, i0 * p.logits.stride[1], {1, count, p.J}, {0, p.logits.stride[1], p.logits.stride[2]}, to);
  }

  // Copies numbers [B, I] of a chunk to lanes, `to` [chunk][L], 0 for masked capsules. Nothing if there are none.
  static CAPSFAST_ONCE void pack_numbers(const View& view, const Problem& p, int64_t b0, int64_t samples, int64_t i0,
                                         int64_t count, T* to) {
    if (view.data == nullptr) return;
    for (int64_t l = 0; l < L; ++l) {
      for (int64_t i = 0; i < count; ++i) {
        const bool valid = l < samples && (p.mask.data == nullptr || p.mask.at(b0 + l, i0 + i));
        to[i * L + l] = valid ? read<T>(view, (b0 + l) * view.stride[0] + (i0 + i) * view.stride[1]) : T(0);
      }
    }
  }

  // Writes the number of each sample of input capsule i to `view` [B, I].
  static CAPSFAST_ONCE void put(const View& view, int64_t b0, int64_t samples, int64_t i, const T* lanes) {
    for (int64_t l = 0; l < samples; ++l) write<T>(view, (b0 + l) * view.stride[0] + i * view.stride[1], lanes[l]);
  }

  // If `out`, writes lanes [J][L] of input capsule i to `view` [B, I, J]. Else adds `view` to them.
  template <bool out>
  static CAPSFAST_ONCE void transfer(const View& view, int64_t b0, int64_t samples, int64_t i, int64_t J, T* lanes) {
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
  static CAPSFAST_ONCE const T* weight_chunk(const Problem& p, int64_t i0, int64_t count, T* buffer, int64_t* pitch) {
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
