// The two steps of a small batch that need the weight: making its votes, and at the end of the backward du and dW from
// dvotes. The lanes are input capsules. Between the two the votes are routed by the passes of the lanes layout.
//
// The weights of a block of L input capsules are transposed to lanes, those of a few output capsules at a time, and serve
// all samples. Then a vote takes K multiply-adds for L input capsules and nothing has to be added up across lanes.

template <class T>
struct SmallBatch {
  static constexpr int L = kLanes<T>;
  static constexpr int kAhead = 64;  // votes whose place is asked for ahead of writing them: each sample's are a stream
  static constexpr int kTogether = kRegisters >= 32 ? 8 : 4;  // sums that are formed at a time
  using V = Vec<T, L>;
  using Packing = LanesPacking<T>;

  // Input capsules [i0, i0 + count), count at most L, of which block n is made.
  struct Block {
    int64_t n, i0, count;
  };
  static Block block_of(const Problem& p, int64_t n) { return {n, n * L, Packing::min(L, p.I - n * L)}; }

  // Where the weights of output capsule j, row r, number k of a pose stand in lanes.
  struct Rows {
    const T* at;
    int64_t output, row, number;  // steps of j, r and k
  };

  struct Runs {
    int64_t count, rows, pitch;
  };

  // [B, I, n] as [I, B, n]: as packing has it where input capsules are the lanes.
  static View by_capsule(View view) {
    const int64_t sample = view.stride[0];
    view.stride[0] = view.stride[1];
    view.stride[1] = sample;
    return view;
  }

  // Copies the poses of a block to at.u [B][P K][L], zeros for masked ones even if they hold NaN.
  static void poses(const Problem& p, const Block& block, const SmallBatchScratch<T>& at) {
    const int64_t size = p.pose_size();
    for (int64_t b = 0; b < p.B; ++b) {
      T* u = at.u + b * size * L;
      Packing::pack(by_capsule(p.u), block.i0, block.count, b, 1, size, at.buffer, u);
      if (p.mask.data == nullptr) continue;
      for (int64_t l = 0; l < L; ++l) at.valid[b * L + l] = l < block.count && p.mask.at(b, block.i0 + l) ? T(1) : T(0);
      keep_valid(at.valid + b * L, size, u);
    }
  }

  // Makes numbers [rows][L] of masked capsules zeros.
  static void keep_valid(const T* valid, int64_t rows, T* numbers) {
    const V ok = load<L>(valid);
    for (int64_t n = 0; n < rows * L; n += L) store<L>(numbers + n, ok > V{} ? load<L>(numbers + n) : V{});
  }

  // Transposes the weights of a block and of output capsules [j0, j1) to at.weight.
  static Rows weights(const Problem& p, const Block& block, int64_t j0, int64_t j1, const SmallBatchScratch<T>& at) {
    const int64_t *stride = p.weight.stride, R = p.R(), size = R * p.K;
    const bool plain = p.weight.storage == kStorage<T>;
    const T* data = static_cast<const T*>(p.weight.data);
    const T* from[L] = {};
    const auto transpose_run = [&](int64_t offset, int64_t count, T* to) {
      for (int64_t l = 0; l < block.count; ++l) from[l] = data + (block.i0 + l) * stride[0] + offset;
      Packing::interleave(from, block.count, count, to);
    };
    if (plain && stride[3] == 1 && stride[2] == p.K) {
      const int64_t together = stride[1] == size ? j1 - j0 : 1;
      for (int64_t j = j0; j < j1; j += together)
        transpose_run(j * stride[1], together * size, at.weight + (j - j0) * size * L);
      return {at.weight, size, p.K, 1};
    }
    if (plain && stride[2] == 1) {
      // Rows lie side by side, as in weights that are stored [.., K, D].
      for (int64_t j = j0; j < j1; ++j) {
        for (int64_t k = 0; k < p.K; ++k)
          transpose_run(j * stride[1] + k * stride[3], R, at.weight + ((j - j0) * size + k * R) * L);
      }
      return {at.weight, size, 1, R};
    }
    for (int64_t l = 0; l < block.count; ++l) {
      T* copy = at.buffer + l * (j1 - j0) * size;
      gather<T>(p.weight, (block.i0 + l) * stride[0] + j0 * stride[1], {j1 - j0, R, p.K},
                {stride[1], stride[2], stride[3]}, copy);
      from[l] = copy;
    }
    Packing::interleave(from, block.count, (j1 - j0) * size, at.weight);
    return {at.weight, size, p.K, 1};
  }

  // For each of S samples: x [r1 - r][L] = rows r to r1 of w [R, K] times u [K][L], N at a time and what is left in half as
  // many. The poses and votes of two samples are next_u and next_x apart.
  template <int N, int S>
  static CAPSFAST_INLINE void products(const Rows& w, const T* from, const T* u, int64_t next_u, int64_t K, int64_t r,
                                       int64_t r1, T* x, int64_t next_x) {
    for (; r + N <= r1; r += N) {
      V a[S][N] = {};
      for (int64_t k = 0; k < K; ++k) {
        V uk[S];
#pragma GCC unroll 4
        for (int s = 0; s < S; ++s) uk[s] = load<L>(u + s * next_u + k * L);
        const T* wk = from + (r * w.row + k * w.number) * L;
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) {
          const V wn = load<L>(wk + n * w.row * L);
#pragma GCC unroll 4
          for (int s = 0; s < S; ++s) a[s][n] += wn * uk[s];
        }
      }
#pragma GCC unroll 4
      for (int s = 0; s < S; ++s) {
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) {
          T* to = x + s * next_x + (r + n) * L;
          store<L>(to, a[s][n]);
          __builtin_prefetch(to + kAhead * L, 1, 2);
        }
      }
    }
    if constexpr (N > 1) products<N / 2, S>(w, from, u, next_u, K, r, r1, x, next_x);
  }

  // The votes of S samples.
  template <int S>
  static CAPSFAST_INLINE void votes_of(const Problem& p, const Rows& w, int64_t j0, int64_t j1, const T* u, T* x,
                                       int64_t next_x) {
    const int64_t R = p.R();
    for (int64_t j = 0; j < j1 - j0; ++j) {
      for (int64_t pose = 0; pose < p.P; ++pose)
        products<kTogether, S>(w, w.at + j * w.output * L, u + pose * p.K * L, p.pose_size() * L, p.K, 0, R,
                               x + (j * p.D + pose * R) * L, next_x);
    }
  }

  // See Kernels.
  static void fold(const Sum<T>& lanes, const T* factor, int64_t rows, int64_t size, const Sum<T>& to) {
    for (int64_t n = 0; n < rows * size; ++n) {
      V x = load<L>(lanes.high + n * L) + load<L>(lanes.low + n * L);
      if (factor != nullptr) x *= load<L>(factor + n / size * L);
      add_exactly(sum<T, L>(x), to.high + n, to.low + n);
    }
  }

  // Adds up groups of K neighbouring lanes. Lane g K + q of the result is the sum of group g of m[q]. Overwrites m.
  template <int K, int H = K / 2>
  static CAPSFAST_INLINE V group_sums(V* m) {
    if constexpr (H >= 1) {
#pragma GCC unroll 16
      for (int q = 0; q < H; ++q)
        m[q] = swap_blocks<T, L, H, false>(m[q], m[q + H]) + swap_blocks<T, L, H, true>(m[q], m[q + H]);
      return group_sums<K, H / 2>(m);
    } else {
      return m[0];
    }
  }

  // Transposes the matrix of L / K x L / K blocks of K lanes.
  template <int K, int H = L / 2>
  static CAPSFAST_INLINE void transpose_blocks(V* m) {
    if constexpr (H >= K) {
      constexpr int kStep = H / K;
#pragma GCC unroll 16
      for (int i = 0; i < L / K; ++i) {
        if ((i / kStep) % 2 == 0) {
          const V a = m[i], b = m[i + kStep];
          m[i] = swap_blocks<T, L, H, false>(a, b);
          m[i + kStep] = swap_blocks<T, L, H, true>(a, b);
        }
      }
      transpose_blocks<K, H / 2>(m);
    }
  }

  // Asks for as many weights of the next block as one step of this one reads, in the order of memory: the weights of L input
  // capsules are read side by side, a piece of each at a time, which no processor foresees. Nothing if next is null.
  static CAPSFAST_INLINE void ask(const T* next, int64_t step) {
    if (next == nullptr) return;
#pragma GCC unroll 16
    for (int l = 0; l < L; ++l) __builtin_prefetch(next + (step * L + l) * L, 0, 2);
  }

  // The votes of a single sample, without transposing the weights: L / K rows (j, d) of K numbers at a time, in one vector
  // of each input capsule. Products are added up over the numbers and lined up over the input capsules at once.
  // from[l]: the weights of input capsule l. rows: a multiple of L / K. next: what ask() takes.
  template <int K>
  static CAPSFAST_INLINE void votes_of_one(const T* const* from, const T* next, const T* u, int64_t rows, T* x) {
    constexpr int G = L / K;
    V pose[L];
    for (int l = 0; l < L; ++l) {
      T repeated[L];
      for (int n = 0; n < L; ++n) repeated[n] = u[n % K * L + l];
      pose[l] = load<L>(repeated);
    }
    for (int64_t row = 0; row < rows; row += G) {
      ask(next, row / G);
      V votes[G];
#pragma GCC unroll 16
      for (int c = 0; c < G; ++c) {
        V m[K];
#pragma GCC unroll 16
        for (int q = 0; q < K; ++q) m[q] = load<L>(from[c * K + q] + row * K) * pose[c * K + q];
        votes[c] = group_sums<K>(m);
      }
      transpose_blocks<K>(votes);
#pragma GCC unroll 16
      for (int g = 0; g < G; ++g) store<L>(x + (row + g) * L, votes[g]);
    }
  }

  // The votes of several: L / K rows are transposed at a time and stay in registers for all samples.
  template <int K>
  static CAPSFAST_INLINE void votes_of_rows(const T* const* from, const T* next, const T* u, int64_t rows,
                                            int64_t samples, int64_t next_x, T* x) {
    constexpr int G = L / K;
    for (int64_t row = 0; row < rows; row += G) {
      ask(next, row / G);
      V w[L];
#pragma GCC unroll 16
      for (int l = 0; l < L; ++l) w[l] = load<L>(from[l] + row * K);
      transpose<T, L>(w);
      T* to = x + row * L;
      for (int64_t b = 0; b < samples; ++b, to += next_x) {
        V even[G] = {}, odd[G] = {};
#pragma GCC unroll 16
        for (int k = 0; k < K; k += 2) {
          const V u0 = load<L>(u + (b * K + k) * L), u1 = load<L>(u + (b * K + k + 1) * L);
#pragma GCC unroll 16
          for (int g = 0; g < G; ++g) {
            even[g] += w[g * K + k] * u0;
            odd[g] += w[g * K + k + 1] * u1;
          }
        }
#pragma GCC unroll 16
        for (int g = 0; g < G; ++g) {
          store<L>(to + g * L, even[g] + odd[g]);
          __builtin_prefetch(to + (g + kAhead) * L, 1, 2);
        }
      }
    }
  }

  // The votes of one sample where components d of the weight lie side by side, as in weights that are stored [.., K, D]: those
  // of an input capsule along the lanes, then transposed. D is a multiple of L.
  static void votes_of_components(const Problem& p, const Block& block, const T* u, T* x) {
    const int64_t *stride = p.weight.stride, size = p.weight_size();
    // Asks for the next block as ask() does, if the input capsules of this one or those of an output capsule lie together.
    const bool more = block.i0 + 2 * L <= p.I && (stride[0] == size || stride[0] == p.D * p.K);
    for (int64_t j = 0; j < p.J; ++j) {
      const T* const next = !more ? nullptr : weight_of(p, block.i0 + L) + (stride[0] == size ? 0 : j * stride[1]);
      for (int64_t d = 0; d < p.D; d += L) {
        V votes[L] = {};
        for (int64_t l = 0; l < block.count; ++l) {
          const T* w = weight_of(p, block.i0 + l) + j * stride[1] + d;
          for (int64_t k = 0; k < p.K && next != nullptr; ++k)
            __builtin_prefetch(next + (((stride[0] == size ? j : 0) * L + l) * p.D + d) * p.K + k * L, 0, 2);
          V even = V{}, odd = V{};
          int64_t k = 0;
          for (; k + 2 <= p.K; k += 2) {
            even += load<L>(w + k * stride[3]) * u[k * L + l];
            odd += load<L>(w + (k + 1) * stride[3]) * u[(k + 1) * L + l];
          }
          if (k < p.K) even += load<L>(w + k * stride[3]) * u[k * L + l];
          votes[l] = even + odd;
        }
        transpose<T, L>(votes);
#pragma GCC unroll 16
        for (int n = 0; n < L; ++n) store<L>(x + (j * p.D + d + n) * L, votes[n]);
      }
    }
  }
  static bool components_together(const Problem& p) {
    return p.weight.storage == kStorage<T> && p.weight.stride[2] == 1 && p.weight.stride[3] != 1 && p.P == 1 &&
           p.D % L == 0;
  }

  // du of one sample, likewise: the dvotes of an input capsule along the lanes.
  static void pose_gradient_of_components(const Problem& p, const Block& block, const T* dx, int64_t b,
                                          const SmallBatchScratch<T>& at) {
    const int64_t *stride = p.weight.stride, size = p.pose_size();
    T* const du = at.du + b * size * L;
    for (int64_t j = 0; j < p.J; ++j) {
      for (int64_t d = 0; d < p.D; d += L) {
        V g[L];
#pragma GCC unroll 16
        for (int n = 0; n < L; ++n) g[n] = load<L>(dx + (j * p.D + d + n) * L);
        transpose<T, L>(g);
        for (int64_t k = 0; k < p.K; ++k) {
          V products[L];
          for (int64_t l = 0; l < L; ++l) {
            const T* w = weight_of(p, block.i0 + (l < block.count ? l : 0)) + j * stride[1] + k * stride[3] + d;
            products[l] = load<L>(w) * g[l];
          }
          store<L>(du + k * L, load<L>(du + k * L) + sums<T, L>(products));
        }
      }
    }
  }

  // dW of L / K rows at a time, in registers until they are transposed. to[l]: dW of input capsule l, added to if `add`.
  template <int K>
  static CAPSFAST_INLINE void weight_gradient_of_rows(const T* dx, const T* u, int64_t rows, int64_t samples,
                                                      int64_t next_x, bool add, T* const* to) {
    constexpr int G = L / K;
    for (int64_t row = 0; row < rows; row += G) {
      V a[L] = {};
      const T* g = dx + row * L;
      for (int64_t b = 0; b < samples; ++b, g += next_x) {
        V gr[G];
#pragma GCC unroll 16
        for (int n = 0; n < G; ++n) gr[n] = load<L>(g + n * L);
#pragma GCC unroll 16
        for (int k = 0; k < K; ++k) {
          const V uk = load<L>(u + (b * K + k) * L);
#pragma GCC unroll 16
          for (int n = 0; n < G; ++n) a[n * K + k] += gr[n] * uk;
        }
      }
      transpose<T, L>(a);
#pragma GCC unroll 16
      for (int l = 0; l < L; ++l) {
        T* here = to[l] + row * K;
        store<L>(here, add ? load<L>(here) + a[l] : a[l]);
      }
    }
  }

  // du of input capsule l for S samples: each row of the weight times its dvotes, which are strided.
  template <int K, int S>
  static CAPSFAST_INLINE void pose_gradient_of_rows(const Runs& runs, const T* w, const T* dx, int64_t next_x,
                                                    int64_t b, int64_t i, bool valid, const View& du) {
    constexpr int kChains = 4;
    Vec<T, K> a[S][kChains] = {};
    for (int64_t n = 0; n < runs.count; ++n, w += runs.pitch, dx += runs.rows * L) {
      int64_t row = 0;
      for (; row + kChains <= runs.rows; row += kChains) {
#pragma GCC unroll 4
        for (int c = 0; c < kChains; ++c) {
          const Vec<T, K> wc = load<K>(w + (row + c) * K);
#pragma GCC unroll 4
          for (int s = 0; s < S; ++s) a[s][c] += wc * dx[s * next_x + (row + c) * L];
        }
      }
      for (; row < runs.rows; ++row) {
        for (int s = 0; s < S; ++s) a[s][0] += load<K>(w + row * K) * dx[s * next_x + row * L];
      }
    }
    for (int s = 0; s < S; ++s) {
      const auto total = (a[s][0] + a[s][1]) + (a[s][2] + a[s][3]);
      T numbers[K] = {};
      if (valid) store<K>(numbers, total);
      scatter<T>(du, (b + s) * du.stride[0] + i * du.stride[1], {1, 1, K}, {0, 0, 1}, numbers);
    }
  }

  // Calls f(constant K) if whole vectors of rows hold the weights of full blocks: K is 4, 8 or 16 and divides L.
  template <class F>
  static bool with_rows(const Problem& p, const Block& block, int64_t rows, const F& f) {
    if (p.P > 1 || p.K > L || block.count < L || rows % (L / p.K) != 0) return false;
    if constexpr (L >= 8) {
      if (p.K == 8) {
        f(std::integral_constant<int, 8>{});
        return true;
      }
    }
    if constexpr (L >= 4) {
      if (p.K == 4) {
        f(std::integral_constant<int, 4>{});
        return true;
      }
    }
    if constexpr (L >= 16) {
      if (p.K == 16) {
        f(std::integral_constant<int, 16>{});
        return true;
      }
    }
    return false;
  }

  // How the weight of an input capsule lies: `count` runs of `rows` rows, `pitch` apart; none if it is no such thing.
  static Runs runs_of(const Problem& p) {
    const int64_t* stride = p.weight.stride;
    if (p.weight.storage != kStorage<T> || stride[3] != 1 || stride[2] != p.K) return {0, 0, 0};
    if (stride[1] == p.D * p.K) return {1, p.J * p.D, 0};
    return {p.J, p.D, stride[1]};
  }
  static const T* weight_of(const Problem& p, int64_t i) {
    return static_cast<const T*>(p.weight.data) + i * p.weight.stride[0];
  }

  // du of a block, if it can. For more samples transposed weights serve better.
  static bool pose_gradient_of_block(const Problem& p, const Block& block, const T* dx, int64_t sample,
                                     const SmallBatchScratch<T>& at, const View& du) {
    const Runs runs = runs_of(p);
    if (p.B > 2 || runs.count == 0) return false;
    return with_rows(p, block, runs.rows, [&](auto constant) {
      constexpr int K = decltype(constant)::value;
      for (int64_t l = 0; l < L; ++l) {
        const T* w = weight_of(p, block.i0 + l);
        const auto valid = [&](int64_t b) { return p.mask.data == nullptr || at.valid[b * L + l] > 0; };
        if (p.B == 2 && valid(0) == valid(1)) {
          pose_gradient_of_rows<K, 2>(runs, w, dx + l, sample, 0, block.i0 + l, valid(0), du);
          continue;
        }
        for (int64_t b = 0; b < p.B; ++b)
          pose_gradient_of_rows<K, 1>(runs, w, dx + b * sample + l, sample, b, block.i0 + l, valid(b), du);
      }
    });
  }

  // Makes the votes of a block in one of these ways, if it can.
  static bool votes_of_block(const Problem& p, const Block& block, const T* u, int64_t sample, T* x) {
    if (components_together(p)) {
      for (int64_t b = 0; b < p.B; ++b) votes_of_components(p, block, u + b * p.K * L, x + b * sample);
      return true;
    }
    const Runs runs = runs_of(p);
    const bool more = block.i0 + 2 * L <= p.I && p.weight.stride[0] == runs.rows * p.K;
    return runs.count > 0 && with_rows(p, block, runs.rows, [&](auto K) {
             for (int64_t n = 0; n < runs.count; ++n) {
               const T* from[L];
               for (int64_t l = 0; l < L; ++l) from[l] = weight_of(p, block.i0 + l) + n * runs.pitch;
               const T* const next = more ? weight_of(p, block.i0 + L) + n * runs.pitch : nullptr;
               T* to = x + n * runs.rows * L;
               if (p.B == 1) {
                 votes_of_one<decltype(K)::value>(from, next, u, runs.rows, to);
               } else {
                 votes_of_rows<decltype(K)::value>(from, next, u, runs.rows, p.B, sample, to);
               }
             }
           });
  }

  // Writes the votes of blocks [n0, n1) to `votes` [B][ceil(I / L)][J D][L].
  static void votes(const Problem& p, int64_t n0, int64_t n1, T* votes, T* scratch) {
    const SmallBatchScratch<T> at(p, L, scratch);
    const int64_t sample = (p.I + L - 1) / L * p.J * p.D * L;
    for (int64_t n = n0; n < n1; ++n) {
      const Block block = block_of(p, n);
      poses(p, block, at);
      const bool made = votes_of_block(p, block, at.u, sample, votes + n * p.J * p.D * L);
      for (int64_t j0 = made ? p.J : 0; j0 < p.J; j0 += at.outputs) {
        const int64_t j1 = Packing::min(p.J, j0 + at.outputs);
        const Rows w = weights(p, block, j0, j1, at);
        const auto x = [&](int64_t b) { return votes + b * sample + (n * p.J + j0) * p.D * L; };
        const auto u = [&](int64_t b) { return at.u + b * p.pose_size() * L; };
        int64_t b = 0;
        for (; b + 2 <= p.B; b += 2) votes_of<2>(p, w, j0, j1, u(b), x(b), sample);
        if (b < p.B) votes_of<1>(p, w, j0, j1, u(b), x(b), sample);
      }
      for (int64_t b = 0; b < p.B && p.mask.data != nullptr; ++b)
        keep_valid(at.valid + b * L, p.J * p.D, votes + b * sample + n * p.J * p.D * L);
    }
  }

  // For each of S samples: du[k] += sum over rows r < R of w[r][k] g[r], numbers k to K, N at a time and what is left in
  // half as many.
  template <int N, int S>
  static CAPSFAST_INLINE void pose_gradient(const Rows& w, const T* from, const T* g, int64_t next_g, int64_t R,
                                            int64_t k, int64_t K, T* du, int64_t next_u) {
    for (; k + N <= K; k += N) {
      V a[S][N] = {};
      for (int64_t r = 0; r < R; ++r) {
        V gr[S];
#pragma GCC unroll 4
        for (int s = 0; s < S; ++s) gr[s] = load<L>(g + s * next_g + r * L);
        const T* wr = from + (r * w.row + k * w.number) * L;
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) {
          const V wn = load<L>(wr + n * w.number * L);
#pragma GCC unroll 4
          for (int s = 0; s < S; ++s) a[s][n] += wn * gr[s];
        }
      }
#pragma GCC unroll 4
      for (int s = 0; s < S; ++s) {
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) {
          T* to = du + s * next_u + (k + n) * L;
          store<L>(to, load<L>(to) + a[s][n]);
        }
      }
    }
    if constexpr (N > 1) pose_gradient<N / 2, S>(w, from, g, next_g, R, k, K, du, next_u);
  }

  // du of S samples from their dvotes for output capsules [j0, j1).
  template <int S>
  static CAPSFAST_INLINE void pose_gradients(const Problem& p, const Rows& w, int64_t j0, int64_t j1, const T* dx,
                                             int64_t next_x, T* du) {
    const int64_t R = p.R();
    for (int64_t j = 0; j < j1 - j0; ++j) {
      for (int64_t pose = 0; pose < p.P; ++pose)
        pose_gradient<kTogether, S>(w, w.at + j * w.output * L, dx + (j * p.D + pose * R) * L, next_x, R, 0, p.K,
                                    du + pose * p.K * L, p.pose_size() * L);
    }
  }

  // dw[m][k] += the sum over samples and poses of dx[m] u[k], for M rows and numbers k to K, N at a time and what is left in
  // half as many. dx and u: those of the first sample.
  template <int M, int N>
  static CAPSFAST_INLINE void weight_gradient(const Problem& p, const T* dx, int64_t next_x, const T* u, int64_t k,
                                              T* dw) {
    const int64_t K = p.K;
    for (; k + N <= K; k += N) {
      V a[M][N];
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) a[m][n] = load<L>(dw + (m * K + k + n) * L);
      }
      for (int64_t b = 0; b < p.B; ++b) {
        for (int64_t pose = 0; pose < p.P; ++pose) {
          const T *g = dx + b * next_x + pose * p.R() * L, *uk = u + ((b * p.P + pose) * K + k) * L;
          V gm[M];
#pragma GCC unroll 4
          for (int m = 0; m < M; ++m) gm[m] = load<L>(g + m * L);
#pragma GCC unroll 8
          for (int n = 0; n < N; ++n) {
            const V un = load<L>(uk + n * L);
#pragma GCC unroll 4
            for (int m = 0; m < M; ++m) a[m][n] += gm[m] * un;
          }
        }
      }
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) store<L>(dw + (m * K + k + n) * L, a[m][n]);
      }
    }
    if constexpr (N > 1) weight_gradient<M, N / 2>(p, dx, next_x, u, k, dw);
  }

  // Computes du and dW of the input capsules of blocks [n0, n1) from dvotes, of which those of masked capsules are made
  // zeros.
  static void gradients(const SmallBatchGradients<T>& out, const Problem& p, int64_t n0, int64_t n1, T* scratch) {
    const SmallBatchScratch<T> at(p, L, scratch);
    const int64_t R = p.R(), sample = (p.I + L - 1) / L * p.J * p.D * L, size = p.pose_size();
    const bool want_u = out.du.data != nullptr, want_w = out.dweight.data != nullptr;
    for (int64_t n = n0; n < n1; ++n) {
      const Block block = block_of(p, n);
      poses(p, block, at);
      T* const dvotes = out.dvotes + n * p.J * p.D * L;
      for (int64_t b = 0; b < p.B && p.mask.data != nullptr; ++b)
        keep_valid(at.valid + b * L, p.J * p.D, dvotes + b * sample);
      const bool done_u = !want_u || pose_gradient_of_block(p, block, dvotes, sample, at, out.du);
      const bool done_w = !want_w || weight_gradient_of_block(out, p, block, dvotes, sample, at);
      if (done_u && done_w) continue;
      __builtin_memset(at.du, 0, static_cast<size_t>(p.B * size * L) * sizeof(T));
      if (!done_u && p.B == 1 && components_together(p)) pose_gradient_of_components(p, block, dvotes, 0, at);
      for (int64_t j0 = 0; j0 < p.J; j0 += at.outputs) {
        const int64_t j1 = Packing::min(p.J, j0 + at.outputs);
        const T* const dx = dvotes + j0 * p.D * L;
        if (!done_u && !(p.B == 1 && components_together(p))) {
          const Rows w = weights(p, block, j0, j1, at);
          int64_t b = 0;
          for (; b + 2 <= p.B; b += 2) pose_gradients<2>(p, w, j0, j1, dx + b * sample, sample, at.du + b * size * L);
          if (b < p.B) pose_gradients<1>(p, w, j0, j1, dx + b * sample, sample, at.du + b * size * L);
        }
        if (done_w) continue;
        begin_weight(out, p, block, j0, j1, at);
        for (int64_t j = 0; j < j1 - j0; ++j) {
          const T* g = dx + j * p.D * L;
          T* dw = at.dweight + j * R * p.K * L;
          int64_t r = 0;
          for (; r + 2 <= R; r += 2) weight_gradient<2, kTogether>(p, g + r * L, sample, at.u, 0, dw + r * p.K * L);
          if (r < R) weight_gradient<1, kTogether>(p, g + r * L, sample, at.u, 0, dw + r * p.K * L);
        }
        finish_weight(out, p, block, j0, j1, at);
      }
      for (int64_t b = 0; b < p.B && !done_u; ++b) {
        T* du = at.du + b * size * L;
        if (p.mask.data != nullptr) keep_valid(at.valid + b * L, size, du);
        Packing::unpack(du, block.i0, block.count, b, 1, size, at.buffer, by_capsule(out.du));
      }
    }
  }

  // Whether dW is added up where it will stand.
  static bool in_place(const SmallBatchGradients<T>& out) {
    return out.dweight_sum == nullptr && out.dweight.storage == kStorage<T>;
  }
  static T* weight_gradient_of(const SmallBatchGradients<T>& out, const Problem& p, int64_t i, int64_t j) {
    return static_cast<T*>(out.dweight.data) + i * p.weight_size() + j * p.R() * p.K;
  }

  // Writes dW of a block, whole vectors of it, if it can.
  static bool weight_gradient_of_block(const SmallBatchGradients<T>& out, const Problem& p, const Block& block,
                                       const T* dx, int64_t sample, const SmallBatchScratch<T>& at) {
    if (!in_place(out)) return false;
    T* to[L];
    for (int64_t l = 0; l < block.count; ++l) to[l] = weight_gradient_of(out, p, block.i0 + l, 0);
    return with_rows(p, block, p.J * p.D, [&](auto K) {
      weight_gradient_of_rows<decltype(K)::value>(dx, at.u, p.J * p.D, p.B, sample, out.add, to);
    });
  }

  // What dW of a block and of output capsules [j0, j1) begins with, in at.dweight.
  static void begin_weight(const SmallBatchGradients<T>& out, const Problem& p, const Block& block, int64_t j0,
                           int64_t j1, const SmallBatchScratch<T>& at) {
    const int64_t size = (j1 - j0) * p.R() * p.K;
    if (!out.add || !in_place(out)) {
      __builtin_memset(at.dweight, 0, static_cast<size_t>(size * L) * sizeof(T));
      return;
    }
    const T* from[L] = {};
    for (int64_t l = 0; l < block.count; ++l) from[l] = weight_gradient_of(out, p, block.i0 + l, j0);
    Packing::interleave(from, block.count, size, at.dweight);
  }

  // Writes it.
  static void finish_weight(const SmallBatchGradients<T>& out, const Problem& p, const Block& block, int64_t j0,
                            int64_t j1, const SmallBatchScratch<T>& at) {
    const int64_t size = (j1 - j0) * p.R() * p.K, from = j0 * p.R() * p.K;
    if (out.dweight_sum != nullptr) {
      for (int64_t n = 0; n < size; ++n)
        add_exactly(sum<T, L>(load<L>(at.dweight + n * L)), out.dweight_sum + from + n, out.dweight_low + from + n);
      return;
    }
    T* to[L] = {};
    for (int64_t l = 0; l < block.count; ++l)
      to[l] = in_place(out) ? weight_gradient_of(out, p, block.i0 + l, j0) : at.buffer + l * size;
    Packing::deinterleave(at.dweight, block.count, size, to);
    for (int64_t l = 0; l < block.count && !in_place(out); ++l)
      scatter<T>(out.dweight, (block.i0 + l) * p.weight_size() + from, {1, 1, size}, {0, 0, 1}, to[l]);
  }
};
