// Parts of a call along its samples: arguments that begin at one of them, and whether it is a small batch. The samples of
// votes with positions are b S + s; a part of them lies within one b.
#pragma once

#include <algorithm>
#include <cstdint>

#include "context.h"

namespace capsfast::driver {

inline View shifted(View view, int64_t elements) {
  const int64_t size = view.storage == Storage::f64 ? 8 : view.storage == Storage::f32 ? 4 : 2;
  if (view.data != nullptr) view.data = static_cast<char*>(view.data) + elements * size;
  return view;
}

// A view with an axis B from sample n on. Its samples then are those of that axis or, where there are positions, of theirs.
inline View samples(const Problem& p, const View& view, int64_t n) {
  if (p.positions < 0) return shifted(view, n * view.stride[0]);
  View part = shifted(view, n / p.positions * view.stride[0] + n % p.positions * view.position);
  part.stride[0] = view.position;
  return part;
}

inline MaskView samples(const Problem& p, const MaskView& mask, int64_t n) {
  if (mask.data == nullptr) return mask;
  MaskView part = mask;
  if (p.positions < 0) {
    part.data += n * mask.stride[0];
  } else {
    part.data += n / p.positions * mask.stride[0] + n % p.positions * mask.position;
    part.stride[0] = mask.position;
  }
  return part;
}

inline Problem slice(const Problem& whole, int64_t n, int64_t count) {
  Problem p = whole;
  p.B = count;
  p.positions = -1;
  p.side_by_side = whole.positions >= 0 || whole.capsule_lanes;
  p.u = samples(whole, whole.u, n);
  p.votes = samples(whole, whole.votes, n);
  p.logits = samples(whole, whole.logits, n);
  p.activation = samples(whole, whole.activation, n);
  p.lse = samples(whole, whole.lse, n);
  p.mask = samples(whole, whole.mask, n);
  p.out_mask = samples(whole, whole.out_mask, n);
  return p;
}

template <class T>
Slices slices_of(const Problem& p, bool shared_logits_gradient) {
  if (!p.votes_given) return {};
  return make_slices(p, kernels<T>(isa()).L, num_threads(), sizeof(T), shared_logits_gradient);
}

// Calls part(n, count) for the slices of a task: samples [n, n + count).
template <class F>
void for_slices(const Problem& p, const Slices& slices, int64_t task, const F& part) {
  if (p.positions < 0) {
    const int64_t end = slices.whole * (task + 1) / slices.tasks;
    for (int64_t n = slices.whole * task / slices.tasks; n < end; n += slices.samples)
      part(n, std::min(slices.samples, end - n));
    return;
  }
  const int64_t pieces = (p.positions + slices.samples - 1) / slices.samples;
  for (int64_t piece = p.B * pieces * task / slices.tasks; piece < p.B * pieces * (task + 1) / slices.tasks; ++piece) {
    const int64_t s = piece % pieces * slices.samples;
    part(piece / pieces * p.positions + s, std::min(slices.samples, p.positions - s));
  }
}

// Calls part(n, count) for what is not in slices.
template <class F>
void for_rest(const Problem& p, const Slices& slices, const F& part) {
  if (!p.capsule_lanes) {
    if (slices.tasks == 0) part(int64_t{0}, p.B);
    return;
  }
  for (int64_t n = slices.whole; n < p.B; ++n) part(n, int64_t{1});
}

// Calls tiles(problem) for the samples that are routed in tiles, then small(problem, b0) for the others: for as many of a
// small batch at a time as keep their votes.
template <class T, class Tiles, class Small>
void for_parts(const Problem& p, const Tiles& tiles, const Small& small) {
  const int64_t in_tiles = samples_in_tiles(p, kernels<T>(isa()).L, sizeof(T));
  if (in_tiles == p.B) return tiles(p);
  if (in_tiles > 0) tiles(slice(p, 0, in_tiles));
  const int64_t kept = samples_kept(p, sizeof(T));
  for (int64_t b = in_tiles; b < p.B; b += kept) small(slice(p, b, std::min(kept, p.B - b)), b);
}

// The problem as the backward has it. Beside a dW that is added up where it stands, sums over the batch keep the samples
// of a small batch together.
template <class T>
Problem of_backward(const Problem& p, const BackwardOutputs& out) {
  const bool in_place = out.dweight.data == nullptr || (!p.shared_weight && out.dweight.storage == kStorage<T>);
  const bool sums = out.dbias.data != nullptr || (out.dlogits.data != nullptr && !out.per_sample_logits);
  Problem q = p;
  q.together = sums || !in_place;
  return q;
}

}  // namespace capsfast::driver
