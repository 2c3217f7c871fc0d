// Routing with one matrix (see ../shared_routing.h), a block of samples at a time, which stays in the cache for all
// iterations. All sums are products of matrices of a few rows: rows of coefficients times rows of vectors.

template <class T>
struct SharedRouting {
  static constexpr int L = kLanes<T>;
  static constexpr int kRows = 4;
  static constexpr int kColumns = kRegisters / 8;  // with kRows they take half of the registers
  using V = Vec<T, L>;

  // Row m of c is the sum over k < n of a[m am + k ak] times row k of b; N vectors of each row.
  template <int M, int N>
  static CAPSFAST_INLINE void tile(const T* a, int64_t am, int64_t ak, int64_t n, const T* b, int64_t ldb, T* c,
                                   int64_t ldc, bool add) {
    V sum[M][N];
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
      for (int l = 0; l < N; ++l) sum[m][l] = add ? load<L>(c + m * ldc + l * L) : V{};
    }
    for (int64_t k = 0; k < n; ++k, a += ak, b += ldb) {
      V x[N];
#pragma GCC unroll 4
      for (int l = 0; l < N; ++l) x[l] = load<L>(b + l * L);
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) {
        const T factor = a[m * am];
#pragma GCC unroll 4
        for (int l = 0; l < N; ++l) sum[m][l] += x[l] * factor;
      }
    }
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
      for (int l = 0; l < N; ++l) store<L>(c + m * ldc + l * L, sum[m][l]);
    }
  }

  template <int M>
  static CAPSFAST_ONCE void rows(const T* a, int64_t am, int64_t ak, int64_t n, const T* b, int64_t ldb,
                                 int64_t vectors, T* c, int64_t ldc, bool add) {
    for (; vectors >= kColumns; vectors -= kColumns, b += kColumns * L, c += kColumns * L)
      tile<M, kColumns>(a, am, ak, n, b, ldb, c, ldc, add);
    for (; vectors > 0; --vectors, b += L, c += L) tile<M, 1>(a, am, ak, n, b, ldb, c, ldc, add);
  }

  // c [M][vectors L] = (c if `add`) + a [M][n] b [n][vectors L]; element (m, k) of a is a[m am + k ak].
  static void product(int64_t M, const T* a, int64_t am, int64_t ak, int64_t n, const T* b, int64_t ldb,
                      int64_t vectors, T* c, int64_t ldc, bool add = false) {
    for (; M >= kRows; M -= kRows, a += kRows * am, c += kRows * ldc)
      rows<kRows>(a, am, ak, n, b, ldb, vectors, c, ldc, add);
    if (M == 3) rows<3>(a, am, ak, n, b, ldb, vectors, c, ldc, add);
    if (M == 2) rows<2>(a, am, ak, n, b, ldb, vectors, c, ldc, add);
    if (M == 1) rows<1>(a, am, ak, n, b, ldb, vectors, c, ldc, add);
  }

  // A block of samples, packed.
  struct Block {
    const SharedCall<T>& call;
    const SharedProblem& p;
    const SharedScratch<T>& at;
    int64_t b0, samples;
    int64_t* index;  // [samples][I]: the input capsules that are not masked
    int64_t* count;  // [samples]: how many
    bool in_place;   // the rows of u are read where they are

    Block(const SharedCall<T>& call, const SharedScratch<T>& at, int64_t b0, int64_t end, int64_t* index)
        : call(call),
          p(*call.problem),
          at(at),
          b0(b0),
          samples(b0 + call.samples < end ? call.samples : end - b0),
          index(index + call.samples),
          count(index),
          in_place(p.mask.data == nullptr && p.K == call.Kp) {}

    int64_t rows() const { return samples * p.J; }
    int64_t vectors(int64_t n) const { return (count[n] + L - 1) / L; }
    const T* given(int64_t n) const { return static_cast<const T*>(p.u.data) + (b0 + n) * p.u.stride[0]; }
    // The input capsules of a sample that are not masked, and the length of a row.
    const T* U(int64_t n) const { return in_place ? given(n) : at.U + n * call.Ip * call.Kp; }
    int64_t row() const { return in_place ? p.u.stride[1] : call.Kp; }
    // Asks for a part of the input of the next block, so that it comes from memory while this one is worked on.
    void prefetch(int64_t n, int64_t part, int64_t parts) const {
      if (b0 + samples + n >= p.B) return;
      const T* const next = given(samples + n);
      for (int64_t i = p.I * part / parts; i < p.I * (part + 1) / parts; ++i) {
        for (int64_t k = 0; k < p.K; k += 64 / static_cast<int64_t>(sizeof(T)))
          __builtin_prefetch(next + i * p.u.stride[1] + k, 0, 2);
      }
    }
    T* Ut(int64_t n) const { return at.Ut + n * call.Ip * call.Kp; }
    T* of(T* array, int64_t t) const { return array + t * rows() * call.Kp; }
    // What multiplies vectors in du [J][Ip]: the coupling of iteration t, and for t > 0 the gradient of its logits.
    T* coupling(int64_t n, int64_t t) const { return at.coefficients + (n * p.kept() + t) * p.J * call.Ip; }
    T* dl(int64_t n, int64_t t) const { return t == 0 ? at.dl : coupling(n, p.iterations + t - 1); }
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
      if (!block.in_place) copy_valid(block, n, index, count, at_own(block, n));
      const T* const U = block.U(n);
      T* const Ut = block.Ut(n);
      for (int64_t i = 0; i < padded; i += L) {
        const int64_t there = count - i < L ? count - i : L;
        for (int64_t k = 0; k < Kp; k += L) {
          V m[L];
#pragma GCC unroll 16
          for (int l = 0; l < L; ++l) m[l] = l < there ? load<L>(U + (i + l) * block.row() + k) : V{};
          transpose<T, L>(m);
#pragma GCC unroll 16
          for (int l = 0; l < L; ++l) store<L>(Ut + (k + l) * Ip + i, m[l]);
        }
      }
      pack_logits(block, n, padded);
    }
  }

  static T* at_own(const Block& block, int64_t n) { return block.at.U + n * block.call.Ip * block.call.Kp; }

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
      T* const to = block.at.logits + (n * p.J + j) * block.call.Ip;
      for (int64_t i = 0; i < block.count[n]; ++i) to[i] = from[index[i] * p.logits.stride[1] + j * p.logits.stride[2]];
      for (int64_t i = block.count[n]; i < padded; ++i) to[i] = 0;
    }
  }

  // The coupling coefficients [J][Ip] of sample n in iteration t; q [J][Kp] is what it scores with.
  static CAPSFAST_ONCE void couple(const Block& block, int64_t n, int64_t t, const T* q, T* c) {
    const SharedProblem& p = block.p;
    const int64_t Ip = block.call.Ip, vectors = block.vectors(n);
    const bool prior = p.logits.data != nullptr && (p.accumulate || t == 0);
    if (t > 0) product(p.J, q, block.call.Kp, 1, p.K, block.Ut(n), Ip, vectors, c, Ip);
    const T* logits = block.at.logits + n * p.J * Ip;
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

  static CAPSFAST_INLINE T dot(const T* x, const T* y, int64_t size) {
    V total{};
    for (int64_t k = 0; k < size; k += L) total += load<L>(x + k) * load<L>(y + k);
    return sum<T, L>(total);
  }

  // y += factor x
  static CAPSFAST_INLINE void add_scaled(T factor, const T* x, int64_t size, T* y) {
    for (int64_t k = 0; k < size; k += L) store<L>(y + k, load<L>(y + k) + load<L>(x + k) * factor);
  }

  // Adds the agreement with the outputs of iteration t to q of the next.
  static void next_query(const Block& block, int64_t t, const T* factors) {
    const int64_t Kp = block.call.Kp;
    const T *const Y = block.of(block.at.Y, t), *const before = block.of(block.at.q, t);
    T* const q = block.of(block.at.q, t + 1);
    const bool add = block.p.accumulate && t > 0;
    for (int64_t m = 0; m < block.rows(); ++m) {
      for (int64_t k = m * Kp; k < (m + 1) * Kp; k += L) {
        const V y = load<L>(Y + k) * factors[m];
        store<L>(q + k, add ? load<L>(before + k) + y : y);
      }
    }
  }

  static void copy_rows(const T* from, int64_t from_size, int64_t count, int64_t size, T* to, int64_t to_size) {
    for (int64_t m = 0; m < count; ++m) {
      __builtin_memcpy(to + m * to_size, from + m * from_size, static_cast<size_t>(size) * sizeof(T));
      for (int64_t k = size; k < to_size; ++k) to[m * to_size + k] = 0;
    }
  }

  static void forward(const SharedCall<T>& call, int64_t begin, int64_t end, T* memory, int64_t* index) {
    const SharedProblem& p = *call.problem;
    const SharedScratch<T> at(call, memory);
    const int64_t Kp = call.Kp, Dp = call.Dp, r = p.iterations, vectors = Kp / L;
    const T eps = static_cast<T>(p.eps), scale = static_cast<T>(p.scale);
    T* const c = at.dl;
    for (int64_t b0 = begin; b0 < end; b0 += call.samples) {
      const Block block(call, at, b0, end, index);
      const int64_t M = block.rows();
      pack(block);
      for (int64_t t = 0; t < r; ++t) {
        T *const Z = block.of(at.Z, t), *const Y = block.of(at.Y, t);
        for (int64_t n = 0; n < block.samples; ++n) {
          couple(block, n, t, block.of(at.q, t) + n * p.J * Kp, c);
          block.prefetch(n, 2 * t, 2 * r);
          product(p.J, c, call.Ip, 1, block.count[n], block.U(n), block.row(), vectors, Z + n * p.J * Kp, Kp);
          block.prefetch(n, 2 * t + 1, 2 * r);
        }
        copy_rows(Z, Kp, M, p.K, call.kept + (t * p.B + b0) * p.J * p.K, p.K);
        if (t == r - 1) break;
        product(M, Z, Kp, 1, p.K, call.G, Kp, vectors, Y, Kp);
        copy_rows(Y, Kp, M, p.K, call.kept + ((r + t) * p.B + b0) * p.J * p.K, p.K);
        for (int64_t m = 0; m < M; ++m) at.f[m] = scale * radial(p.squash, length(Z, Y, m, Kp), eps);
        next_query(block, t, at.f);
      }
      product(M, block.of(at.Z, r - 1), Kp, 1, p.K, call.St, Dp, Dp / L, at.s, Dp);
      for (int64_t m = 0; m < M; ++m) {
        T *const s = at.s + m * Dp, factor = radial(p.squash, dot(s, s, Dp), eps);
        for (int64_t d = 0; d < Dp; d += L) store<L>(s + d, load<L>(s + d) * factor);
      }
      copy_rows(at.s, Dp, M, p.D, call.v + b0 * p.J * p.D, p.D);
    }
  }

  // |S z|^2 of row m. Rounding may take it below 0.
  static CAPSFAST_INLINE T length(const T* Z, const T* Y, int64_t m, int64_t Kp) {
    const T n = dot(Z + m * Kp, Y + m * Kp, Kp);
    return n < 0 ? T(0) : n;
  }

  static void backward(const SharedCall<T>& call, int64_t begin, int64_t end, T* memory, int64_t* index,
                       const SharedSums<T>& sums) {
    const SharedProblem& p = *call.problem;
    const SharedScratch<T> at(call, memory);
    const int64_t last = p.iterations - 1, first = p.gradient_last ? last : 0;
    for (int64_t b0 = begin; b0 < end; b0 += call.samples) {
      const Block block(call, at, b0, end, index);
      pack(block);
      restore(block);
      output_gradients(block, sums);
      if (call.need_logits) {
        for (int64_t k = 0; k < call.samples * p.J * call.Ip; k += L) store<L>(at.dlogits + k, V{});
      }
      for (int64_t t = last; t >= first; --t) {
        iteration_gradients(block, t, t > first);
        if (t > first) query_gradients(block, t - 1);
      }
      if (call.need_weight && first < last) {
        product(p.K, at.dY, 1, call.Kp, last * block.rows(), at.Z, call.Kp, call.Kp / L, sums.dG, call.Kp, true);
      }
      for (int64_t n = 0; n < block.samples; ++n) {
        if (call.du != nullptr) input_gradients(block, n, first);
        if (call.need_logits) logit_gradients(block, n, sums);
      }
    }
  }

  // What the forward kept, and what follows from it: the factors of the squash and q.
  static CAPSFAST_ONCE void restore(const Block& block) {
    const SharedProblem& p = block.p;
    const int64_t M = block.rows(), Kp = block.call.Kp, r = p.iterations;
    const T eps = static_cast<T>(p.eps), scale = static_cast<T>(p.scale);
    for (int64_t t = 0; t < r; ++t) {
      T *const Z = block.of(block.at.Z, t), *const Y = block.of(block.at.Y, t), *const f = block.at.f + t * M;
      copy_rows(block.call.saved + (t * p.B + block.b0) * p.J * p.K, p.K, M, p.K, Z, Kp);
      if (t == r - 1) break;
      copy_rows(block.call.saved + ((r + t) * p.B + block.b0) * p.J * p.K, p.K, M, p.K, Y, Kp);
      for (int64_t m = 0; m < M; ++m) {
        const T n = length(Z, Y, m, Kp);
        f[m] = scale * radial(p.squash, n, eps);
        block.at.slope[t * M + m] = scale * radial_derivative(p.squash, n, eps);
      }
      next_query(block, t, f);
    }
  }

  // From dv to dz of the last iteration, and its part of dS.
  static CAPSFAST_ONCE void output_gradients(const Block& block, const SharedSums<T>& sums) {
    const SharedProblem& p = block.p;
    const int64_t M = block.rows(), Kp = block.call.Kp, Dp = block.call.Dp;
    const T eps = static_cast<T>(p.eps);
    T *const Z = block.of(block.at.Z, p.iterations - 1), *const ds = block.at.ds;
    product(M, Z, Kp, 1, p.K, block.call.St, Dp, Dp / L, block.at.s, Dp);
    copy_rows(block.call.dv + block.b0 * p.J * p.D, p.D, M, p.D, ds, Dp);
    for (int64_t m = 0; m < M; ++m) {
      const T *const s = block.at.s + m * Dp, n = dot(s, s, Dp);
      T* const at = ds + m * Dp;
      const T along = 2 * radial_derivative(p.squash, n, eps) * dot(s, at, Dp), factor = radial(p.squash, n, eps);
      for (int64_t d = 0; d < Dp; d += L) store<L>(at + d, load<L>(at + d) * factor + load<L>(s + d) * along);
    }
    product(M, ds, Dp, 1, p.D, block.call.S, Kp, Kp / L, block.of(block.at.dZ, p.iterations - 1), Kp);
    if (block.call.need_weight) product(p.D, ds, 1, Dp, M, Z, Kp, Kp / L, sums.dS, Kp, true);
  }

  // From dz of an iteration to the gradient of its logits and, with `query`, to dq.
  static CAPSFAST_ONCE void iteration_gradients(const Block& block, int64_t t, bool query) {
    const SharedProblem& p = block.p;
    const int64_t Kp = block.call.Kp, Ip = block.call.Ip;
    const bool prior = block.call.need_logits && (p.accumulate || t == 0);
    for (int64_t n = 0; n < block.samples; ++n) {
      T *const c = block.coupling(n, t), *const dl = block.dl(n, t);
      couple(block, n, t, block.of(block.at.q, t) + n * p.J * Kp, c);
      block.prefetch(n, t, p.iterations);
      if (!query && !prior) continue;
      const T* const dz = block.of(block.at.dZ, t) + n * p.J * Kp;
      product(p.J, dz, Kp, 1, p.K, block.Ut(n), Ip, block.vectors(n), dl, Ip);
      differentiate(block, n, c, dl);
      if (prior) {
        for (int64_t j = 0; j < p.J; ++j)
          add_scaled(T(1), dl + j * Ip, block.vectors(n) * L, block.dlogits(n) + j * Ip);
      }
      // With logits that add up, the outputs of an iteration count in all that follow.
      if (query) {
        product(p.J, dl, Ip, 1, block.count[n], block.U(n), block.row(), Kp / L, block.at.dq + n * p.J * Kp, Kp,
                p.accumulate && t < p.iterations - 1);
      }
    }
  }

  // From dq to dz of iteration t: q = f(n) y, n = z . y, y = G z.
  static CAPSFAST_ONCE void query_gradients(const Block& block, int64_t t) {
    const int64_t M = block.rows(), Kp = block.call.Kp;
    const T *const Z = block.of(block.at.Z, t), *const Y = block.of(block.at.Y, t), *const dq = block.at.dq;
    T *const dY = block.of(block.at.dY, t), *const dZ = block.of(block.at.dZ, t), *const dn = block.at.slope + t * M;
    for (int64_t m = 0; m < M; ++m) {
      dn[m] *= dot(dq + m * Kp, Y + m * Kp, Kp);
      const T f = block.at.f[t * M + m];
      for (int64_t k = m * Kp; k < (m + 1) * Kp; k += L) store<L>(dY + k, load<L>(dq + k) * f + load<L>(Z + k) * dn[m]);
    }
    product(M, dY, Kp, 1, block.p.K, block.call.G, Kp, Kp / L, dZ, Kp);
    for (int64_t m = 0; m < M; ++m) add_scaled(dn[m], Y + m * Kp, Kp, dZ + m * Kp);
  }

  // du_i = sum_tj (c_ij dz_j + dl_ij q_j), of all iterations at once.
  static CAPSFAST_ONCE void input_gradients(const Block& block, int64_t n, int64_t first) {
    const SharedProblem& p = block.p;
    const int64_t Kp = block.call.Kp, Ip = block.call.Ip, size = p.J * Kp, r = p.iterations;
    const int64_t sets = first == 0 ? p.kept() : 1, bytes = size * static_cast<int64_t>(sizeof(T));
    T* const vectors = block.at.vectors;
    for (int64_t set = 0; set < sets; ++set) {
      const int64_t t = first + set;
      const T* from = t < r ? block.of(block.at.dZ, t) : block.of(block.at.q, t - r + 1);
      __builtin_memcpy(vectors + set * size, from + n * size, static_cast<size_t>(bytes));
    }
    T* const du = block.call.du + (block.b0 + n) * p.I * p.K;
    // Whether rows are read and written in place depends on the same.
    T* const to = block.in_place ? du : block.at.du;
    product(block.count[n], block.coupling(n, first), 1, Ip, sets * p.J, vectors, Kp, Kp / L, to, Kp);
    if (block.in_place) return;
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
