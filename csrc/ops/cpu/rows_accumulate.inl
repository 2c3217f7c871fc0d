// The accumulate passes in the rows layout: sum_i c votes (forward), sum_i db votes (backward).

template <class T, int L_, int NV>
struct RowsAccumulate {
  using B_ = Rows<T, L_, NV>;
  using V = typename B_::V;
  static constexpr int L = L_;

  // At most L input capsules of sample b. votes[n] points to the votes [J][D] of capsule i0 + n.
  struct Block {
    int64_t b, i0, count;
    const T* const* votes;
  };

  // Softmax over the input capsules: replaces scores [J][L] by exp(b - max), where max is the largest so far. If it
  // grows, all that was added up before is rescaled.
  static void online(const AccumulatePass<T>& pass, const Block& block, T* scores, T* chunk_sum, T* chunk_norm) {
    const Problem& p = *pass.problem;
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
        for (int64_t d = 0; d < p.D; ++d) chunk_sum[j * p.D + d] *= factor;
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

  static void unweighted(const AccumulatePass<T>& pass, const RowsAccumulateScratch<T>& at, const Block& block) {
    const int64_t J = pass.problem->J, D = pass.problem->D;
    for (int64_t j = 0; j < J; ++j) at.scores[j * L] = 1;
    for (int64_t n = 0; n < block.count; ++n) B_::add_scaled(at.scores, block.votes[n], J, D, at.sum);
  }

  static void weighted(const AccumulatePass<T>& pass, const RowsAccumulateScratch<T>& at, const Block& block) {
    const Problem& p = *pass.problem;
    const int64_t J = p.J, D = p.D;
    if (pass.V == nullptr) {
      __builtin_memset(at.scores, 0, static_cast<size_t>(J * L) * sizeof(T));
    } else {
      B_::dots(block.votes, block.count, pass.V + block.b * J * D, J, D, at.part, at.scores);
    }
    B_::add_prior(p, block.b, block.i0, block.count, pass.valid_out == nullptr ? nullptr : pass.valid_out + block.b * J,
                  at.scores);
    if (!p.softmax_in) {
      B_::softmax_out(J, p.leaky, at.scores);
    } else if (pass.in_max != nullptr) {
      B_::softmax_in(J, pass.in_max + block.b * J, pass.in_scale + block.b * J, at.scores);
    } else {
      online(pass, block, at.scores, at.sum, at.norm);
    }
    if (pass.coupling.data != nullptr)
      B_::template transfer<true>(pass.coupling, block.b, block.i0, block.count, J, at.scores);
    if (pass.sum == nullptr) return;
    const T* coefficient = at.scores;
    if (pass.ds != nullptr) {
      B_::dots(block.votes, block.count, pass.ds + block.b * J * D, J, D, at.part, at.dc);
      if (pass.dcoupling.data != nullptr)
        B_::template transfer<false>(pass.dcoupling, block.b, block.i0, block.count, J, at.dc);
      B_::softmax_backward(J, at.scores, pass.c_dc == nullptr ? nullptr : pass.c_dc + block.b * J, at.dc);
      coefficient = at.dc;
    }
    for (int64_t n = 0; n < block.count; ++n) B_::add_scaled(coefficient + n, block.votes[n], J, D, at.sum);
  }

  static void run(const AccumulatePass<T>& pass, const Range& range, T* scratch) {
    const Problem& p = *pass.problem;
    const int64_t JD = p.J * p.D;
    const RowsAccumulateScratch<T> at(p, *pass.plan, scratch);
    for (int64_t b = range.tile0; b < range.tile1; ++b) {
      for (int64_t from = range.i0; from < range.i1; from += pass.plan->chunk) {
        const int64_t to = from + pass.plan->chunk < range.i1 ? from + pass.plan->chunk : range.i1;
        __builtin_memset(at.sum, 0, static_cast<size_t>(JD) * sizeof(T));
        __builtin_memset(at.norm, 0, static_cast<size_t>(p.J) * sizeof(T));
        for (int64_t i0 = from; i0 < to; i0 += L) {
          const T* votes[L];
          const Block block{b, i0, i0 + L < to ? L : to - i0, votes};
          B_::rows(p, b, i0, block.count, at.rows, votes);
          pass.unweighted ? unweighted(pass, at, block) : weighted(pass, at, block);
        }
        if (pass.sum == nullptr) continue;
        B_::join(at.sum, JD, pass.sum + b * JD, pass.low + b * JD);
        if (pass.norm != nullptr) B_::join(at.norm, p.J, pass.norm + b * p.J, pass.norm_low + b * p.J);
      }
    }
  }
};
