// Parts of a call along its samples: slices of votes that are given, tiles, and a small batch beside them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "context.h"
#include "samples.h"

namespace capsfast::driver {

template <class T>
Slices slices_of(const Problem& p, bool shared_logits_gradient) {
  if (!p.votes_given || p.capsule_lanes) return {};
  return make_slices(p, tile_kernels<T>(isa()).L, num_threads(), sizeof(T), shared_logits_gradient);
}

template <class T>
Parts parts_of(const Problem& p) {
  return make_parts(p, tile_kernels<T>(isa()).L, num_threads(), sizeof(T));
}

// Calls part(n, count) for the slices of a task: samples [n, n + count).
template <class F>
void for_slices(const Problem& p, const Slices& slices, int64_t task, const F& part) {
  if (p.positions < 0) {
    const int64_t end = p.B * (task + 1) / slices.tasks;
    for (int64_t n = p.B * task / slices.tasks; n < end; n += slices.samples)
      part(n, std::min(slices.samples, end - n));
    return;
  }
  const int64_t pieces = (p.positions + slices.samples - 1) / slices.samples;
  for (int64_t piece = p.B * pieces * task / slices.tasks; piece < p.B * pieces * (task + 1) / slices.tasks; ++piece) {
    const int64_t s = piece % pieces * slices.samples;
    part(piece / pieces * p.positions + s, std::min(slices.samples, p.positions - s));
  }
}

// Calls tiles(problem) for the samples that are routed in tiles, then small(problem, b0) for the others, for
// samples_kept() of a small batch at a time.
template <class T, class Tiles, class Small>
void for_parts(const Problem& p, const Tiles& tiles, const Small& small) {
  const int64_t lanes = kernels<T>(isa()).L, in_tiles = samples_in_tiles(p, lanes, sizeof(T));
  if (in_tiles > 0 || p.B == 0) {
    Problem part = in_tiles == p.B ? p : slice(p, 0, in_tiles);
    part.tiled = true;
    tiles(part);
  }
  const int64_t kept = samples_kept(p, lanes, sizeof(T));
  for (int64_t b = in_tiles; b < p.B; b += kept) small(slice(p, b, std::min(kept, p.B - b)), b);
}

// The problem of the backward. If a gradient is a sum over the batch, and is not a dW that is added up in place, the
// samples of a small batch stay together.
template <class T>
Problem of_backward(const Problem& p, const BackwardOutputs& out) {
  const bool in_place = out.dweight.data == nullptr || (!p.shared_weight && out.dweight.storage == kStorage<T>);
  const bool sums = out.dbias.data != nullptr || (out.dlogits.data != nullptr && !out.per_sample_logits);
  Problem q = p;
  q.together = sums || !in_place;
  return q;
}

}  // namespace capsfast::driver
