// The reducing passes in the rows layout: sum_i c votes (forward), sum_i db votes (backward).

template <class T, int L_, int NV, bool votes_given>
struct RowsReduce {
  using B_ = Rows<T, L_, NV, votes_given>;
  using V = typename B_::V;
  static constexpr int L = L_;

  // A new maximum over the input capsules rescales what was added up before.
  static CAPSFAST_INLINE void online(const ReducePass<T>& pass, int64_t b, int64_t width, T* scores, T* chunk_sum) {
    const Problem& p = *pass.problem;
    const int64_t M = p.D * p.K;
    for (int64_t j0 = 0; j0 < width; j0 += L) {
      T* max_of = pass.max + b * width + j0;
      T* norm_of = pass.norm + b * width + j0;
      const V x = load<L>(scores + j0), before = load<L>(max_of), now = max(before, x);
      V norm = load<L>(norm_of);
      if (any_different<T, L>(before, now)) {
        const V scale = exp<L>(before - now);
        norm = norm * scale;
        store<L>(max_of, now);
        const int64_t end = j0 + L < p.J ? j0 + L : p.J;
        for (int64_t j = j0; j < end; ++j) {
          const T factor = scale[j - j0];
          for (int64_t m = 0; m < M; ++m) chunk_sum[j * M + m] *= factor;
          T* total = pass.sum + (b * p.J + j) * p.D;
          for (int64_t d = 0; d < p.D; ++d) total[d] *= factor;
        }
      }
      const V e = exp<L>(x - now);
      store<L>(scores + j0, e);
      store<L>(norm_of, norm + e);
    }
  }

  static CAPSFAST_INLINE void capsule(const ReducePass<T>& pass, const RowsReduceScratch<T>& at, const T* w, const T* u, int64_t b, int64_t sample, int64_t i) {
    const Problem& p = *pass.problem;
    const int64_t J = p.J, M = p.D * p.K, width = (J + L - 1) / L * L;
    const bool online_softmax = p.softmax_in && pass.lse == nullptr;
    T* chunk_sum = at.sum + sample * J * M;
    if (pass.unweighted) {
      for (int64_t j = 0; j < J; ++j) at.scores[j] = 1;
      B_::add_scaled(at.scores, w, u, J, M, chunk_sum);
      return;
    }
    if (pass.V == nullptr) {
      for (int64_t j = 0; j < J; ++j) at.scores[j] = 0;
    } else {
      B_::dots(w, u, at.V + sample * J * M, J, M, at.scores);
    }
    B_::add_prior(p, b, i, pass.valid_out == nullptr ? nullptr : pass.valid_out + b * width, width, at.scores);
    if (!p.softmax_in) {
      B_::softmax_out(width, p.leaky, at.scores);
    } else if (pass.lse != nullptr) {
      B_::softmax_in(width, pass.lse + b * width, at.scores);
    }
    if (pass.coupling.data != nullptr) {
      const View& c = pass.coupling;
      for (int64_t j = 0; j < J; ++j) write<T>(c, b * c.stride[0] + i * c.stride[1] + j * c.stride[2], at.scores[j]);
    }
    if (online_softmax) online(pass, b, width, at.scores, chunk_sum);
    if (pass.sum == nullptr) return;
    if (pass.ds == nullptr) return B_::add_scaled(at.scores, w, u, J, M, chunk_sum);
    B_::dots(w, u, at.ds + sample * J * M, J, M, at.dc);
    if (pass.dcoupling.data != nullptr) {
      B_::add_from(pass.dcoupling, b * pass.dcoupling.stride[0] + i * pass.dcoupling.stride[1], J, at.dc);
    }
    B_::softmax_backward(width, at.scores, pass.c_dc == nullptr ? nullptr : pass.c_dc + b * width, at.dc);
    B_::add_scaled(at.dc, w, u, J, M, chunk_sum);
  }

  static void run(const ReducePass<T>& pass, const Range& range, T* scratch) {
    const Problem& p = *pass.problem;
    const int64_t J = p.J, JD = J * p.D, JM = JD * p.K;
    const RowsReduceScratch<T> at(p, *pass.plan, scratch);
    // Votes differ between samples: one at a time. A weight row serves all samples while it is in L1.
    const int64_t step = votes_given ? 1 : range.tile1 - range.tile0;
    for (int64_t b0 = range.tile0; b0 < range.tile1; b0 += step) {
      for (int64_t n = 0; n < step; ++n) {
        if (pass.V != nullptr) B_::spread(pass.V + (b0 + n) * JD, JD, p.K, at.V + n * JM);
        if (pass.ds != nullptr) B_::spread(pass.ds + (b0 + n) * JD, JD, p.K, at.ds + n * JM);
      }
      for (int64_t i0 = range.i0; i0 < range.i1; i0 += pass.plan->chunk) {
        const int64_t i1 = i0 + pass.plan->chunk < range.i1 ? i0 + pass.plan->chunk : range.i1;
        // Summed per chunk first: the error then grows with the number of chunks, not of capsules.
        __builtin_memset(at.sum, 0, static_cast<size_t>(step * JM) * sizeof(T));
        for (int64_t i = i0; i < i1; ++i) {
          const T* w = B_::row(p, b0, i, at.row);
          for (int64_t n = 0; n < step; ++n) {
            B_::pose(p, b0 + n, i, at.pose, at.u);
            capsule(pass, at, w, at.u, b0 + n, n, i);
          }
        }
        if (pass.sum == nullptr) continue;
        for (int64_t n = 0; n < step; ++n) B_::fold(at.sum + n * JM, JD, p.K, pass.sum + (b0 + n) * JD);
      }
    }
  }
};
