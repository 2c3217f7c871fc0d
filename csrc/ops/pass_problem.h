// What routing_pass adds to problem.h: the arguments that score votes, and the moments.
//
//   x = W u - center;  b = logits + prior + x . query - sum_d precision x^2 / 2;  r = normalize(b) activation
//   mass = sum_i r;  first = sum_i r x;  second = sum_i r x^2
#pragma once

#include "problem.h"

namespace capsfast {

// `data` is null where an argument is absent. The Problem has logits, activation, lse and the masks.
struct PassInputs {
  View query;      // [B, J, D]
  View precision;  // [B, J, D]
  View center;     // [B, J, D]
  View prior;      // [B, J]
};

// Contiguous, in the type that sums are formed in; weights have the type of the votes. `data` is null where an output
// is not wanted. norm is written for Normalize::in only. It holds a number m, which the largest logit exceeds by 8 at
// most, and 1 / sum_i exp(b - m).
struct PassOutputs {
  int64_t batch = 0;     // B of norm: all samples, even if the call works on a part
  View mass;             // [B, J]
  View first;            // [B, J, D]
  View second;           // [B, J, D]
  View weights;          // [B, I, J]
  View lse;              // [B, I], or [B, J] for Normalize::in
  void* norm = nullptr;  // [2, B, J]
};

// The gradients of the moments, null where a gradient is zero, and the moments themselves.
struct PassSaved {
  int64_t batch = 0;                            // as in PassOutputs
  View dmass, dfirst, dsecond, dweights, dlse;  // shapes as above
  View mass, first, second, weights;            // second and weights only with their gradients
  const void* norm = nullptr;                   // [2, B, J]
};

// Contiguous gradients; `data` is null if a gradient is not wanted. Votes and routing options as in BackwardOutputs.
struct PassGradients {
  BackwardOutputs common;            // du, dweight, dlogits
  View dquery, dprecision, dcenter;  // [B, J, D]
  View dprior;                       // [B, J]
  View dactivation, dlse;            // [B, I]
};

}  // namespace capsfast
