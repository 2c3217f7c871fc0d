// Forward and backward of routing on the CPU: the passes, what happens between them, and the tasks.
#pragma once

#include <cstdint>

#include "../routing.h"

namespace capsfast {

// v [B, J, D] and coupling [B, I, J] in the storage of the inputs; for the backward, in the type sums are
// formed in, s [r, B, J, D] (without bias) and, for the softmax over the input capsules, norm
// [2, r, B, J]: the maximum m of the logits and 1 / sum_i exp(b - m). All contiguous.
struct ForwardOutputs {
  int64_t batch = 0;  // what B is in s and norm: a part of the batch may be worked on
  View v;
  View coupling;  // data null: not wanted
  void* s = nullptr;
  void* norm = nullptr;
};

struct BackwardInputs {
  int64_t batch = 0;
  View dv;         // [B, J, D]
  View dcoupling;  // [B, I, J], data null: zero
  View coupling;   // [B, I, J], needed beside dcoupling
  const void* s = nullptr;
  const void* norm = nullptr;
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
