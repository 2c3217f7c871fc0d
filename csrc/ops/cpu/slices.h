// Parts of a call along the batch: arguments that begin at one of its samples, and whether it is a small batch.
#pragma once

#include <cstdint>

#include "context.h"

namespace capsfast::driver {

inline View shifted(View view, int64_t elements) {
  const int64_t size = view.storage == Storage::f64 ? 8 : view.storage == Storage::f32 ? 4 : 2;
  if (view.data != nullptr) view.data = static_cast<char*>(view.data) + elements * size;
  return view;
}

inline MaskView shifted(MaskView mask, int64_t rows) {
  if (mask.data != nullptr) mask.data += rows * mask.stride[0];
  return mask;
}

inline Problem slice(const Problem& whole, int64_t b0, int64_t samples) {
  Problem p = whole;
  p.B = samples;
  p.votes = shifted(whole.votes, b0 * whole.votes.stride[0]);
  p.logits = shifted(whole.logits, b0 * whole.logits.stride[0]);
  p.activation = shifted(whole.activation, b0 * whole.activation.stride[0]);
  p.lse = shifted(whole.lse, b0 * whole.lse.stride[0]);
  p.mask = shifted(whole.mask, b0);
  p.out_mask = shifted(whole.out_mask, b0);
  return p;
}

// A view [B, ...] from sample b0 on.
inline View samples(const View& view, int64_t b0) { return shifted(view, b0 * view.stride[0]); }

template <class T>
bool is_small_batch(const Problem& p) {
  return make_plan(p, kernels<T>(isa()).L, num_threads(), sizeof(T)).small_batch;
}

}  // namespace capsfast::driver
