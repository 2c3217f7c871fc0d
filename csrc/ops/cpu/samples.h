// Arguments that begin at sample n. With positions, sample b S + s is position s of b; a part of the samples lies
// within one b.
#pragma once

#include <cstdint>

#include "../routing.h"

namespace capsfast::driver {

inline View shifted(View view, int64_t elements) {
  if (view.data != nullptr) view.data = static_cast<char*>(view.data) + elements * int64_t(size_of(view.storage));
  return view;
}

// A view with an axis B, from sample n on. Its samples run along that axis; with positions, along the positions.
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

}  // namespace capsfast::driver
