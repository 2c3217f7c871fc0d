// The reducing passes in the rows layout: sum_i c votes (forward), sum_i db votes (backward).

template <class T, int L_, int NV, Pose kind>
struct RowsReduce {
  using B_ = Rows<T, L_, NV, kind>;
  using V = typename B_::V;
  static constexpr int L = L_;
  static constexpr bool votes_given = kind == Pose::none;

  // L input capsules at most, of one sample; `sample` counts from the first of the task's step.
  struct Block {
    int64_t b, sample, i0, count;
    const T* const* w;
    const T* u;
  };

  // A new maximum over the input capsules rescales what was added up before.
  static void online(const ReducePass<T>& pass, const Block& block, T* scores, T* chunk_sum, T* chunk_norm) {
    const Problem& p = *pass.problem;
    const int64_t M = p.D * p.K;
    for (int64_t j = 0; j < p.J; ++j) {
      T& highest = pass.max[block.b * p.J + j];
      T& norm = chunk_norm[j];
      const V x = load<L>(scores + j * L);
      const T here = largest<T, L>(x), now = here > highest ? here : highest;
      if (now != highest) {
        const T factor = exp<L>(broadcast<L>(highest - now))[0];
        highest = now;
        norm *= factor;
        pass.norm[block.b * p.J + j] *= factor;
        pass.norm_low[block.b * p.J + j] *= factor;
        for (int64_t m = 0; m < M; ++m) chunk_sum[j * M + m] *= factor;
        const int64_t total = (block.b * p.J + j) * p.D;
        for (int64_t d = 0; d < p.D; ++d) {
          pass.sum[total + d] *= factor;
          pass.low[total + d] *= factor;
        }
      }
      const V e = exp<L>(x - now);
      store<L>(scores + j * L, e);
      norm += sum<T, L>(e);
    }
  }

  static void unweighted(const ReducePass<T>& pass, const RowsReduceScratch<T>& at, const Block& block) {
    const Problem& p = *pass.problem;
    const int64_t J = p.J, M = p.D * p.K;
    for (int64_t j = 0; j < J; ++j) at.scores[j * L] = 1;
    for (int64_t n = 0; n < block.count; ++n) {
      B_::add_scaled(at.scores, block.w[n], block.u + n * B_::kPitch(M), J, M, at.sum + block.sample * J * M);
    }
  }

  static void weighted(const ReducePass<T>& pass, const RowsReduceScratch<T>& at, const Block& block) {
    const Problem& p = *pass.problem;
    const int64_t J = p.J, M = p.D * p.K;
    T* chunk_sum = at.sum + block.sample * J * M;
    if (pass.V == nullptr) {
      __builtin_memset(at.scores, 0, static_cast<size_t>(J * L) * sizeof(T));
    } else {
      B_::dots(block.w, block.u, block.count, at.V + block.sample * J * M, J, M, at.scores);
    }
    B_::add_prior(p, block.b, block.i0, block.count, pass.valid_out == nullptr ? nullptr : pass.valid_out + block.b * J, at.scores);
    if (!p.softmax_in) {
      B_::softmax_out(J, p.leaky, at.scores);
    } else if (pass.in_max != nullptr) {
      B_::softmax_in(J, pass.in_max + block.b * J, pass.in_scale + block.b * J, at.scores);
    } else {
      online(pass, block, at.scores, chunk_sum, at.norm + block.sample * J);
    }
    if (pass.coupling.data != nullptr) B_::template transfer<true>(pass.coupling, block.b, block.i0, block.count, J, at.scores);
    if (pass.sum == nullptr) return;
    const T* coefficient = at.scores;
    if (pass.ds != nullptr) {
      B_::dots(block.w, block.u, block.count, at.ds + block.sample * J * M, J, M, at.dc);
      if (pass.dcoupling.data != nullptr) B_::template transfer<false>(pass.dcoupling, block.b, block.i0, block.count, J, at.dc);
      B_::softmax_backward(J, at.scores, pass.c_dc == nullptr ? nullptr : pass.c_dc + block.b * J, at.dc);
      coefficient = at.dc;
    }
    for (int64_t n = 0; n < block.count; ++n) {
      B_::add_scaled(coefficient + n, block.w[n], block.u + n * B_::kPitch(M), J, M, chunk_sum);
    }
  }

  static void run(const ReducePass<T>& pass, const Range& range, T* scratch) {
    const Problem& p = *pass.problem;
    const int64_t JD = p.J * p.D, JM = JD * p.K;
    const RowsReduceScratch<T> at(p, *pass.plan, scratch);
    // Votes differ between samples: one at a time. Weights serve all samples while they are near.
    const int64_t step = votes_given ? 1 : range.tile1 - range.tile0;
    for (int64_t b0 = range.tile0; b0 < range.tile1; b0 += step) {
      for (int64_t n = 0; n < step; ++n) {
        if (pass.V != nullptr) B_::spread(pass.V + (b0 + n) * JD, JD, p.K, at.V + n * JM);
        if (pass.ds != nullptr) B_::spread(pass.ds + (b0 + n) * JD, JD, p.K, at.ds + n * JM);
      }
      for (int64_t from = range.i0; from < range.i1; from += pass.plan->chunk) {
        const int64_t to = from + pass.plan->chunk < range.i1 ? from + pass.plan->chunk : range.i1;
        __builtin_memset(at.sum, 0, static_cast<size_t>(step * JM) * sizeof(T));
        __builtin_memset(at.norm, 0, static_cast<size_t>(step * p.J) * sizeof(T));
        for (int64_t i0 = from; i0 < to; i0 += L) {
          const T* w[L];
          Block block{b0, 0, i0, i0 + L < to ? L : to - i0, w, at.u};
          B_::rows(p, b0, i0, block.count, at.rows, w);
          for (int64_t n = 0; n < step; ++n) {
            block.b = b0 + n;
            block.sample = n;
            B_::poses(p, block.b, i0, block.count, at.pose, at.u);
            pass.unweighted ? unweighted(pass, at, block) : weighted(pass, at, block);
          }
        }
        if (pass.sum == nullptr) continue;
        for (int64_t n = 0; n < step; ++n) {
          B_::fold(at.sum + n * JM, JD, p.K, pass.sum + (b0 + n) * JD, pass.low + (b0 + n) * JD);
          if (pass.norm == nullptr) continue;
          B_::fold(at.norm + n * p.J, p.J, 1, pass.norm + (b0 + n) * p.J, pass.norm_low + (b0 + n) * p.J);
        }
      }
    }
  }
};
