// What the passes of the lanes layout make of scores: coupling coefficients, the gradient of the logits, and sums that
// go on from chunk to chunk. Nothing here depends on K or on how votes are scored.
#pragma once

#include "../../cpu/vec.inl"
#include "kernel.h"
#include "coupling.inl"
#include "lanes_packing.inl"
#include "lanes_sums.inl"
#include "lanes_tile.inl"

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
  // logits. For the softmax over the input capsules in the forward, b stays the logits; online() or chunk_online()
  // follows. Not inlined, because registers of the loop over input capsules hold votes.
  static CAPSFAST_ONCE void coefficients(const AccumulatePass<T>& pass, const Tile& tile,
                                         const LanesAccumulateScratch<T>& at, int64_t i, T* b, T* dc) {
    const Problem& p = *pass.problem;
    const int64_t J = p.J, i_of_all = tile.i0 + i;
    const typename Couplings::LaneNumbers lanes = tile.numbers(p, at, i);
    Couplings::add(tile.score.constant, J, b);
    tile.add_logits(p, tile.outputs.valid, at, i, b);
    if (!p.softmax_in()) {
      alignas(sizeof(V)) T found[L];
      Couplings::normalize(p.normalize, J, p.leaky, lanes.lse, pass.lse.data == nullptr ? nullptr : found, b);
      if (pass.lse.data != nullptr) Couplings::template put<0>(pass.lse, tile.b0, i_of_all, tile.samples, found);
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
