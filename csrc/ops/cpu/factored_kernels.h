// Dynamic routing with weights that all input capsules share, W_j or one W for all j, on the CPU.
//
// No vote W_j u_i is formed. A weighted sum of votes is s_j = W_j z_j with z_j = sum_i c_ij u_i. The agreement of a
// vote with v_j = f(|s_j|^2) s_j is u_i . q_j with q_j = W_j^T v_j. So an iteration multiplies J vectors of a sample by
// a matrix and by its transpose; making votes multiplies I J vectors. W^T W is not formed: it squares the condition of
// W, and the part of u that W maps to 0 would cost digits.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../../cpu/isa.h"
#include "../problem.h"
#include "scratch.h"

namespace capsfast {

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

// The kernels of an instruction set, for samples [begin, end).
template <class T>
struct FactoredKernels {
  int64_t L;
  void (*forward)(const FactoredCall<T>&, int64_t begin, int64_t end, T* scratch);
  void (*backward)(const FactoredCall<T>&, int64_t begin, int64_t end, T* scratch, const FactoredSums<T>&);
};

// The arrays of a block of samples. size: their length in T, from `memory` on. Coefficients of a sample are
// [blocks][J][L]. A forward has coefficients of one iteration, and no arrays of the backward.
template <class T>
struct FactoredScratch {
  T *U, *Ut;          // [samples][blocks L][Kp], unless read in place, and [samples][blocks][Kp][L]. 0 if masked
  T* logits;          // [samples], or one for all
  T* valid;           // [samples][blocks][L], or [L] without a mask: 1 in lanes with an input capsule, else 0
  T* valid_out;       // [samples][J][L]
  T* c;               // [blocks][J][L]
  T* start;           // couplings of iteration 0, if all samples have the same
  T *mean, *inverse;  // [J][L]: of a softmax over the input capsules, sum_i c dc and 1 / sum_i exp(b - max)
  T *part, *low;      // [J][Kp]: a part of a sum, and rounding errors of adding parts
  // Forward.
  T *Z, *q;  // [rows][Kp]: sums z, and what an iteration scores with
  T* s;      // [rows][Dp]: W z, then the outputs
  // Backward. right, left, coefficients and vectors are each a factor of one product over all iterations.
  T *right, *left;  // factors of dW, [2 r - 1][rows][Kp] and [2 r - 1][rows][Dp]. right: z of all iterations, then dq
                    // of all but the last. left: ds of all iterations, then the outputs of all but the last
  T* sums;          // [r][rows][Dp]: W z and the bias
  T* back;          // [2 r - 1][rows][Kp]: dz of all iterations, and q of all but the first
  T *f, *squares;   // [r][rows]: factor of the squash, and |s|^2
  T* coefficients;  // [samples][2 r - 1], for du: c of all iterations, then the gradients of the logits
  T* vectors;       // [2 r - 1][J][Kp]: the vectors that the coefficients multiply
  T* inverses;      // [samples][r][J][L]: `inverse` of every iteration
  T* dlogits;       // [samples]
  T* du;            // [L][Kp]
  int64_t size = 0;

  FactoredScratch(const FactoredCall<T>& call, T* memory, bool backward) {
    const Problem& p = *call.problem;
    const int64_t n = call.samples, M = call.rows(), r = p.iterations, J = p.J, L = call.L, sets = 2 * r - 1;
    const int64_t Kp = call.Kp, Dp = call.Dp, Ip = call.blocks * L;
    Carver<T> carve(memory);
    const auto take = [&](bool wanted, int64_t count) { return carve.take(wanted ? count : 0); };
    const bool same = call.same_start();
    U = take(!call.in_place, n * Ip * Kp), Ut = take(true, n * Ip * Kp);
    logits = take(p.logits.data != nullptr, (same ? 1 : n) * J * Ip);
    valid = take(true, p.mask.data == nullptr ? L : n * Ip);
    valid_out = take(p.out_mask.data != nullptr, n * J * L);
    c = take(true, J * Ip), start = take(same, J * Ip);
    mean = take(true, J * L), inverse = take(true, J * L);
    part = take(true, J * Kp), low = take(true, J * Kp);
    Z = take(!backward, M * Kp), q = take(!backward, M * Kp), s = take(!backward, M * Dp);
    right = take(backward, sets * M * Kp), left = take(backward, sets * M * Dp);
    sums = take(backward, r * M * Dp), back = take(backward, sets * M * Kp);
    f = take(backward, r * M), squares = take(backward, r * M);
    coefficients = take(backward, n * sets * J * Ip), vectors = take(backward, sets * J * Kp);
    inverses = take(backward, n * r * J * L);
    dlogits = take(backward && call.need_logits, n * J * Ip), du = take(backward && !call.in_place, L * Kp);
    size = carve.used();
  }
};

}  // namespace capsfast
