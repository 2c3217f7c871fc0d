// The accumulate passes in the lanes layout: sum_i c votes (forward), sum_i db votes (backward).
//
// A chunk of weights is read once for all tiles of samples. If the votes of all J output capsules fit the cache
// (plan.out_tile >= J) they are made once, scored and added up. Else a first sweep over tiles of output capsules keeps
// only the scores [chunk][J], and a second sweep makes the votes again and adds them up.
// A chunk's sums of one tile of output capsules join those of the pass before the next tile begins, while they are in
// L1.

template <class T, int K_>
struct LanesAccumulate {
  using B_ = Lanes<T, K_>;
  using V = typename B_::V;
  static constexpr int L = B_::L;

  // A chunk of input capsules of one tile of samples: tile t, samples [b0, b0 + samples), input capsules [i0, i0 +
  // count). The pointers are those of AccumulatePass at tile t. weights: [J D K] of each input capsule, `pitch` elements
  // apart.
  struct Tile {
    int64_t t, b0, samples, i0, count;
    const T *V_t, *ds, *valid_out, *in_max, *in_scale, *c_dc;
    const T* weights;
    int64_t pitch;
  };

  static CAPSFAST_INLINE const T* valid(const AccumulatePass<T>& pass, const LanesAccumulateScratch<T>& at, int64_t i) {
    return pass.problem->mask.data == nullptr ? nullptr : at.valid + i * L;
  }

  // Makes the votes of input capsule i for output capsules [j0, j1) and stores them to x unless it is null. Writes
  // their dot products with V to b [J][L] and, in the backward, with ds to dc [J][L].
  static CAPSFAST_INLINE void score(const AccumulatePass<T>& pass, const Tile& tile,
                                    const LanesAccumulateScratch<T>& at, int64_t i, int64_t j0, int64_t j1, T* x, T* b,
                                    T* dc) {
    const int64_t D = pass.problem->D, K = K_ > 0 ? K_ : pass.problem->K;
    const T* p[2];
    T* out[2];
    int64_t sets = 0;
    if (tile.V_t != nullptr) {
      p[sets] = tile.V_t + j0 * D * L;
      out[sets++] = b + j0 * L;
    } else {
      __builtin_memset(b + j0 * L, 0, static_cast<size_t>((j1 - j0) * L) * sizeof(T));
    }
    if (pass.ds != nullptr) {
      p[sets] = tile.ds + j0 * D * L;
      out[sets++] = dc + j0 * L;
    }
    const T* w = tile.weights + i * tile.pitch + j0 * D * K;
    B_::scored_votes(w, at.u + i * K * L, valid(pass, at, i), K, j1 - j0, D, x, at.x, sets, p, out);
  }

  // Turns scores into the coefficients of the sum: b becomes c and, in the backward, dc becomes db. With the softmax
  // over the input capsules in the forward, b stays the logits, and online() or chunk_online() goes on from there.
  static CAPSFAST_INLINE void coefficients(const AccumulatePass<T>& pass, const Tile& tile,
                                           const LanesAccumulateScratch<T>& at, int64_t i, T* b, T* dc) {
    const Problem& p = *pass.problem;
    const int64_t J = p.J;
    const bool sample_logits = p.logits.stride[0] != 0;
    const T* logits = p.logits.data == nullptr ? nullptr : at.logits + i * J * (sample_logits ? L : 1);
    B_::add_prior(
        sample_logits ? nullptr : logits, sample_logits ? logits : nullptr, valid(pass, at, i), tile.valid_out, J, b);
    if (!p.softmax_in) {
      B_::softmax_out(J, p.leaky, b);
    } else if (tile.in_max != nullptr) {
      B_::softmax_in(J, tile.in_max, tile.in_scale, b);
    }
    if (pass.coupling.data != nullptr)
      B_::template transfer<true>(pass.coupling, tile.b0, tile.samples, tile.i0 + i, J, b);
    if (pass.ds == nullptr) return;
    if (pass.dcoupling.data != nullptr)
      B_::template transfer<false>(pass.dcoupling, tile.b0, tile.samples, tile.i0 + i, J, dc);
    B_::softmax_backward(J, b, tile.c_dc, dc);
  }

  // After the maximum of output capsule j has grown: multiplies all that was added up before by `scale`.
  static void rescale(const AccumulatePass<T>& pass, const Tile& tile, int64_t j, V scale, T* chunk_sum) {
    const int64_t J = pass.problem->J, D = pass.problem->D;
    const int64_t scalar = (tile.t * J + j) * L, vector = (tile.t * J + j) * D * L;
    store<L>(pass.norm + scalar, load<L>(pass.norm + scalar) * scale);
    store<L>(pass.norm_low + scalar, load<L>(pass.norm_low + scalar) * scale);
    for (int64_t d = 0; d < D * L; d += L) {
      store<L>(pass.sum + vector + d, load<L>(pass.sum + vector + d) * scale);
      store<L>(pass.low + vector + d, load<L>(pass.low + vector + d) * scale);
      if (chunk_sum != nullptr) store<L>(chunk_sum + j * D * L + d, load<L>(chunk_sum + j * D * L + d) * scale);
    }
  }

  // Softmax over the input capsules, for one of them: replaces scores [J][L] by exp(b - max), max the largest so far.
  static CAPSFAST_INLINE void online(const AccumulatePass<T>& pass, const Tile& tile,
                                     const LanesAccumulateScratch<T>& at) {
    const int64_t J = pass.problem->J;
    T* max_of = pass.max + tile.t * J * L;
    for (int64_t j = 0; j < J; ++j) {
      const V x = load<L>(at.scores + j * L), before = load<L>(max_of + j * L);
      const V now = max(before, x);
      V norm = load<L>(at.norm + j * L);
      if (any_different<T, L>(before, now)) {
        const V scale = exp<L>(before - now);
        norm = norm * scale;
        store<L>(max_of + j * L, now);
        rescale(pass, tile, j, scale, at.sum);
      }
      const V e = exp<L>(x - now);
      store<L>(at.scores + j * L, e);
      store<L>(at.norm + j * L, norm + e);
    }
  }

  // As online(), for the scores of a whole chunk. Sums are rescaled once, for its maximum.
  static void chunk_online(const AccumulatePass<T>& pass, const Tile& tile, const LanesAccumulateScratch<T>& at) {
    const int64_t J = pass.problem->J;
    T* max_of = pass.max + tile.t * J * L;
    for (int64_t j = 0; j < J; ++j) {
      const V before = load<L>(max_of + j * L);
      V now = before;
      for (int64_t i = 0; i < tile.count; ++i) now = max(now, load<L>(at.scores + (i * J + j) * L));
      if (any_different<T, L>(before, now)) rescale(pass, tile, j, exp<L>(before - now), nullptr);
      V norm = V{};
      for (int64_t i = 0; i < tile.count; ++i) {
        T* b = at.scores + (i * J + j) * L;
        const V e = exp<L>(load<L>(b) - now);
        store<L>(b, e);
        norm += e;
      }
      store<L>(max_of + j * L, now);
      store<L>(at.norm + j * L, norm);
    }
  }

  static void chunk(const AccumulatePass<T>& pass, const Tile& tile, const LanesAccumulateScratch<T>& at) {
    const Problem& p = *pass.problem;
    const int64_t J = p.J, D = p.D, K = K_ > 0 ? K_ : p.K;
    const bool online_softmax = p.softmax_in && tile.in_max == nullptr;
    const int64_t held = pass.plan->out_tile;
    const T* coefficient = pass.ds != nullptr ? at.dc : at.scores;
    if (held >= J) {
      clear_sum(at, J * D);
      for (int64_t i = 0; i < tile.count; ++i) {
        score(pass, tile, at, i, 0, J, at.x, at.scores, at.dc);
        coefficients(pass, tile, at, i, at.scores, at.dc);
        if (online_softmax) online(pass, tile, at);
        if (pass.sum == nullptr) continue;
        for (int64_t j = 0; j < J; ++j) {
          B_::add_scaled(load<L>(coefficient + j * L), at.x + j * D * L, D, at.sum + j * D * L);
        }
      }
      if (pass.sum != nullptr) join_sum(pass, tile, at, 0, J * D);
      return;
    }
    for (int64_t j0 = 0; j0 < J; j0 += held) {
      const int64_t j1 = j0 + held < J ? j0 + held : J;
      for (int64_t i = 0; i < tile.count; ++i) {
        score(pass, tile, at, i, j0, j1, nullptr, at.scores + i * J * L, at.dc + i * J * L);
      }
    }
    for (int64_t i = 0; i < tile.count; ++i) {
      coefficients(pass, tile, at, i, at.scores + i * J * L, at.dc + i * J * L);
    }
    if (online_softmax) chunk_online(pass, tile, at);
    if (pass.sum == nullptr) return;
    for (int64_t j0 = 0; j0 < J; j0 += held) {
      const int64_t j1 = j0 + held < J ? j0 + held : J;
      clear_sum(at, (j1 - j0) * D);
      for (int64_t i = 0; i < tile.count; ++i) {
        B_::votes(
            tile.weights + i * tile.pitch + j0 * D * K, at.u + i * K * L, valid(pass, at, i), K, (j1 - j0) * D, at.x);
        for (int64_t j = j0; j < j1; ++j) {
          const int64_t at_j = (j - j0) * D * L;
          B_::add_scaled(load<L>(coefficient + (i * J + j) * L), at.x + at_j, D, at.sum + at_j);
        }
      }
      join_sum(pass, tile, at, j0 * D, (j1 - j0) * D);
    }
  }

  // In the first iteration without logits all coefficients are the same, so the pass is a matrix product. A block of N
  // rows (j, d) stays in registers over the whole chunk.
  template <int N>
  static CAPSFAST_INLINE void plain_block(const Tile& tile, const T* u, int64_t K, int64_t row, T* sum) {
    V rows[N];
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) rows[n] = V{};
    for (int64_t i = 0; i < tile.count; ++i) {
      const T* w = tile.weights + i * tile.pitch + row * K;
      if constexpr (K_ == 0) {
        B_::template add_products<N, 4>(w, u + i * K * L, 0, K, rows);
        continue;
      }
      for (int64_t k = 0; k < K; ++k) {
        const V uk = load<L>(u + (i * K + k) * L);
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) rows[n] += uk * w[n * K + k];
      }
    }
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) store<L>(sum + (row + n) * L, rows[n]);
  }

  static void plain_rows(const Tile& tile, const T* u, int64_t K_given, int64_t rows, T* sum) {
    const int64_t K = K_ > 0 ? K_ : K_given;
    constexpr int R = B_::R;
    int64_t row = 0;
    for (; row + R <= rows; row += R) plain_block<R>(tile, u, K, row, sum);
    if (row < rows && rows >= R) return plain_block<R>(tile, u, K, rows - R, sum);
    for (; row < rows; ++row) plain_block<1>(tile, u, K, row, sum);
  }

  static void plain(const AccumulatePass<T>& pass, const Tile& tile, const LanesAccumulateScratch<T>& at) {
    const int64_t K = K_ > 0 ? K_ : pass.problem->K, rows = pass.problem->J * pass.problem->D;
    const int64_t some = pass.plan->out_tile * pass.problem->D;
    Tile part = tile;
    for (int64_t row = 0; row < rows; row += some) {
      const int64_t count = row + some < rows ? some : rows - row;
      part.weights = tile.weights + row * K;
      plain_rows(part, at.u, K, count, at.sum);
      join_sum(pass, tile, at, row, count);
    }
  }

  // Adds the sums of a chunk, from [rows][L], to those of the pass, high + low.
  static void join(const T* from, int64_t rows, T* high, T* low) {
    for (int64_t n = 0; n < rows * L; n += L) {
      V h = load<L>(high + n), l = load<L>(low + n);
      add_exactly(load<L>(from + n), &h, &l);
      store<L>(high + n, h);
      store<L>(low + n, l);
    }
  }

  static void clear_sum(const LanesAccumulateScratch<T>& at, int64_t rows) {
    __builtin_memset(at.sum, 0, static_cast<size_t>(rows * L) * sizeof(T));
  }

  // at.sum holds `rows` rows of the tile, from `row` on.
  static void join_sum(const AccumulatePass<T>& pass, const Tile& tile, const LanesAccumulateScratch<T>& at,
                       int64_t row, int64_t rows) {
    const int64_t to = (tile.t * pass.problem->J * pass.problem->D + row) * L;
    join(at.sum, rows, pass.sum + to, pass.low + to);
  }

  static void run(const AccumulatePass<T>& pass, const Range& range, T* scratch) {
    const Problem& p = *pass.problem;
    const int64_t J = p.J, JD = p.J * p.D;
    const LanesAccumulateScratch<T> at(p, *pass.plan, scratch);
    for (int64_t i0 = range.i0; i0 < range.i1; i0 += pass.plan->chunk) {
      Tile tile{};
      tile.i0 = i0;
      tile.count = i0 + pass.plan->chunk < range.i1 ? pass.plan->chunk : range.i1 - i0;
      tile.weights = B_::weight_chunk(p, i0, tile.count, at.weights, &tile.pitch);
      for (int64_t t = range.tile0; t < range.tile1; ++t) {
        tile.t = t;
        tile.b0 = t * L;
        tile.samples = tile.b0 + L < p.B ? L : p.B - tile.b0;
        tile.V_t = pass.V == nullptr ? nullptr : pass.V + t * JD * L;
        tile.ds = pass.ds == nullptr ? nullptr : pass.ds + t * JD * L;
        tile.valid_out = pass.valid_out == nullptr ? nullptr : pass.valid_out + t * J * L;
        tile.in_max = pass.in_max == nullptr ? nullptr : pass.in_max + t * J * L;
        tile.in_scale = pass.in_max == nullptr ? nullptr : pass.in_scale + t * J * L;
        tile.c_dc = pass.c_dc == nullptr ? nullptr : pass.c_dc + t * J * L;
        B_::pack_poses(p, tile.b0, tile.samples, i0, tile.count, at.buffer, at.u, at.valid);
        if (p.logits.data != nullptr) B_::pack_logits(p, tile.b0, tile.samples, i0, tile.count, at.buffer, at.logits);
        if (pass.unweighted) {
          plain(pass, tile, at);
        } else {
          __builtin_memset(at.norm, 0, static_cast<size_t>(J * L) * sizeof(T));
          chunk(pass, tile, at);
          if (p.softmax_in && tile.in_max == nullptr)
            join(at.norm, J, pass.norm + t * J * L, pass.norm_low + t * J * L);
        }
      }
    }
  }
};
