// Arguments that begin at sample n. With positions, sample b S + s is position s of b; a part of the samples lies
// within one b.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "../problem.h"

namespace capsfast::driver {

inline View shifted(View view, int64_t elements) {
  view.data = static_cast<char*>(view.data) + elements * int64_t(size_of(view.storage));
  return view;
}

// A view with an axis B, from sample n on. Its samples run along that axis; with positions, along the positions.
inline View samples(const Problem& p, const View& view, int64_t n) {
  if (view.data == nullptr) return view;
  if (!p.has_positions()) return shifted(view, n * view.stride[0]);
  View part = shifted(view, n / p.positions * view.stride[0] + n % p.positions * view.position);
  part.stride[0] = view.position;
  return part;
}

// The same for several views.
inline void begin_at(const Problem& p, int64_t n, std::initializer_list<View*> views) {
  for (View* view : views) *view = samples(p, *view, n);
}

inline MaskView samples(const Problem& p, const MaskView& mask, int64_t n) {
  if (mask.data == nullptr) return mask;
  MaskView part = mask;
  if (p.has_positions()) {
    part.data += n / p.positions * mask.stride[0] + n % p.positions * mask.position;
    part.stride[0] = mask.position;
  } else {
    part.data += n * mask.stride[0];
  }
  return part;
}

// The gradients of a call. The gradients of given votes are in `dweight`.
inline BackwardOutputs samples(const Problem& p, BackwardOutputs out, int64_t n) {
  begin_at(p, n, {p.votes_given ? &out.dweight : &out.du});
  if (out.per_sample_logits) begin_at(p, n, {&out.dlogits});
  return out;
}

// The problem of samples [n, n + count).
inline Problem slice(const Problem& whole, int64_t n, int64_t count) {
  Problem p = whole;
  p.B = count;
  p.positions = -1;
  if (whole.has_positions()) p.lane = Lane::position;
  begin_at(whole, n, {&p.u, &p.votes, &p.logits, &p.activation, &p.lse});
  p.mask = samples(whole, whole.mask, n);
  p.out_mask = samples(whole, whole.out_mask, n);
  return p;
}

}  // namespace capsfast::driver
