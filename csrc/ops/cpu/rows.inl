// Building blocks of the rows layout: a vector holds L of the D components of one vote. The votes are in memory, as the
// input of route_votes or made by a small batch.
//
// L input capsules make a block. The dot products of one output capsule are L vectors, one for each input capsule,
// whose lanes are still to be added up. One call of sums() does that for all of them, and leaves the scores of the
// block as [J][L] with the input capsules in the lanes.

template <class T, int L_, int NV>
struct Rows : Coupling<T, L_> {
  static constexpr int L = L_;
  static constexpr int64_t kOutputs = 16;  // output capsules scored at a time: their partial sums stay in L1
  using V = Vec<T, L>;

  // Lanes [d, d + L) of the D numbers at p. If NV > 0, D is NV L; else the last vector may be partly filled.
  static CAPSFAST_INLINE V read_vector(const T* p, int64_t d, int64_t D) {
    if constexpr (NV > 0) return load<L>(p + d);
    return d + L <= D ? load<L>(p + d) : load_part<L>(p + d, D - d);
  }
  static CAPSFAST_INLINE void write_vector(T* p, V x, int64_t d, int64_t D) {
    if (NV > 0 || d + L <= D) {
      store<L>(p + d, x);
    } else {
      store_part<L>(p + d, x, D - d);
    }
  }

  // out[j][n] = votes[n][j] . p[j] for `count` input capsules n and all j. votes[n] and p are [J][D], out is [J][L],
  // part [kOutputs][L][L]. The votes of a capsule are read from end to end, which the prefetcher can follow.
  static CAPSFAST_INLINE void dots(const T* const* votes, int64_t count, const T* p, int64_t J, int64_t D_given,
                                   T* part, T* out) {
    const int64_t D = NV > 0 ? NV * L : D_given;
    for (int64_t j0 = 0; j0 < J; j0 += kOutputs) {
      const int64_t outputs = j0 + kOutputs < J ? kOutputs : J - j0;
      for (int64_t n = 0; n < count; ++n) {
        for (int64_t j = 0; j < outputs; ++j) {
          const T *x = votes[n] + (j0 + j) * D, *q = p + (j0 + j) * D;
          V a = V{};
#pragma GCC unroll 2
          for (int64_t d = 0; d < D; d += L) a += read_vector(x, d, D) * read_vector(q, d, D);
          store<L>(part + (j * L + n) * L, a);
        }
      }
      for (int64_t j = 0; j < outputs; ++j) {
        V m[L];
#pragma GCC unroll 16
        for (int n = 0; n < L; ++n) m[n] = n < count ? load<L>(part + (j * L + n) * L) : V{};
        store<L>(out + (j0 + j) * L, sums<T, L>(m));
      }
    }
  }

  // sum[j] += c[j L] votes[j] for all j, for one input capsule. c points to its lane of [J][L]; votes and sum are
  // [J][D].
  static CAPSFAST_INLINE void add_scaled(const T* c, const T* votes, int64_t J, int64_t D_given, T* sum) {
    const int64_t D = NV > 0 ? NV * L : D_given;
    for (int64_t j = 0; j < J; ++j) {
      const V cj = broadcast<L>(c[j * L]);
#pragma GCC unroll 2
      for (int64_t d = 0; d < D; d += L) {
        write_vector(sum + j * D, read_vector(sum + j * D, d, D) + cj * read_vector(votes + j * D, d, D), d, D);
      }
    }
  }

  // Adds from[n] to the sum high[n] + low[n], for n < count.
  static void join(const T* from, int64_t count, T* high, T* low) {
    for (int64_t n = 0; n < count; ++n) add_exactly(from[n], high + n, low + n);
  }

  // Adds the prior logits of input capsules [i0, i0 + count) of sample b to scores [J][L]. Masked entries and the lanes
  // from `count` on become -inf.
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

  // As in Coupling, but in_max and in_scale are [J].
  static void softmax_in(int64_t J, const T* in_max, const T* in_scale, T* scores) {
    for (int64_t j = 0; j < J; ++j) store<L>(scores + j * L, exp<L>(load<L>(scores + j * L) - in_max[j]) * in_scale[j]);
  }

  // As in Coupling, but c_dc is [J].
  static void softmax_backward(int64_t J, const T* c, const T* c_dc, T* dc) {
    if (c_dc == nullptr) return Coupling<T, L>::softmax_backward(J, c, nullptr, dc);
    for (int64_t j = 0; j < J; ++j) store<L>(dc + j * L, load<L>(c + j * L) * (load<L>(dc + j * L) - c_dc[j]));
  }

  // If `out`, writes lanes [J][L] of input capsules [i0, i0 + count) to `view` [B, I, J]. Else adds `view` to them.
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

  // Sets to[n] to the votes [J][D] of input capsule i0 + n: in place if they are a run of T, else copied to `buffer`
  // [L][J D]. Those of a masked capsule are zeros.
  static void rows(const Problem& p, int64_t b, int64_t i0, int64_t count, T* buffer, const T** to) {
    const View& view = p.votes;
    const int64_t size = p.J * p.D, n[3] = {1, p.J, p.D}, s[3] = {0, view.stride[2], view.stride[3]};
    const bool run = is_run<T>(view, n, s);
    for (int64_t c = 0; c < count; ++c, buffer += size) {
      const int64_t at = b * view.stride[0] + (i0 + c) * view.stride[1];
      to[c] = buffer;
      if (p.mask.data != nullptr && !p.mask.at(b, i0 + c)) {
        __builtin_memset(buffer, 0, static_cast<size_t>(size) * sizeof(T));
      } else if (run) {
        to[c] = static_cast<const T*>(view.data) + at;
      } else {
        gather<T>(view, at, n, s, buffer);
      }
    }
  }
};
