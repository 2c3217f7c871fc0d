// Dynamic routing with one matrix S for all pairs of an input and an output capsule, on the CPU.
//
// Then no vote S u_i has to be formed. A weighted sum of votes is s_j = S z_j with z_j = sum_i c_ij u_i, and the agreement
// of a vote with v_j = f(|s_j|^2) s_j is u_i . q_j with q_j = S^T v_j. An iteration multiplies J vectors a sample by S and
// by S^T; votes take the product of S with I. The matrix S^T S is not formed: it squares the condition of S, so that what
// u has in directions that S maps to nothing would cost digits.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../routing.h"

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

template <class T>
void shared_forward(const SharedProblem& p, const SharedOutputs& out);
template <class T>
void shared_backward(const SharedProblem& p, const T* dv, const T* kept, const SharedGradients& out);

// What the kernels of an instruction set get: a call, its matrices, and a task's own sums. Rows are padded with zeros to
// whole vectors: Kp, Dp and Ip are K, D and I rounded up to L.
template <class T>
struct SharedCall {
  const SharedProblem* problem = nullptr;
  int64_t L = 1, Kp = 0, Dp = 0, Ip = 0;
  int64_t samples = 1;              // routed side by side, so that the matrices are multiplied by many rows
  bool in_place = false;            // the rows of u are read where they are, and those of du written
  bool same_start = false;          // all samples have the couplings of iteration 0
  const T* S = nullptr;             // [D][Kp]
  const T* St = nullptr;            // [K][Dp]
  T *v = nullptr, *kept = nullptr;  // forward; kept may be null
  // Backward. The sums are added to.
  const T *dv = nullptr, *saved = nullptr;
  T* du = nullptr;
  bool past_cache = false;  // kept, or du, is more than the caches hold
  bool need_weight = false, need_logits = false;
  T* dlogits = nullptr;  // [B, I, J]; null for logits [I, J]

  SharedCall(const SharedProblem& p, int64_t lanes) : problem(&p), L(lanes) {
    Kp = rounded(p.K), Dp = rounded(p.D), Ip = rounded(p.I);
    samples = std::max<int64_t>(1, std::min<int64_t>(32 / p.J, p.B));
    in_place = p.mask.data == nullptr && p.K == Kp;
    same_start =
        p.mask.data == nullptr && p.out_mask.data == nullptr && (p.logits.data == nullptr || p.logits.stride[0] == 0);
  }
  int64_t rounded(int64_t n) const { return (n + L - 1) / L * L; }
  int64_t rows() const { return samples * problem->J; }
};

// What a task adds up: dS [D][Kp], dlogits [I][J].
template <class T>
struct SharedSums {
  T* dS = nullptr;
  double* dlogits = nullptr;
};

// The arrays of a block of samples. size: their length in T, from `memory` on. A forward has those of one iteration and
// none of a backward.
template <class T>
struct SharedScratch {
  T *U, *Ut;  // [samples][Ip][Kp] and [samples][Kp][Ip]: the input capsules that are not masked, and their transpose.
              // Those that are read in place have no U
  T* logits;  // [samples][J][Ip], or [J][Ip] where all samples have the same
  T* c;       // [J][Ip]
  T* start;   // [J][Ip]: the couplings of iteration 0, where all samples have the same
  // Forward.
  T *Z, *q;  // [rows][Kp]: sums z, and what an iteration scores with
  T* s;      // [rows][Dp]: S z, then the outputs
  // Backward. What stands together is one factor of a product.
  T *right, *left;  // [2 r - 1][rows][Kp] and [2 r - 1][rows][Dp], whose product is dS: z of all iterations and dq of
                    // all but the last; ds of all iterations and the outputs of all but the last
  T* sums;          // [r][rows][Dp]: S z
  T* back;          // [2 r - 1][rows][Kp]: dz of all iterations, and q of all but the first
  T *f, *slope;     // [r][rows]
  T* coefficients;  // [samples][2 r - 1][J][Ip]: of du, c of all iterations and then the gradients of the logits
  T* vectors;       // [2 r - 1][J][Kp]: what they multiply
  T* dlogits;       // [samples][J][Ip]
  T* du;            // [Ip][Kp]
  int64_t size = 0;

  SharedScratch(const SharedCall<T>& call, T* memory, bool backward) {
    const int64_t n = call.samples, M = call.rows(), r = call.problem->iterations, J = call.problem->J;
    const int64_t Kp = call.Kp, Dp = call.Dp, Ip = call.Ip, L = call.L, sets = 2 * r - 1;
    const auto take = [&](int64_t count, bool wanted) {
      T* const at = memory + size;
      if (wanted) size += (count + L - 1) / L * L;
      return at;
    };
    U = take(n * Ip * Kp, !call.in_place), Ut = take(n * Kp * Ip, true),
    logits = take((call.same_start ? 1 : n) * J * Ip, true);
    c = take(J * Ip, true), start = take(J * Ip, call.same_start);
    Z = take(M * Kp, !backward), q = take(M * Kp, !backward), s = take(M * Dp, !backward);
    right = take(sets * M * Kp, backward), left = take(sets * M * Dp, backward);
    sums = take(r * M * Dp, backward), back = take(sets * M * Kp, backward);
    f = take(r * M, backward), slope = take(r * M, backward);
    coefficients = take(n * sets * J * Ip, backward), vectors = take(sets * J * Kp, backward);
    dlogits = take(n * J * Ip, backward), du = take(Ip * Kp, backward && !call.in_place);
  }
};

}  // namespace capsfast
