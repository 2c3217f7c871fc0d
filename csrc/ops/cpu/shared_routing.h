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
  const T* S = nullptr;             // [D][Kp]
  const T* St = nullptr;            // [K][Dp]
  const T* G = nullptr;             // [K][Kp]
  T *v = nullptr, *kept = nullptr;  // forward
  // Backward. The sums are added to.
  const T *dv = nullptr, *saved = nullptr;
  T* du = nullptr;
  bool need_weight = false, need_logits = false;
  T* dlogits = nullptr;  // [B, I, J]; null for logits [I, J]

  SharedCall(const SharedProblem& p, int64_t lanes) : problem(&p), L(lanes) {
    Kp = rounded(p.K), Dp = rounded(p.D), Ip = rounded(p.I);
    samples = std::max<int64_t>(1, std::min<int64_t>(32 / p.J, p.B));
  }
  int64_t rounded(int64_t n) const { return (n + L - 1) / L * L; }
  int64_t rows() const { return samples * problem->J; }
};

// What a task adds up: dS of the last iteration [D][Kp], dG [K][Kp], dlogits [I][J].
template <class T>
struct SharedSums {
  T *dS = nullptr, *dG = nullptr;
  double* dlogits = nullptr;
};

// The arrays of a block of samples. size: their length in T, from `memory` on.
template <class T>
struct SharedScratch {
  T *U, *Ut;     // [samples][Ip][Kp] and [samples][Kp][Ip]: the input capsules that are not masked, and their transpose
  T* logits;     // [samples][J][Ip]
  T *Z, *Y, *q;  // [iterations][rows][Kp]: sums z, G z, and what an iteration scored with
  T *s, *ds;     // [rows][Dp]
  // Backward.
  T *dZ, *dY;       // [iterations][rows][Kp]
  T* dq;            // [rows][Kp]
  T *f, *slope;     // [iterations][rows]
  T* coefficients;  // [samples][2 r - 1][J][Ip]: of du, c of all iterations and then the gradients of the logits
  T* vectors;       // [2 r - 1][J][Kp]: what they multiply
  T* dl;            // [J][Ip]
  T* dlogits;       // [samples][J][Ip]
  T* du;            // [Ip][Kp]
  int64_t size = 0;

  SharedScratch(const SharedCall<T>& call, T* memory) {
    const int64_t n = call.samples, M = call.rows(), r = call.problem->iterations, J = call.problem->J;
    const int64_t Kp = call.Kp, Ip = call.Ip, L = call.L;
    const auto take = [&](int64_t count) {
      T* const at = memory + size;
      size += (count + L - 1) / L * L;
      return at;
    };
    U = take(n * Ip * Kp), Ut = take(n * Kp * Ip), logits = take(n * J * Ip);
    Z = take(r * M * Kp), Y = take(r * M * Kp), q = take(r * M * Kp);
    s = take(M * call.Dp), ds = take(M * call.Dp);
    dZ = take(r * M * Kp), dY = take(r * M * Kp), dq = take(M * Kp);
    f = take(r * M), slope = take(r * M);
    coefficients = take(n * call.problem->kept() * J * Ip), vectors = take(call.problem->kept() * J * Kp);
    dl = take(J * Ip), dlogits = take(n * J * Ip), du = take(Ip * Kp);
  }
};

}  // namespace capsfast
