// The work of the lanes layout on a chunk of input capsules of a tile of samples: its data in lanes, its sums, and what
// the passes make of scores. Nothing here depends on K or on how votes are scored.
#pragma once

#include "../../cpu/vec.inl"
#include "coupling.inl"
#include "lanes_packing.inl"

namespace capsfast::CAPSFAST_TARGET {

// A chunk of input capsules of one tile of samples: tile t, samples [b0, b0 + samples), input capsules [i0, i0 +
// count). weights: [J R K] of each input capsule, `pitch` elements apart. votes [count][J D][L], if votes are given.
// valid [count][L], if there is a mask or the block is not full.
template <class T, int L_>
struct LanesTile {
  static constexpr int L = L_;
  using Packing = LanesPacking<T, L>;
  using Couplings = Coupling<T, L>;

  int64_t t, b0, samples, i0, count;
  const T* weights;
  int64_t pitch;
  const T *votes, *valid;

  CAPSFAST_INLINE const T* valid_of(int64_t i) const {
    return __builtin_expect(valid == nullptr, 1) ? nullptr : valid + i * L;
  }

  // Begins a chunk of at most `most` input capsules of [from, to). Weights that must be copied go to `to_weights`.
  void begin_chunk(const Problem& p, int64_t from, int64_t to, int64_t most, T* to_weights) {
    i0 = from;
    count = Packing::chunk_of(p, from, to, most);
    weights = Packing::weight_chunk(p, from, count, to_weights, &pitch);
  }

  // What begin() has copied for input capsule i.
  template <class At>
  CAPSFAST_INLINE typename Couplings::LaneNumbers numbers(const Problem& p, const At& at, int64_t i,
                                                          const View& dlse = {}) const {
    const auto row = [&](const View& view, const T* rows) { return view.data == nullptr ? nullptr : rows + i * L; };
    return {valid_of(i), row(p.activation, at.activation), row(p.lse, at.lse), row(dlse, at.dlse)};
  }
  template <class At>
  CAPSFAST_INLINE void add_logits(const Problem& p, const T* valid_out, const At& at, int64_t i, T* b) const {
    const bool per_sample = p.logits.stride[0] != 0;
    const T* logits = p.logits.data == nullptr ? nullptr : at.logits + i * p.J * (per_sample ? L : 1);
    per_sample ? Couplings::add(logits, p.J, b) : Couplings::template add<true>(logits, p.J, b);
    Couplings::mask(valid_of(i), valid_out, p.J, Couplings::masked_logit(p.normalize), b);
  }

  // Copies the data of tile `tile` for this chunk to `at`: poses or votes less the center, logits, numbers of input
  // capsules.
  template <class At>
  CAPSFAST_ONCE void begin(const Problem& p, int64_t tile, const T* center, const At& at, const View& dlse = {}) {
    t = tile;
    b0 = t * L;
    samples = Packing::lanes_used(p, t, i0);
    valid = Packing::masked(p, samples) ? at.valid : nullptr;
    votes = Packing::votes_in_place(p, center) ? static_cast<const T*>(p.votes.data) + i0 * p.J * p.D * L : at.u;
    Packing::pack_poses(p, b0, samples, i0, count, center, at.buffer, at.u, at.valid);
    if (p.logits.data != nullptr) Packing::pack_logits(p, b0, samples, i0, count, at.buffer, at.logits);
    if (!p.moments) return;
    Packing::pack_numbers(p.activation, p, b0, samples, i0, count, at.valid, at.buffer, at.activation);
    Packing::pack_numbers(p.lse, p, b0, samples, i0, count, at.valid, at.buffer, at.lse);
    Packing::pack_numbers(dlse, p, b0, samples, i0, count, at.valid, at.buffer, at.dlse);
  }
};

// Sums over a chunk of input capsules, and how they join the sums of a pass.
template <class T, int L_>
struct LanesSums {
  static constexpr int L = L_;
  static constexpr int kTogether = LanesPacking<T, L>::kSums;  // sums that stay in registers over a chunk
  using V = Vec<T, L>;

  static CAPSFAST_INLINE void join(V x, const Sum<T>& sum, int64_t to) {
    V h = load<L>(sum.high + to), l = load<L>(sum.low + to);
    add_exactly(x, &h, &l);
    store<L>(sum.high + to, h);
    store<L>(sum.low + to, l);
  }

  // Adds `rows` rows of a sum of the chunk, from [rows][L], to the sum of the pass from `to` on.
  static CAPSFAST_INLINE void join(const T* from, int64_t rows, const Sum<T>& sum, int64_t to) {
    for (int64_t n = 0; n < rows * L; n += L) join(load<L>(from + n), sum, to + n);
  }

  // Adds the votes of a chunk, [count][J D][L], weighted by e [count][J][L], to the sums of tile t.
  template <bool Q, class Pass>
  static CAPSFAST_INLINE void add_chunk(const Pass& pass, int64_t t, int64_t count, const T* votes, const T* e) {
    for (int64_t j = 0; j < pass.problem->J; ++j) add_rows<Q, kTogether>(pass, t, count, votes, e, j, 0);
  }

 private:
  // Adds components d to D of the votes for output capsule j: N at a time, then half as many for the rest.
  template <bool Q, int N, class Pass>
  static CAPSFAST_INLINE void add_rows(const Pass& pass, int64_t t, int64_t count, const T* votes, const T* e,
                                       int64_t j, int64_t d) {
    const int64_t J = pass.problem->J, D = pass.problem->D;
    const bool squares = Q && pass.second.high != nullptr;
    for (; d + N <= D; d += N) {
      V first[N] = {}, second[N] = {};
      for (int64_t i = 0; i < count; ++i) {
        const T* x = votes + ((i * J + j) * D + d) * L;
        const V c = load<L>(e + (i * J + j) * L);
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) {
          const V v = load<L>(x + n * L), cv = c * v;
          first[n] += cv;
          if (squares) second[n] += cv * v;
        }
      }
      const int64_t to = ((t * J + j) * D + d) * L;
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) {
        join(first[n], pass.first, to + n * L);
        if (squares) join(second[n], pass.second, to + n * L);
      }
    }
    if constexpr (N > 1) add_rows<Q, N / 2>(pass, t, count, votes, e, j, d);
  }
};

// Turns scores into coupling coefficients and the gradient of the logits, and keeps sums that go on from chunk to
// chunk.
template <class T, int L_>
struct LanesCoefficients : LanesSums<T, L_> {
  static constexpr int L = L_;
  using V = Vec<T, L>;
  using Couplings = Coupling<T, L>;
  using Packing = LanesPacking<T, L>;

  // The pointers of AccumulatePass, moved to the tile.
  struct Tile : LanesTile<T, L> {
    const T* center;
    Form<T> score, gradient;
    typename Couplings::OutputNumbers outputs;
  };

  // Turns scores into the coefficients of the sums: b becomes the coupling and, in the backward, dc the gradient of the
  // logits. For the softmax over the input capsules in the forward, b keeps the logits; online() or chunk_online()
  // follows. Not inlined, because registers of the loop over input capsules hold votes.
  static CAPSFAST_ONCE void coefficients(const AccumulatePass<T>& pass, const Tile& tile,
                                         const LanesAccumulateScratch<T>& at, int64_t i, T* b, T* dc) {
    const Problem& p = *pass.problem;
    const int64_t J = p.J, i_of_all = tile.i0 + i;
    const typename Couplings::LaneNumbers lanes = tile.numbers(p, at, i);
    Couplings::add(tile.score.constant, J, b);
    tile.add_logits(p, tile.outputs.valid, at, i, b);
    if (!p.softmax_in()) {
      alignas(sizeof(V)) T lse[L];
      Couplings::normalize(p.normalize, J, p.leaky, lanes.lse, pass.lse.data == nullptr ? nullptr : lse, b);
      if (pass.lse.data != nullptr) Couplings::template put<0>(pass.lse, tile.b0, i_of_all, tile.samples, lse);
    } else if (tile.outputs.in_max != nullptr) {
      Couplings::softmax_in(J, tile.outputs.in_max, tile.outputs.in_scale, b);
    }
    if (tile.gradient.linear == nullptr) {
      if (!p.softmax_in() || tile.outputs.in_max != nullptr) Couplings::weigh(lanes.activation, J, b);
      if (pass.coupling.data != nullptr)
        Couplings::template transfer<true, 0>(pass.coupling, tile.b0, i_of_all, tile.samples, J, b);
      return;
    }
    if (pass.dcoupling.data != nullptr)
      Couplings::template transfer<false, 0>(pass.dcoupling, tile.b0, i_of_all, tile.samples, J, dc);
    Couplings::template differentiate<false>(p, lanes, tile.outputs, b, dc);
  }

  // Multiplies all sums so far by `scale`, after the maximum of output capsule j has grown.
  static CAPSFAST_ONCE void rescale(const AccumulatePass<T>& pass, const Tile& tile,
                                    const LanesAccumulateScratch<T>& at, int64_t j, V scale, bool chunk_sums) {
    const int64_t J = pass.problem->J, D = pass.problem->D;
    const int64_t scalar = (tile.t * J + j) * L, vector = (tile.t * J + j) * D * L;
    multiply(pass.norm, scalar, L, scale);
    multiply(pass.first, vector, D * L, scale);
    if (pass.mass.high != nullptr) multiply(pass.mass, scalar, L, scale);
    if (pass.second.high != nullptr) multiply(pass.second, vector, D * L, scale);
    if (!chunk_sums) return;
    multiply(at.sum + j * D * L, D * L, scale);
    if (pass.mass.high != nullptr) multiply(at.mass + j * L, L, scale);
    if (pass.second.high != nullptr) multiply(at.second + j * D * L, D * L, scale);
  }

  static CAPSFAST_INLINE void multiply(T* to, int64_t count, V scale) {
    for (int64_t n = 0; n < count; n += L) store<L>(to + n, load<L>(to + n) * scale);
  }
  static CAPSFAST_INLINE void multiply(const Sum<T>& sum, int64_t from, int64_t count, V scale) {
    multiply(sum.high + from, count, scale);
    multiply(sum.low + from, count, scale);
  }

  // Softmax over the input capsules, for one input capsule: replaces scores [J][L] by exp(b - max), max the largest so
  // far.
  static CAPSFAST_ONCE void online(const AccumulatePass<T>& pass, const Tile& tile,
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
        rescale(pass, tile, at, j, scale, true);
      }
      const V e = exp<L>(x - now);
      store<L>(at.scores + j * L, e);
      store<L>(at.norm + j * L, norm + e);
    }
  }

  // As online(), for the scores of a whole chunk. Sums are rescaled once, to the maximum of the chunk.
  static void chunk_online(const AccumulatePass<T>& pass, const Tile& tile, const LanesAccumulateScratch<T>& at) {
    const int64_t J = pass.problem->J;
    T* max_of = pass.max + tile.t * J * L;
    for (int64_t j = 0; j < J; ++j) {
      const V before = load<L>(max_of + j * L);
      V now = before;
      for (int64_t i = 0; i < tile.count; ++i) now = max(now, load<L>(at.scores + (i * J + j) * L));
      if (any_different<T, L>(before, now)) rescale(pass, tile, at, j, exp<L>(before - now), false);
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

  static CAPSFAST_INLINE void add_mass(const AccumulatePass<T>& pass, const LanesAccumulateScratch<T>& at, const T* e) {
    if (pass.mass.high != nullptr) Couplings::add(e, pass.problem->J, at.mass);
  }

  // Turns the scores of a whole chunk into coefficients, and sums the coefficients.
  static CAPSFAST_ONCE void chunk_coefficients(const AccumulatePass<T>& pass, const Tile& tile,
                                               const LanesAccumulateScratch<T>& at) {
    const Problem& p = *pass.problem;
    const int64_t size = p.J * L;
    const T* coefficient = tile.gradient.linear != nullptr ? at.dc : at.scores;
    for (int64_t i = 0; i < tile.count; ++i) coefficients(pass, tile, at, i, at.scores + i * size, at.dc + i * size);
    if (p.softmax_in() && tile.outputs.in_max == nullptr) {
      chunk_online(pass, tile, at);
      for (int64_t i = 0; i < tile.count; ++i)
        Couplings::weigh(tile.numbers(p, at, i).activation, p.J, at.scores + i * size);
    }
    for (int64_t i = 0; i < tile.count; ++i) add_mass(pass, at, coefficient + i * size);
  }
};

}  // namespace capsfast::CAPSFAST_TARGET
