// Dynamic routing with one matrix S for all pairs of an input and an output capsule.
//
// Then no vote S u_i has to be formed. A weighted sum of votes is s_j = S z_j with z_j = sum_i c_ij u_i, and the agreement
// of a vote with v_j = f(|s_j|^2) s_j is u_i . q_j with q_j = S^T v_j. An iteration multiplies J vectors a sample by S and
// by S^T; votes take the product of S with I. The matrix S^T S is not formed: it squares the condition of S, so that what
// u has in directions that S maps to nothing would cost digits.
#pragma once

#include "routing.h"

namespace capsfast {

struct SharedProblem {
  int64_t B = 0, I = 0, J = 0, D = 0, K = 0;
  int64_t iterations = 1;
  bool gradient_last = false;  // the agreement is a constant
  bool accumulate = true;      // logits are the given ones and all agreements; else the last agreement alone
  bool keep_all = false;       // see kept()
  double scale = 1;            // factor of the agreement
  Squash squash = Squash::paper;
  double eps = 1e-8;
  View u;             // [B, I, K], the stride over K is 1
  View weight;        // [D, K], contiguous
  View logits;        // [B, I, J]; the stride over B is 0 for logits [I, J]; data is null if there are none
  MaskView mask;      // [B, I]
  MaskView out_mask;  // [B, J]

  // What a forward keeps of a sample for its backward: z of all iterations, and with `keep_all` what the backward would
  // compute again: S z of all iterations, q and the couplings of all but the first. The length of a row of couplings
  // is a multiple of every vector, so that the layout is the same for all kernels.
  int64_t kept() const {
    return J * (iterations * K + (keep_all ? iterations * D + (iterations - 1) * (K + kept_row()) : 0));
  }
  int64_t kept_row() const { return (I + 15) / 16 * 16; }
  bool empty() const { return B == 0 || I == 0 || J == 0 || D == 0 || K == 0; }
};

// Contiguous, of the type that sums are formed in, as all that follows.
struct SharedOutputs {
  void* v = nullptr;     // [B, J, D]
  void* kept = nullptr;  // [B, kept()]; null where no gradient is wanted
};

// Null where a gradient is not wanted.
struct SharedGradients {
  void* du = nullptr;       // [B, I, K]
  void* dweight = nullptr;  // [D, K]
  View dlogits;             // [I, J] or [B, I, J]
  bool per_sample_logits = false;
};

}  // namespace capsfast
