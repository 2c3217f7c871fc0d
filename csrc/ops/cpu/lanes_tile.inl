// The part of the work that a pass of the lanes layout does at a time.
#pragma once

#include "../../cpu/vec.inl"
#include "kernel.h"
#include "coupling.inl"
#include "lanes_packing.inl"

// A chunk of input capsules of one tile of samples: tile t, samples [b0, b0 + samples), input capsules [i0, i0 +
// count). weights: [J D K] of each input capsule, `pitch` elements apart. votes [count][J D][L], if votes are given.
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
