// Forward and backward of routing on the CPU: the passes, what happens between them, and the tasks.
#pragma once

#include <cstdint>

#include "../routing.h"

namespace capsfast {

// v [B, J, D], coupling [B, I, J] and the saved s [r, B, J, D], lse [r, B, J]; all contiguous but v's
// and coupling's storage is that of the inputs, s and lse are of the type sums are formed in.
struct ForwardOutputs {
  int64_t batch = 0;  // what B is in s and lse: a part of the batch may be worked on
  View v;
  View coupling;  // data null: not wanted
  void* s = nullptr;
  void* lse = nullptr;  // softmax over the input capsules
};

struct BackwardInputs {
  int64_t batch = 0;
  View dv;         // [B, J, D]
  View dcoupling;  // [B, I, J], data null: zero
  View coupling;   // [B, I, J], needed beside dcoupling
  const void* s = nullptr;
  const void* lse = nullptr;
};

// Contiguous; data null: not wanted.
struct BackwardOutputs {
  View du;
  View dweight;  // also dvotes
  View dlogits;  // [I, J] or, if per_sample_logits, [B, I, J]
  View dbias;
  bool per_sample_logits = false;
  int64_t weight_rows = 0;  // I, or 1 for a shared weight
};

template <class T>
void routing_forward(const Problem& p, const ForwardOutputs& out);
template <class T>
void routing_backward(const Problem& p, const BackwardInputs& in, const BackwardOutputs& out);

}  // namespace capsfast
