// What the passes of the lanes layout make of scores: coupling coefficients, the gradient of the logits, and sums that
// go on from chunk to chunk. Nothing here depends on K or on how votes are scored.
#pragma once

#include "../../cpu/vec.inl"
#include "kernel.h"
#include "coupling.inl"
#include "lanes_packing.inl"
#include "lanes_tile.inl"

template <class T, int L_>
struct LanesCoefficients {
  static constexpr int L = L_;
  using V = Vec<T, L>;
  using Couplings = Coupling<T, L>;
  using Packing = LanesPacking<T, L>;

  // The pointers of AccumulatePass, moved to the tile.
  struct Tile : LanesTile<T, L> {
    const T* center;
    Form<T> score, gradient;
    const T *valid_out, *in_max, *in_scale, *c_dc, *in_dlse;
  };

  // The numbers of input capsule i [L] in `rows`, null if the pass has no such numbers.
  static CAPSFAST_INLINE const T* row(const View& view, const T* rows, int64_t i) {
    return view.data == nullptr ? nullptr : rows + i * L;
  }

  // Turns scores into the coefficients of the sums: b becomes the coupling and, in the backward, dc the gradient of the
  // logits. For the softmax over the input capsules in the forward, b stays the logits; online() or chunk_online()
  // follows. Not inlined, because registers of the loop over input capsules hold votes.
  static CAPSFAST_ONCE void coefficients(const AccumulatePass<T>& pass, const Tile& tile,
                                         const LanesAccumulateScratch<T>& at, int64_t i, T* b, T* dc) {
    const Problem& p = *pass.problem;
    const int64_t J = p.J;
    const bool sample_logits = p.logits.stride[0] != 0;
    const T* logits = p.logits.data == nullptr ? nullptr : at.logits + i * J * (sample_logits ? L : 1);
    const T* activation = row(p.activation, at.activation, i);
    const T masked = Couplings::masked_logit(p.normalize);
    Couplings::add(tile.score.constant, J, b);
    Couplings::add_prior(sample_logits ? nullptr : logits, sample_logits ? logits : nullptr, tile.valid_of(i),
                         tile.valid_out, J, masked, b);
    if (!p.softmax_in()) {
      alignas(sizeof(V)) T found[L];
      Couplings::normalize(
          p.normalize, J, p.leaky, row(p.lse, at.lse, i), pass.lse.data == nullptr ? nullptr : found, b);
      if (pass.lse.data != nullptr) Packing::put(pass.lse, tile.b0, tile.samples, tile.i0 + i, found);
    } else if (tile.in_max != nullptr) {
      Couplings::softmax_in(J, tile.in_max, tile.in_scale, b);
    }
    if (tile.gradient.linear == nullptr) {
      if (!p.softmax_in() || tile.in_max != nullptr) Couplings::weigh(activation, J, b);
      if (pass.coupling.data != nullptr)
        Packing::template transfer<true>(pass.coupling, tile.b0, tile.samples, tile.i0 + i, J, b);
      return;
    }
    Couplings::add(tile.gradient.constant, J, dc);
    if (pass.dcoupling.data != nullptr)
      Packing::template transfer<false>(pass.dcoupling, tile.b0, tile.samples, tile.i0 + i, J, dc);
    Couplings::weigh(activation, J, dc);
    if (p.normalize == Normalize::out) {
      Couplings::softmax_out_backward(J, b, row(pass.dlse, at.dlse, i), dc);
    } else if (p.softmax_in()) {
      Couplings::softmax_in_backward(J, tile.in_scale, b, tile.c_dc, tile.in_dlse, dc);
    } else {
      Couplings::derivative(p.normalize, J, b, dc);
      if (p.normalize == Normalize::none) Couplings::mask(tile.valid_of(i), tile.valid_out, J, masked, dc);
    }
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
    if (p.softmax_in() && tile.in_max == nullptr) {
      chunk_online(pass, tile, at);
      for (int64_t i = 0; i < tile.count; ++i)
        Couplings::weigh(row(p.activation, at.activation, i), p.J, at.scores + i * size);
    }
    if (pass.first.high == nullptr) return;
    for (int64_t i = 0; i < tile.count; ++i) add_mass(pass, at, coefficient + i * size);
  }

  static CAPSFAST_INLINE void join(V x, const Sum<T>& sum, int64_t to) {
    V h = load<L>(sum.high + to), l = load<L>(sum.low + to);
    add_exactly(x, &h, &l);
    store<L>(sum.high + to, h);
    store<L>(sum.low + to, l);
  }

  // Adds `rows` rows of a sum of the chunk, from [rows][L], to the sum of the pass from `to` on.
  static void join(const T* from, int64_t rows, const Sum<T>& sum, int64_t to) {
    for (int64_t n = 0; n < rows * L; n += L) join(load<L>(from + n), sum, to + n);
  }
};
