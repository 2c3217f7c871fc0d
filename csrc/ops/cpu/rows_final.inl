// The backward's last pass in the rows layout, all iterations at once: see lanes_final.inl.

template <class T, int L_, int NV, Pose kind>
struct RowsFinal {
  using B_ = Rows<T, L_, NV, kind>;
  using V = typename B_::V;
  static constexpr int L = L_;
  static constexpr bool votes_given = kind == Pose::none;

  struct Block {
    int64_t b, sample, i0, count;
    const T* const* w;
    const T* u;
  };

  static void coefficients(const FinalPass<T>& pass, const RowsFinalScratch<T>& at, const Block& block) {
    const Problem& p = *pass.problem;
    const int64_t J = p.J, M = p.D * p.K, terms = p.iterations - pass.first;
    const bool want_logits = pass.dlogits != nullptr || pass.dlogits_sample.data != nullptr;
    for (int64_t t = pass.first; t < p.iterations; ++t) {
      T* c = at.c + (t - pass.first) * J * L;
      T* dc = at.db + (t - pass.first) * J * L;
      const int64_t parameters = (block.sample * terms + t - pass.first) * J * M, scalars = (t * p.B + block.b) * J;
      if (t == 0) {
        __builtin_memset(c, 0, static_cast<size_t>(J * L) * sizeof(T));
      } else {
        B_::dots(block.w, block.u, block.count, at.V + parameters, J, M, c);
      }
      B_::add_prior(p, block.b, block.i0, block.count, pass.valid_out == nullptr ? nullptr : pass.valid_out + block.b * J, c);
      if (p.softmax_in) {
        B_::softmax_in(J, pass.in_max + scalars, pass.in_scale + scalars, c);
      } else {
        B_::softmax_out(J, p.leaky, c);
      }
      if (!want_logits && (p.gradient_last || t == 0)) continue;
      B_::dots(block.w, block.u, block.count, at.ds + parameters, J, M, dc);
      if (pass.dcoupling.data != nullptr && t + 1 == p.iterations) {
        B_::template transfer<false>(pass.dcoupling, block.b, block.i0, block.count, J, dc);
      }
      B_::softmax_backward(J, c, p.softmax_in ? pass.c_dc + scalars : nullptr, dc);
    }
    if (want_logits) logits(pass, at, block);
  }

  static void logits(const FinalPass<T>& pass, const RowsFinalScratch<T>& at, const Block& block) {
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

  // dvotes of capsule n, spread over k: for votes they are the result, else dW += dvotes u and
  // du += dvotes w.
  static void gradients(const FinalPass<T>& pass, const RowsFinalScratch<T>& at, const Block& block, int64_t n, T* dw, T* dvotes) {
    const Problem& p = *pass.problem;
    const int64_t J = p.J, M = NV > 0 ? NV * L : p.D * p.K, terms = p.iterations - pass.first;
    const bool want_u = !votes_given && pass.du.data != nullptr, add_w = block.sample > 0;
    const T* u = block.u + n * B_::kPitch(M);
    if (want_u) __builtin_memset(at.du, 0, static_cast<size_t>(M) * sizeof(T));
    for (int64_t j = 0; j < J; ++j) {
#pragma GCC unroll 8
      for (int64_t m = 0; m < M; m += L) {
        V g = V{};
        for (int64_t t = 0; t < terms; ++t) {
          const int64_t from = ((block.sample * terms + t) * J + j) * M, coefficient = (t * J + j) * L + n;
          g += B_::read_vector(at.ds + from, m, M) * at.c[coefficient];
          if (p.gradient_last || t + pass.first == 0) continue;
          g += B_::read_vector(at.V + from, m, M) * at.db[coefficient];
        }
        if constexpr (votes_given) {
          B_::write_vector(dvotes + j * M, g, m, M);
        } else {
          if (dw != nullptr) {
            V row = g * (kind == Pose::one_register ? load<L>(u) : B_::read_vector(u, m, M));
            if (add_w) row += B_::read_vector(dw + j * M, m, M);
            B_::write_vector(dw + j * M, row, m, M);
          }
          if (want_u) {
            const V term = g * B_::read_vector(block.w[n] + j * M, m, M);
            B_::write_vector(at.du, B_::read_vector(at.du, m, M) + term, m, M);
          }
        }
      }
    }
  }

  static void write_pose(const FinalPass<T>& pass, const RowsFinalScratch<T>& at, int64_t b, int64_t i) {
    const Problem& p = *pass.problem;
    const bool masked = p.mask.data != nullptr && !p.mask.at(b, i);
    const int64_t to = b * pass.du.stride[0] + i * pass.du.stride[1];
    for (int64_t k = 0; k < p.K; ++k) {
      T total = 0;
      for (int64_t d = 0; d < p.D; ++d) total += at.du[d * p.K + k];
      write<T>(pass.du, to + k * pass.du.stride[2], masked ? T(0) : total);
    }
  }

  static void write_votes(const FinalPass<T>& pass, const RowsFinalScratch<T>& at, const Block& block, int64_t n) {
    const Problem& p = *pass.problem;
    const int64_t i = block.i0 + n, size = p.J * p.D, to = block.b * pass.dvotes.stride[0] + i * pass.dvotes.stride[1];
    const bool in_place = pass.dvotes.storage == kStorage<T>;
    T* dvotes = in_place ? static_cast<T*>(pass.dvotes.data) + to : at.dw;
    if (p.mask.data != nullptr && !p.mask.at(block.b, i)) {
      __builtin_memset(dvotes, 0, static_cast<size_t>(size) * sizeof(T));
    } else {
      gradients(pass, at, block, n, nullptr, dvotes);
    }
    if (!in_place) scatter<T>(pass.dvotes, to, {1, 1, size}, {0, 0, 1}, dvotes);
  }

  // dW of one capsule stands in `dw`; to where it belongs, if it is not there yet.
  static void write_weight(const FinalPass<T>& pass, int64_t i, const T* dw) {
    const Problem& p = *pass.problem;
    const int64_t size = p.J * p.D * p.K;
    if (pass.dweight_sum == nullptr) {
      if (pass.dweight.storage != kStorage<T>) scatter<T>(pass.dweight, i * size, {1, 1, size}, {0, 0, 1}, dw);
      return;
    }
    const int64_t to = p.shared_weight ? 0 : i * size;
    for (int64_t m = 0; m < size; ++m) add_exactly(dw[m], pass.dweight_sum + to + m, pass.dweight_low + to + m);
  }

  static void run(const FinalPass<T>& pass, const Range& range, T* scratch) {
    const Problem& p = *pass.problem;
    const int64_t JD = p.J * p.D, JM = JD * p.K, terms = p.iterations - pass.first;
    const int64_t step = votes_given ? 1 : range.tile1 - range.tile0;
    const RowsFinalScratch<T> at(p, *pass.plan, terms, scratch);
    const bool want_w = !votes_given && pass.dweight.data != nullptr;
    const bool in_place = want_w && pass.dweight_sum == nullptr && pass.dweight.storage == kStorage<T>;
    for (int64_t b0 = range.tile0; b0 < range.tile1; b0 += step) {
      for (int64_t n = 0; n < step; ++n) {
        for (int64_t t = 0; t < terms; ++t) {
          const int64_t from = ((pass.first + t) * p.B + b0 + n) * JD, to = (n * terms + t) * JM;
          B_::spread(pass.ds + from, JD, p.K, at.ds + to);
          B_::spread(pass.V + from, JD, p.K, at.V + to);
        }
      }
      for (int64_t i0 = range.i0; i0 < range.i1; i0 += L) {
        const T* w[L];
        Block block{b0, 0, i0, i0 + L < range.i1 ? L : range.i1 - i0, w, at.u};
        B_::rows(p, b0, i0, block.count, at.rows, w);
        for (int64_t sample = 0; sample < step; ++sample) {
          block.b = b0 + sample;
          block.sample = sample;
          B_::poses(p, block.b, i0, block.count, at.pose, at.u);
          coefficients(pass, at, block);
          for (int64_t n = 0; n < block.count; ++n) {
            if constexpr (votes_given) {
              if (pass.dvotes.data != nullptr) write_votes(pass, at, block, n);
            } else {
              T* dw = !want_w ? nullptr : in_place ? static_cast<T*>(pass.dweight.data) + (i0 + n) * JM : at.dw + n * JM;
              gradients(pass, at, block, n, dw, nullptr);
              if (pass.du.data != nullptr) write_pose(pass, at, block.b, i0 + n);
            }
          }
        }
        if (!want_w) continue;
        for (int64_t n = 0; n < block.count; ++n) write_weight(pass, i0 + n, at.dw + n * JM);
      }
    }
  }
};
