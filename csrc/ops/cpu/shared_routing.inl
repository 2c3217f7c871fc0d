// Routing with one matrix (see ../shared_routing.h), a block of samples at a time, which stays in the cache for all
// iterations. All sums are products of matrices of a few rows: rows of coefficients times rows of vectors.

template <class T>
struct SharedRouting : SharedRows<T> {
  using SharedRows<T>::L, SharedRows<T>::product, SharedRows<T>::dot, SharedRows<T>::add_rows,
      SharedRows<T>::scale_rows, SharedRows<T>::copy_rows;
  using typename SharedRows<T>::V;

  // Rows [D] times S, and rows [K] times its transpose; all rows padded.
  static void by_S(const SharedCall<T>& call, int64_t M, const T* a, T* c, bool add = false) {
    product(M, a, call.Dp, 1, call.problem->D, call.S, call.Kp, call.Kp / L, c, call.Kp, add);
  }
  static void by_transpose(const SharedCall<T>& call, int64_t M, const T* a, T* c) {
    product(M, a, call.Kp, 1, call.problem->K, call.St, call.Dp, call.Dp / L, c, call.Dp);
  }

  // A block of samples, packed.
  struct Block {
    const SharedCall<T>& call;
    const SharedProblem& p;
    const SharedScratch<T>& at;
    int64_t b0, samples, end;  // end: of the samples of the task
    int64_t* index;            // [samples][I]: the input capsules that are not masked
    int64_t* count;            // [samples]: how many

    Block(const SharedCall<T>& call, const SharedScratch<T>& at, int64_t b0, int64_t end, int64_t* index)
        : call(call),
          p(*call.problem),
          at(at),
          b0(b0),
          samples(b0 + call.samples < end ? call.samples : end - b0),
          end(end),
          index(index + call.samples),
          count(index) {}

    int64_t rows() const { return samples * p.J; }
    int64_t vectors(int64_t n) const { return (count[n] + L - 1) / L; }
    const T* given(int64_t n) const { return static_cast<const T*>(p.u.data) + (b0 + n) * p.u.stride[0]; }
    // The input capsules of a sample that are not masked, and the length of a row.
    const T* U(int64_t n) const { return call.in_place ? given(n) : packed(n); }
    T* packed(int64_t n) const { return at.U + n * call.Ip * call.Kp; }
    int64_t row() const { return call.in_place ? p.u.stride[1] : call.Kp; }
    // Asks for a part of the input of the next block, so that it comes from memory while this one is worked on. Inline:
    // to GCC a function that prefetches and no more has no effect, and it drops the calls.
    CAPSFAST_INLINE void prefetch(int64_t n, int64_t part, int64_t parts) const {
      if (b0 + samples + n >= end) return;
      const T* const next = given(samples + n);
      for (int64_t i = p.I * part / parts; i < p.I * (part + 1) / parts; ++i) {
        for (int64_t k = 0; k < p.K; k += 64 / static_cast<int64_t>(sizeof(T)))
          __builtin_prefetch(next + i * p.u.stride[1] + k, 0, 2);
      }
      if (call.saved == nullptr) return;
      const int64_t size = p.kept();
      for (int64_t k = size * part / parts; k < size * (part + 1) / parts; k += 64 / static_cast<int64_t>(sizeof(T)))
        __builtin_prefetch(call.saved + (b0 + samples + n) * size + k, 0, 2);
    }
    T* logits(int64_t n) const { return at.logits + (call.same_start ? 0 : n * p.J * call.Ip); }
    T* Ut(int64_t n) const { return at.Ut + n * call.Ip * call.Kp; }
    // [rows][Kp] and [rows][Dp] of an iteration.
    T* of(T* array, int64_t t) const { return array + t * rows() * call.Kp; }
    T* wide(T* array, int64_t t) const { return array + t * rows() * call.Dp; }
    // Where the forward keeps what sample n has of iteration t: z [J][K], S z [J][D], and for t > 0 what it scored with
    // [J][K] and the coupling [J][p.kept_row()].
    int64_t kept_z(int64_t n, int64_t t) const { return (b0 + n) * p.kept() + t * p.J * p.K; }
    int64_t kept_s(int64_t n, int64_t t) const { return kept_z(n, p.iterations) + t * p.J * p.D; }
    int64_t kept_q(int64_t n, int64_t t) const { return kept_s(n, p.iterations) + (t - 1) * p.J * p.K; }
    int64_t kept_c(int64_t n, int64_t t) const { return kept_q(n, p.iterations) + (t - 1) * p.J * p.kept_row(); }
    // Of the backward.
    T* Z(int64_t t) const { return of(at.right, t); }
    T* dq(int64_t t) const { return of(at.right, p.iterations + t); }
    T* ds(int64_t t) const { return wide(at.left, t); }
    T* outputs(int64_t t) const { return wide(at.left, p.iterations + t); }
    T* dZ(int64_t t) const { return of(at.back, t); }
    // t > 0: what iteration t scored with.
    T* q(int64_t t) const { return of(at.back, p.iterations + t - 1); }
    int64_t sets() const { return 2 * p.iterations - 1; }
    // What multiplies vectors in du [J][Ip]: the coupling of iteration t, and for t > 0 the gradient of its logits.
    T* coupling(int64_t n, int64_t t) const { return at.coefficients + (n * sets() + t) * p.J * call.Ip; }
    T* dl(int64_t n, int64_t t) const { return t == 0 ? at.c : coupling(n, p.iterations + t - 1); }
    T* dlogits(int64_t n) const { return at.dlogits + n * p.J * call.Ip; }
  };

  static CAPSFAST_ONCE void pack(const Block& block) {
    const SharedProblem& p = block.p;
    const int64_t Kp = block.call.Kp, Ip = block.call.Ip;
    for (int64_t n = 0; n < block.samples; ++n) {
      const int64_t b = block.b0 + n;
      int64_t* const index = block.index + n * p.I;
      int64_t count = 0;
      for (int64_t i = 0; i < p.I; ++i) {
        if (p.mask.data == nullptr || p.mask.at(b, i)) index[count++] = i;
      }
      block.count[n] = count;
      const int64_t padded = (count + L - 1) / L * L;
      if (!block.call.in_place) copy_valid(block, n, index, count, block.packed(n));
      const T* const U = block.U(n);
      T* const Ut = block.Ut(n);
      for (int64_t i = 0; i < padded; i += L) {
        const int64_t left = count - i < L ? count - i : L;
        for (int64_t k = 0; k < Kp; k += L) {
          V m[L];
#pragma GCC unroll 16
          for (int l = 0; l < L; ++l) m[l] = l < left ? load<L>(U + (i + l) * block.row() + k) : V{};
          transpose<T, L>(m);
#pragma GCC unroll 16
          for (int l = 0; l < L; ++l) store<L>(Ut + (k + l) * Ip + i, m[l]);
        }
      }
      if (!block.call.same_start) pack_logits(block, n, padded);
    }
  }

  static void copy_valid(const Block& block, int64_t n, const int64_t* index, int64_t count, T* to) {
    const SharedProblem& p = block.p;
    for (int64_t row = 0; row < count; ++row, to += block.call.Kp) {
      const T* const from = block.given(n) + index[row] * p.u.stride[1];
      int64_t k = 0;
      for (; k + L <= p.K; k += L) store<L>(to + k, load<L>(from + k));
      if (k < p.K) store<L>(to + k, load_part<L>(from + k, p.K - k));
    }
  }

  static void pack_logits(const Block& block, int64_t n, int64_t padded) {
    const SharedProblem& p = block.p;
    if (p.logits.data == nullptr) return;
    const T* from = static_cast<const T*>(p.logits.data) + (block.b0 + n) * p.logits.stride[0];
    const int64_t* index = block.index + n * p.I;
    for (int64_t j = 0; j < p.J; ++j) {
      T* const to = block.logits(n) + j * block.call.Ip;
      for (int64_t i = 0; i < block.count[n]; ++i) to[i] = from[index[i] * p.logits.stride[1] + j * p.logits.stride[2]];
      for (int64_t i = block.count[n]; i < padded; ++i) to[i] = 0;
    }
  }

  // Where all samples have the same logits and couplings in iteration 0: makes both.
  static CAPSFAST_ONCE void start(const SharedCall<T>& call, const SharedScratch<T>& at, int64_t* index) {
    if (!call.same_start) return;
    const Block block(call, at, 0, 1, index);
    const int64_t I = call.problem->I;
    block.count[0] = I;
    for (int64_t i = 0; i < I; ++i) block.index[i] = i;
    pack_logits(block, 0, block.vectors(0) * L);
    normalize(block, 0, 0, at.start);
  }

  // The coupling coefficients [J][Ip] of sample n in iteration t; q [J][Kp] is what it scores with.
  static void couple(const Block& block, int64_t n, int64_t t, const T* q, T* c) {
    const int64_t J = block.p.J, Ip = block.call.Ip;
    if (t == 0 && block.call.same_start) {
      __builtin_memcpy(c, block.at.start, static_cast<size_t>(J * Ip) * sizeof(T));
      return;
    }
    if (t > 0) product(J, q, block.call.Kp, 1, block.p.K, block.Ut(n), Ip, block.vectors(n), c, Ip);
    normalize(block, n, t, c);
  }

  // From scores, and none in iteration 0, to coupling coefficients.
  static CAPSFAST_ONCE void normalize(const Block& block, int64_t n, int64_t t, T* c) {
    const SharedProblem& p = block.p;
    const int64_t Ip = block.call.Ip, vectors = block.vectors(n);
    const bool prior = p.logits.data != nullptr && (p.accumulate || t == 0);
    const T* logits = block.logits(n);
    for (int64_t v = 0; v < vectors; ++v) {
      T* const x = c + v * L;
      V largest = broadcast<L>(kLowest<T>), total{};
      for (int64_t j = 0; j < p.J; ++j) {
        V b = t > 0 ? load<L>(x + j * Ip) : V{};
        if (prior) b += load<L>(logits + j * Ip + v * L);
        store<L>(x + j * Ip, b);
        if (there(block, n, j)) largest = max(largest, b);
      }
      for (int64_t j = 0; j < p.J; ++j) {
        const V e = there(block, n, j) ? exp<L>(load<L>(x + j * Ip) - largest) : V{};
        store<L>(x + j * Ip, e);
        total += e;
      }
      const V scale = total == V{} ? V{} : T(1) / total;
      for (int64_t j = 0; j < p.J; ++j) store<L>(x + j * Ip, load<L>(x + j * Ip) * scale);
    }
  }
  static CAPSFAST_INLINE bool there(const Block& block, int64_t n, int64_t j) {
    return block.p.out_mask.data == nullptr || block.p.out_mask.at(block.b0 + n, j);
  }

  // dl = c (dc - sum_j c dc), in place of dc.
  static CAPSFAST_ONCE void differentiate(const Block& block, int64_t n, const T* c, T* dc) {
    const int64_t J = block.p.J, Ip = block.call.Ip;
    for (int64_t v = 0; v < block.vectors(n); ++v) {
      V mean{};
      for (int64_t j = 0; j < J; ++j) mean += load<L>(c + j * Ip + v * L) * load<L>(dc + j * Ip + v * L);
      for (int64_t j = 0; j < J; ++j) {
        T* const at = dc + j * Ip + v * L;
        store<L>(at, load<L>(c + j * Ip + v * L) * (load<L>(at) - mean));
      }
    }
  }

  // A copy for the backward.
  static void keep(const Block& block, const T* from, int64_t from_row, int64_t size, int64_t to, int64_t to_row) {
    const SharedCall<T>& call = block.call;
    if (call.past_cache) {
      SharedRows<T>::template copy_rows<true>(from, from_row, block.p.J, size, call.kept + to, to_row);
    } else {
      copy_rows(from, from_row, block.p.J, size, call.kept + to, to_row);
    }
  }

  static void forward(const SharedCall<T>& call, int64_t begin, int64_t end, T* memory, int64_t* index) {
    const SharedProblem& p = *call.problem;
    const SharedScratch<T> at(call, memory, false);
    const int64_t Kp = call.Kp, Dp = call.Dp, r = p.iterations;
    const T eps = static_cast<T>(p.eps);
    start(call, at, index);
    for (int64_t b0 = begin; b0 < end; b0 += call.samples) {
      const Block block(call, at, b0, end, index);
      const int64_t M = block.rows();
      pack(block);
      for (int64_t t = 0; t < r; ++t) {
        for (int64_t n = 0; n < block.samples; ++n) {
          couple(block, n, t, at.q + n * p.J * Kp, at.c);
          if (call.kept != nullptr && p.keep_all && t > 0)
            keep(block, at.c, call.Ip, block.vectors(n) * L, block.kept_c(n, t), p.kept_row());
          block.prefetch(n, 2 * t, 2 * r);
          product(p.J, at.c, call.Ip, 1, block.count[n], block.U(n), block.row(), Kp / L, at.Z + n * p.J * Kp, Kp);
          block.prefetch(n, 2 * t + 1, 2 * r);
        }
        by_transpose(call, M, at.Z, at.s);
        for (int64_t n = 0; n < block.samples && call.kept != nullptr; ++n) {
          keep(block, at.Z + n * p.J * Kp, Kp, p.K, block.kept_z(n, t), p.K);
          if (p.keep_all) keep(block, at.s + n * p.J * Dp, Dp, p.D, block.kept_s(n, t), p.D);
        }
        const T scale = t == r - 1 ? T(1) : static_cast<T>(p.scale);
        for (int64_t m = 0; m < M; ++m) {
          T *const s = at.s + m * Dp, factor = scale * radial(p.squash, dot(s, s, Dp), eps);
          scale_rows(s, &factor, 1, Dp, s);
        }
        if (t == r - 1) break;
        // With logits that add up, the outputs of an iteration count in all that follow.
        by_S(call, M, at.s, at.q, p.accumulate && t > 0);
        for (int64_t n = 0; n < block.samples && call.kept != nullptr && p.keep_all; ++n)
          keep(block, at.q + n * p.J * Kp, Kp, p.K, block.kept_q(n, t + 1), p.K);
      }
      copy_rows(at.s, Dp, M, p.D, call.v + b0 * p.J * p.D, p.D);
    }
    fence();
  }

  static void backward(const SharedCall<T>& call, int64_t begin, int64_t end, T* memory, int64_t* index,
                       const SharedSums<T>& sums) {
    const SharedProblem& p = *call.problem;
    const SharedScratch<T> at(call, memory, true);
    const int64_t last = p.iterations - 1, first = p.gradient_last ? last : 0, Kp = call.Kp, Dp = call.Dp;
    start(call, at, index);
    for (int64_t b0 = begin; b0 < end; b0 += call.samples) {
      const Block block(call, at, b0, end, index);
      const int64_t M = block.rows();
      pack(block);
      restore(block);
      if (call.need_logits) {
        for (int64_t k = 0; k < call.samples * p.J * call.Ip; k += L) store<L>(at.dlogits + k, V{});
      }
      copy_rows(call.dv + b0 * p.J * p.D, p.D, M, p.D, block.ds(last), Dp);
      for (int64_t t = last; t >= first; --t) {
        if (t < last) by_transpose(call, M, block.dq(t), block.ds(t));
        differentiate_squash(block, t);
        by_S(call, M, block.ds(t), block.dZ(t));
        iteration_gradients(block, t, t > first);
      }
      if (call.need_weight) {
        const int64_t sets = first == 0 ? block.sets() : 1;
        product(p.D, block.ds(first), 1, Dp, sets * M, block.Z(first), Kp, Kp / L, sums.dS, Kp, true);
      }
      for (int64_t n = 0; n < block.samples; ++n) {
        if (call.du != nullptr) input_gradients(block, n, first);
        if (call.need_logits) logit_gradients(block, n, sums);
      }
    }
    fence();
  }

  // What the forward kept, or what follows from z: S z, the factors of the squash, the outputs, q and the couplings.
  static CAPSFAST_ONCE void restore(const Block& block) {
    const SharedProblem& p = block.p;
    const SharedScratch<T>& at = block.at;
    const int64_t M = block.rows(), Kp = block.call.Kp, Dp = block.call.Dp, last = p.iterations - 1;
    const T eps = static_cast<T>(p.eps);
    for (int64_t n = 0; n < block.samples; ++n) restore_kept(block, n);
    if (!p.keep_all) by_transpose(block.call, (last + 1) * M, block.Z(0), at.sums);
    // With all kept, a backward of the last iteration alone restores no other.
    const int64_t first = p.keep_all && p.gradient_last ? last : 0;
    for (int64_t m = first * M; m < (last + 1) * M; ++m) {
      const T *const s = at.sums + m * Dp, n = dot(s, s, Dp), scale = m < last * M ? static_cast<T>(p.scale) : T(1);
      at.f[m] = scale * radial(p.squash, n, eps);
      at.slope[m] = scale * radial_derivative(p.squash, n, eps);
    }
    if (first < last) scale_rows(at.sums, at.f, last * M, Dp, block.outputs(0));
    if (p.keep_all) return;
    if (last > 0) by_S(block.call, last * M, block.outputs(0), block.q(1));
    // With logits that add up, the outputs of an iteration count in all that follow.
    for (int64_t t = 2; t <= last && p.accumulate; ++t) add_rows(block.q(t - 1), M * Kp, block.q(t));
    for (int64_t n = 0; n < block.samples; ++n) {
      for (int64_t t = 1; t <= last; ++t) couple(block, n, t, block.q(t) + n * p.J * Kp, block.coupling(n, t));
    }
  }

  // In the order of memory; and the couplings of iteration 0.
  static CAPSFAST_ONCE void restore_kept(const Block& block, int64_t n) {
    const SharedProblem& p = block.p;
    const T* const kept = block.call.saved;
    const int64_t J = p.J, Kp = block.call.Kp, Dp = block.call.Dp, Ip = block.call.Ip, r = p.iterations;
    couple(block, n, 0, nullptr, block.coupling(n, 0));
    for (int64_t t = 0; t < r; ++t) copy_rows(kept + block.kept_z(n, t), p.K, J, p.K, block.Z(t) + n * J * Kp, Kp);
    if (!p.keep_all) return;
    const int64_t first = p.gradient_last ? r - 1 : 0, scored = p.gradient_last && r > 1 ? r - 1 : 1;
    for (int64_t t = first; t < r; ++t)
      copy_rows(kept + block.kept_s(n, t), p.D, J, p.D, block.wide(block.at.sums, t) + n * J * Dp, Dp);
    for (int64_t t = scored; t < r; ++t) copy_rows(kept + block.kept_q(n, t), p.K, J, p.K, block.q(t) + n * J * Kp, Kp);
    for (int64_t t = scored; t < r; ++t)
      copy_rows(kept + block.kept_c(n, t), p.kept_row(), J, block.vectors(n) * L, block.coupling(n, t), Ip);
  }

  // From the gradient of the outputs of an iteration to ds, in place.
  static CAPSFAST_ONCE void differentiate_squash(const Block& block, int64_t t) {
    const int64_t M = block.rows(), Dp = block.call.Dp;
    for (int64_t m = 0; m < M; ++m) {
      const T* const s = block.wide(block.at.sums, t) + m * Dp;
      T* const ds = block.ds(t) + m * Dp;
      const T along = 2 * block.at.slope[t * M + m] * dot(s, ds, Dp), factor = block.at.f[t * M + m];
      for (int64_t d = 0; d < Dp; d += L) store<L>(ds + d, load<L>(ds + d) * factor + load<L>(s + d) * along);
    }
  }

  // From dz of an iteration to the gradient of its logits and, with `query`, to dq.
  static CAPSFAST_ONCE void iteration_gradients(const Block& block, int64_t t, bool query) {
    const SharedProblem& p = block.p;
    const int64_t Kp = block.call.Kp, Ip = block.call.Ip;
    const bool prior = block.call.need_logits && (p.accumulate || t == 0);
    for (int64_t n = 0; n < block.samples; ++n) {
      T *const c = block.coupling(n, t), *const dl = block.dl(n, t);
      block.prefetch(n, p.gradient_last ? 0 : t, p.gradient_last ? 1 : p.iterations);
      if (!query && !prior) continue;
      const T* const dz = block.dZ(t) + n * p.J * Kp;
      product(p.J, dz, Kp, 1, p.K, block.Ut(n), Ip, block.vectors(n), dl, Ip);
      differentiate(block, n, c, dl);
      if (prior) {
        for (int64_t j = 0; j < p.J; ++j) add_rows(dl + j * Ip, block.vectors(n) * L, block.dlogits(n) + j * Ip);
      }
      if (query) {
        T* const dq = block.dq(t - 1) + n * p.J * Kp;
        const bool add = p.accumulate && t < p.iterations - 1;
        if (add) copy_rows(block.dq(t) + n * p.J * Kp, Kp, p.J, Kp, dq, Kp);
        product(p.J, dl, Ip, 1, block.count[n], block.U(n), block.row(), Kp / L, dq, Kp, add);
      }
    }
  }

  // du_i = sum_tj (c_ij dz_j + dl_ij q_j), of all iterations at once.
  static CAPSFAST_ONCE void input_gradients(const Block& block, int64_t n, int64_t first) {
    const SharedProblem& p = block.p;
    const int64_t Kp = block.call.Kp, Ip = block.call.Ip, size = p.J * Kp;
    const int64_t sets = first == 0 ? block.sets() : 1, bytes = size * static_cast<int64_t>(sizeof(T));
    T* const vectors = block.at.vectors;
    for (int64_t set = 0; set < sets; ++set) {
      const T* const from = block.of(block.at.back, first + set);
      __builtin_memcpy(vectors + set * size, from + n * size, static_cast<size_t>(bytes));
    }
    T* const du = block.call.du + (block.b0 + n) * p.I * p.K;
    // Whether rows are read and written in place depends on the same.
    T* const to = block.call.in_place ? du : block.at.du;
    const T* const factors = block.coupling(n, first);
    if (block.call.past_cache) {
      SharedRows<T>::template product<true>(block.count[n], factors, 1, Ip, sets * p.J, vectors, Kp, Kp / L, to, Kp);
    } else {
      product(block.count[n], factors, 1, Ip, sets * p.J, vectors, Kp, Kp / L, to, Kp);
    }
    if (block.call.in_place) return;
    const int64_t* const index = block.index + n * p.I;
    int64_t done = 0;
    for (int64_t i = 0; i < p.I; ++i) {
      const bool here = done < block.count[n] && index[done] == i;
      for (int64_t k = 0; k < p.K; ++k) du[i * p.K + k] = here ? to[done * Kp + k] : T(0);
      done += here;
    }
  }

  static CAPSFAST_ONCE void logit_gradients(const Block& block, int64_t n, const SharedSums<T>& sums) {
    const SharedProblem& p = block.p;
    const int64_t* const index = block.index + n * p.I;
    T* const own = block.call.dlogits == nullptr ? nullptr : block.call.dlogits + (block.b0 + n) * p.I * p.J;
    if (own != nullptr) __builtin_memset(own, 0, static_cast<size_t>(p.I * p.J) * sizeof(T));
    for (int64_t i = 0; i < block.count[n]; ++i) {
      for (int64_t j = 0; j < p.J; ++j) {
        const T gradient = block.dlogits(n)[j * block.call.Ip + i];
        const int64_t to = index[i] * p.J + j;
        if (own != nullptr) {
          own[to] = gradient;
        } else {
          sums.dlogits[to] += static_cast<double>(gradient);
        }
      }
    }
  }
};
