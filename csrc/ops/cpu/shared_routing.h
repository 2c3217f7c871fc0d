// Forward and backward of routing with one matrix on the CPU.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../shared_routing.h"

namespace capsfast {

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
