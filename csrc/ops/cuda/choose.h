// Which families of kernels may serve a call, and the reasons why others do not:
//
//   rows      votes of few output capsules, made on tensor cores: a warp has whole samples
//   general   everything: any J, D and K, given votes, any strides, float64, and passes of their own
#pragma once

#include <algorithm>
#include <cstdint>

#include "../routing.h"

namespace capsfast::cuda {

// Null if the rows family serves the call, else the reason why not. architecture: that the kernels were compiled for.
inline const char* why_no_rows(const Problem& p, int architecture) {
  if (architecture < 80) return "tensor cores multiply TF32 numbers from compute capability 8.0 on";
  if (p.votes_given) return "votes are given";
  if (p.moments) return "it is a pass of its own, with mass";
  if (p.u.storage == Storage::f64) return "tensor cores multiply in 32 bits at most";
  if (p.empty()) return "there are no votes";
  if (p.K > 16) return "K is larger than 16";
  if (p.D > 16) return "D is larger than 16";
  if (p.J > 12) return "J is larger than 12";
  if (std::max(p.B, p.I) > INT32_MAX / 2 || (p.B / 16 + 1) * p.I > INT32_MAX / 2) return "B or I is too large";
  const int64_t* stride = p.weight.stride;
  const auto dense = [](int64_t length, int64_t at, int64_t wanted) { return length == 1 || at == wanted; };
  if (!dense(p.K, stride[3], 1) || !dense(p.D, stride[2], p.K) || !dense(p.J, stride[1], p.K * p.D))
    return "the weight is not contiguous";
  return nullptr;
}

// Null if the kernels serve the pass, else what they lack.
inline const char* why_no_pass(const Problem& p) {
  if (p.quadratic) return "precision, center or second moments";
  if (p.activation.data != nullptr) return "an activation";
  if (p.normalize != Normalize::out && p.normalize != Normalize::in) return "normalize 'sigmoid', 'none' or 'lse'";
  return nullptr;
}

}  // namespace capsfast::cuda
