// The backward's last pass in the rows layout, all iterations at once: see lanes_final.inl.

template <class T, int L_, int NV, bool votes_given>
struct RowsFinal {
  using B_ = Rows<T, L_, NV, votes_given>;
  using V = typename B_::V;
  static constexpr int L = L_;

  struct Capsule {
    int64_t b, sample, i;
    const T *w, *u;
  };

  static void coefficients(const FinalPass<T>& pass, const RowsFinalScratch<T>& at, const Capsule& one) {
    const Problem& p = *pass.problem;
    const int64_t J = p.J, M = p.D * p.K, width = (J + L - 1) / L * L, terms = p.iterations - pass.first;
    const bool want_logits = pass.dlogits != nullptr || pass.dlogits_sample.data != nullptr;
    for (int64_t t = pass.first; t < p.iterations; ++t) {
      T* c = at.c + (t - pass.first) * width;
      T* dc = at.db + (t - pass.first) * width;
      const int64_t parameters = (one.sample * terms + t - pass.first) * J * M;
      if (t == 0) {
        for (int64_t j = 0; j < J; ++j) c[j] = 0;
      } else {
        B_::dots(one.w, one.u, at.V + parameters, J, M, c);
      }
      B_::add_prior(p, one.b, one.i, pass.valid_out == nullptr ? nullptr : pass.valid_out + one.b * width, width, c);
      const int64_t per_output = (t * p.B + one.b) * width;
      if (p.softmax_in) {
        B_::softmax_in(width, pass.lse + per_output, c);
      } else {
        B_::softmax_out(width, p.leaky, c);
      }
      if (!want_logits && (p.gradient_last || t == 0)) continue;
      B_::dots(one.w, one.u, at.ds + parameters, J, M, dc);
      if (pass.dcoupling.data != nullptr && t + 1 == p.iterations) {
        B_::add_from(pass.dcoupling, one.b * pass.dcoupling.stride[0] + one.i * pass.dcoupling.stride[1], J, dc);
      }
      B_::softmax_backward(width, c, p.softmax_in ? pass.c_dc + per_output : nullptr, dc);
    }
    if (!want_logits) return;
    const View& out = pass.dlogits_sample;
    for (int64_t j = 0; j < J; ++j) {
      T total = 0;
      for (int64_t t = 0; t < terms; ++t) total += at.db[t * width + j];
      if (pass.dlogits != nullptr) pass.dlogits[one.i * J + j] += total;
      if (out.data != nullptr) write<T>(out, one.b * out.stride[0] + one.i * out.stride[1] + j * out.stride[2], total);
    }
  }

  // dvotes of row j, spread over k, handed to `use` vector by vector: for votes they are the result,
  // else dW += dvotes u and du += dvotes w.
  static void gradients(const FinalPass<T>& pass, const RowsFinalScratch<T>& at, const Capsule& one, T* dw, bool add_w, T* dvotes) {
    const Problem& p = *pass.problem;
    const int64_t J = p.J, M = NV > 0 ? NV * L : p.D * p.K, width = (J + L - 1) / L * L;
    const int64_t terms = p.iterations - pass.first;
    const bool want_u = !votes_given && pass.du.data != nullptr;
    for (int64_t j = 0; j < J; ++j) {
#pragma GCC unroll 8
      for (int64_t m = 0; m < M; m += L) {
        V g = V{};
        for (int64_t t = 0; t < terms; ++t) {
          const int64_t from = ((one.sample * terms + t) * J + j) * M;
          g += B_::read_vector(at.ds + from, m, M) * at.c[t * width + j];
          if (p.gradient_last || t + pass.first == 0) continue;
          g += B_::read_vector(at.V + from, m, M) * at.db[t * width + j];
        }
        if constexpr (votes_given) {
          B_::write_vector(dvotes + j * M, g, m, M);
        } else {
          if (dw != nullptr) {
            V row = g * B_::read_vector(one.u, m, M);
            if (add_w) row += B_::read_vector(dw + j * M, m, M);
            B_::write_vector(dw + j * M, row, m, M);
          }
          if (want_u) {
            const V term = g * B_::read_vector(one.w + j * M, m, M);
            B_::write_vector(at.du, j == 0 ? term : B_::read_vector(at.du, m, M) + term, m, M);
          }
        }
      }
    }
  }

  static void write_pose(const FinalPass<T>& pass, const RowsFinalScratch<T>& at, const Capsule& one) {
    const Problem& p = *pass.problem;
    const bool masked = p.mask.data != nullptr && !p.mask.at(one.b, one.i);
    const int64_t to = one.b * pass.du.stride[0] + one.i * pass.du.stride[1];
    for (int64_t k = 0; k < p.K; ++k) {
      T total = 0;
      for (int64_t d = 0; d < p.D; ++d) total += at.du[d * p.K + k];
      write<T>(pass.du, to + k * pass.du.stride[2], masked ? T(0) : total);
    }
  }

  static void votes_capsule(const FinalPass<T>& pass, const RowsFinalScratch<T>& at, const Capsule& one) {
    const Problem& p = *pass.problem;
    if (pass.dvotes.data == nullptr) return;
    const int64_t to = one.b * pass.dvotes.stride[0] + one.i * pass.dvotes.stride[1], size = p.J * p.D;
    const bool in_place = pass.dvotes.storage == kStorage<T>;
    T* dvotes = in_place ? static_cast<T*>(pass.dvotes.data) + to : at.dw;
    if (p.mask.data != nullptr && !p.mask.at(one.b, one.i)) {
      __builtin_memset(dvotes, 0, static_cast<size_t>(size) * sizeof(T));
    } else {
      gradients(pass, at, one, nullptr, false, dvotes);
    }
    if (!in_place) scatter<T>(pass.dvotes, to, {1, 1, size}, {0, 0, 1}, dvotes);
  }

  static void run(const FinalPass<T>& pass, const Range& range, T* scratch) {
    const Problem& p = *pass.problem;
    const int64_t J = p.J, JD = J * p.D, JM = JD * p.K, terms = p.iterations - pass.first;
    const int64_t step = votes_given ? 1 : range.tile1 - range.tile0;
    const RowsFinalScratch<T> at(p, *pass.plan, terms, scratch);
    const bool want_w = !votes_given && pass.dweight.data != nullptr;
    const bool shared = p.shared_weight;
    for (int64_t b0 = range.tile0; b0 < range.tile1; b0 += step) {
      for (int64_t n = 0; n < step; ++n) {
        for (int64_t t = 0; t < terms; ++t) {
          const int64_t from = ((pass.first + t) * p.B + b0 + n) * JD, to = (n * terms + t) * JM;
          B_::spread(pass.ds + from, JD, p.K, at.ds + to);
          B_::spread(pass.V + from, JD, p.K, at.V + to);
        }
      }
      for (int64_t i = range.i0; i < range.i1; ++i) {
        Capsule one{b0, 0, i, B_::row(p, b0, i, at.row), at.u};
        const bool in_place = pass.dweight_sum == nullptr && pass.dweight.storage == kStorage<T>;
        T* dw = !want_w ? nullptr : in_place ? static_cast<T*>(pass.dweight.data) + i * JM : at.dw;
        for (int64_t n = 0; n < step; ++n) {
          one.b = b0 + n;
          one.sample = n;
          B_::pose(p, one.b, i, at.pose, at.u);
          coefficients(pass, at, one);
          if constexpr (votes_given) {
            votes_capsule(pass, at, one);
          } else {
            gradients(pass, at, one, dw, n > 0, nullptr);
            if (pass.du.data != nullptr) write_pose(pass, at, one);
          }
        }
        if (!want_w || in_place) continue;
        if (pass.dweight_sum == nullptr) {
          scatter<T>(pass.dweight, i * JM, {1, 1, JM}, {0, 0, 1}, dw);
          continue;
        }
        T* sum = pass.dweight_sum + (shared ? 0 : i * JM);
        for (int64_t m = 0; m < JM; ++m) sum[m] += dw[m];
      }
    }
  }
};
