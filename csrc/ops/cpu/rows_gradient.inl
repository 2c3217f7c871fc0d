// The gradient pass in the rows layout, all iterations at once. lanes_gradient.inl has the formulas.

template <class T, int L_, int NV>
struct RowsGradient {
  using B_ = Rows<T, L_, NV>;
  using V = typename B_::V;
  static constexpr int L = L_;

  struct Block {
    int64_t b, i0, count;
    const T* const* votes;
  };

  static void coefficients(const GradientPass<T>& pass, const RowsGradientScratch<T>& at, const Block& block) {
    const Problem& p = *pass.problem;
    const int64_t J = p.J, D = p.D;
    const bool want_logits = pass.dlogits != nullptr || pass.dlogits_sample.data != nullptr;
    for (int64_t t = pass.first; t < p.iterations; ++t) {
      T* c = at.c + (t - pass.first) * J * L;
      T* dc = at.db + (t - pass.first) * J * L;
      const int64_t scalars = (t * p.B + block.b) * J, vectors = scalars * D;
      if (t == 0) {
        __builtin_memset(c, 0, static_cast<size_t>(J * L) * sizeof(T));
      } else {
        B_::dots(block.votes, block.count, pass.V + vectors, J, D, at.part, c);
      }
      B_::add_prior(
          p, block.b, block.i0, block.count, pass.valid_out == nullptr ? nullptr : pass.valid_out + block.b * J, c);
      if (p.softmax_in) {
        B_::softmax_in(J, pass.in_max + scalars, pass.in_scale + scalars, c);
      } else {
        B_::softmax_out(J, p.leaky, c);
      }
      if (!want_logits && (p.gradient_last || t == 0)) continue;
      B_::dots(block.votes, block.count, pass.ds + vectors, J, D, at.part, dc);
      if (pass.dcoupling.data != nullptr && t + 1 == p.iterations) {
        B_::template transfer<false>(pass.dcoupling, block.b, block.i0, block.count, J, dc);
      }
      B_::softmax_backward(J, c, p.softmax_in ? pass.c_dc + scalars : nullptr, dc);
    }
    if (want_logits) logits(pass, at, block);
  }

  static void logits(const GradientPass<T>& pass, const RowsGradientScratch<T>& at, const Block& block) {
    const int64_t J = pass.problem->J, terms = pass.problem->iterations - pass.first;
    const View& out = pass.dlogits_sample;
    for (int64_t n = 0; n < block.count; ++n) {
      for (int64_t j = 0; j < J; ++j) {
        T total = 0;
        for (int64_t t = 0; t < terms; ++t) total += at.db[(t * J + j) * L + n];
        if (pass.dlogits != nullptr) pass.dlogits[(block.i0 + n) * J + j] += total;
        if (out.data == nullptr) continue;
        write<T>(out, block.b * out.stride[0] + (block.i0 + n) * out.stride[1] + j * out.stride[2], total);
      }
    }
  }

  // Computes dvotes [J][D] of input capsule n of the block.
  static void gradients(const GradientPass<T>& pass, const RowsGradientScratch<T>& at, const Block& block, int64_t n,
                        T* dvotes) {
    const Problem& p = *pass.problem;
    const int64_t J = p.J, D = NV > 0 ? NV * L : p.D;
    for (int64_t j = 0; j < J; ++j) {
#pragma GCC unroll 2
      for (int64_t d = 0; d < D; d += L) {
        V g = V{};
        for (int64_t t = pass.first; t < p.iterations; ++t) {
          const int64_t vector = ((t * p.B + block.b) * J + j) * D, coefficient = ((t - pass.first) * J + j) * L + n;
          g += B_::read_vector(pass.ds + vector, d, D) * at.c[coefficient];
          if (p.gradient_last || t == 0) continue;
          g += B_::read_vector(pass.V + vector, d, D) * at.db[coefficient];
        }
        B_::write_vector(dvotes + j * D, g, d, D);
      }
    }
  }

  static void write_votes(const GradientPass<T>& pass, const RowsGradientScratch<T>& at, const Block& block,
                          int64_t n) {
    const Problem& p = *pass.problem;
    const int64_t i = block.i0 + n, size = p.J * p.D, to = block.b * pass.dvotes.stride[0] + i * pass.dvotes.stride[1];
    const bool in_place = pass.dvotes.storage == kStorage<T>;
    T* dvotes = in_place ? static_cast<T*>(pass.dvotes.data) + to : at.row;
    if (p.mask.data != nullptr && !p.mask.at(block.b, i)) {
      __builtin_memset(dvotes, 0, static_cast<size_t>(size) * sizeof(T));
    } else {
      gradients(pass, at, block, n, dvotes);
    }
    if (!in_place) scatter<T>(pass.dvotes, to, {1, 1, size}, {0, 0, 1}, dvotes);
  }

  static void run(const GradientPass<T>& pass, const Range& range, T* scratch) {
    const Problem& p = *pass.problem;
    const RowsGradientScratch<T> at(p, *pass.plan, p.iterations - pass.first, scratch);
    for (int64_t b = range.tile0; b < range.tile1; ++b) {
      for (int64_t i0 = range.i0; i0 < range.i1; i0 += L) {
        const T* votes[L];
        const Block block{b, i0, i0 + L < range.i1 ? L : range.i1 - i0, votes};
        B_::rows(p, b, i0, block.count, at.rows, votes);
        coefficients(pass, at, block);
        // A small batch writes dvotes over its votes. No later block reads those of this one.
        for (int64_t n = 0; n < block.count && pass.dvotes.data != nullptr; ++n) write_votes(pass, at, block, n);
      }
    }
  }
};
