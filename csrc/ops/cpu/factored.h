// Dynamic routing with weights that all input capsules share, W_j or one W for all j, on the CPU.
//
// No vote W_j u_i is formed. A weighted sum of votes is s_j = W_j z_j with z_j = sum_i c_ij u_i. The agreement of a
// vote with v_j = f(|s_j|^2) s_j is u_i . q_j with q_j = W_j^T v_j. So an iteration multiplies J vectors of a sample by
// a matrix and by its transpose; making votes multiplies I J vectors. W^T W is not formed: it squares the condition of
// W, and the part of u that W maps to 0 would cost digits.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../routing.h"

namespace capsfast {

// The Problem has shared_weight, and shared_outputs where there is one W for all j. z [r, B, J, K] takes the place of s.
template <class T>
void factored_forward(const Problem& p, const ForwardOutputs& out);
template <class T>
void factored_backward(const Problem& p, const BackwardInputs& in, const BackwardOutputs& out);

// The arguments of the kernels. Rows are padded with zeros to whole vectors: Kp and Dp are K and D rounded up to L.
// Input capsules are in blocks of L, too.
template <class T>
struct FactoredCall {
  const Problem* problem = nullptr;
  int64_t L = 1, Kp = 0, Dp = 0, blocks = 0;
  int64_t matrices = 1;     // J, or 1
  int64_t samples = 1;      // routed side by side, so that a matrix is multiplied by several rows
  bool in_place = false;    // rows of u are read, and rows of du written, where they lie
  const T* W = nullptr;     // [matrices][D][Kp]
  const T* Wt = nullptr;    // [matrices][K][Dp]
  const T* bias = nullptr;  // [J][Dp]; null without one
  ForwardOutputs out;       // forward
  BackwardInputs in;        // backward
  View du, dlogits;         // [B, I, K]; [B, I, J] if logits are
  bool past_cache = false;  // du is larger than the caches
  bool need_weight = false, need_logits = false, need_bias = false;

  FactoredCall(const Problem& p, int64_t lanes);
  int64_t rounded(int64_t n) const { return (n + L - 1) / L * L; }
  int64_t rows() const { return samples * problem->J; }
  // Whether the couplings of iteration 0 are the same for all samples.
  bool same_start() const {
    const Problem& p = *problem;
    return p.mask.data == nullptr && p.out_mask.data == nullptr &&
           (p.logits.data == nullptr || p.logits.stride[0] == 0);
  }
};

// The sums of a task: dW [matrices][D][Kp], dlogits [I][J], dbias [J][D].
template <class T>
struct FactoredSums {
  T* dW = nullptr;
  double *dlogits = nullptr, *dbias = nullptr;
};

}  // namespace capsfast
