// From the arguments of an op to the arguments of kernels.
#pragma once

#include <initializer_list>

#include "params.h"

namespace capsfast::cuda {

// How many elements of memory a strided tensor spans, from its first to its last.
inline int64_t extent(std::initializer_list<int64_t> sizes, const int64_t* stride) {
  int64_t last = 0;
  for (const int64_t size : sizes) {
    if (size == 0) return 0;
    last += (size - 1) * *stride++;
  }
  return last + 1;
}

inline Operand operand(const View& view, std::initializer_list<int64_t> sizes) {
  Operand to;
  if (view.data == nullptr) return to;
  to.data = {static_cast<unsigned char*>(view.data), extent(sizes, view.stride) * element_bytes(view.storage)};
  to.storage = view.storage;
  for (int axis = 0; axis < 4; ++axis) to.stride[axis] = view.stride[axis];
  return to;
}

inline Mask mask(const MaskView& view, int64_t rows, int64_t columns) {
  Mask to;
  if (view.data == nullptr) return to;
  to.data = {view.data, extent({rows, columns}, view.stride)};
  to.stride[0] = view.stride[0];
  to.stride[1] = view.stride[1];
  return to;
}

inline Inputs inputs_of(const Problem& p) {
  Inputs in{p.B, p.I, p.J, p.D, p.K, p.softmax_in(), p.leaky, {}, {}, {}, {}, {}, {}};
  if (p.votes_given) {
    in.matrix = operand(p.votes, {p.B, p.I, p.J, p.D});
  } else {
    in.u = operand(p.u, {p.B, p.I, p.K});
    in.matrix = operand(p.weight, {p.I, p.J, p.D, p.K});
  }
  in.logits = operand(p.logits, {p.B, p.I, p.J});
  in.mask = mask(p.mask, p.B, p.I);
  in.out_mask = mask(p.out_mask, p.B, p.J);
  return in;
}

}  // namespace capsfast::cuda
