// Which families of kernels may serve a call, and the reasons why others do not:
//
//   rows      votes of few output capsules, made on tensor cores: a warp has whole samples
//   votes     given votes, if a sample fits the shared memory of a cluster (votes/launch.h looks)
//   general   everything: any J, D and K, any strides, float64, and passes of their own
#pragma once

#include <algorithm>
#include <cstdint>

#include "../routing.h"

namespace capsfast::cuda {

// Null if the rows family serves the call, else the reason why not. capsfast/ops/dynamic_routing.py says the same.
inline const char* why_no_rows(const Problem& p) {
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

// Null if the votes family serves the call, provided that a cluster holds a sample, else the reason why not.
// summed_logits: the gradient of logits [I, J] is wanted.
inline const char* why_no_votes(const Problem& p, bool summed_logits) {
  if (!p.votes_given) return "votes are made";
  if (p.moments) return "it is a pass of its own, with mass";
  if (p.votes.storage == Storage::f64) return "sums are formed in float32";
  if (p.softmax_in()) return "a softmax over the input capsules has its normaliser only after a pass";
  if (summed_logits) return "the gradient of logits [I, J] is a sum over samples";
  if (p.empty()) return "there are no votes";
  if (p.B > 1 << 20) return "B is too large";
  const int64_t lanes = p.D == 8 ? 1 : p.D / 16;
  if (p.D != 8 && (p.D % 16 != 0 || (lanes & (lanes - 1)) != 0)) return "D is neither 8 nor a power of two from 16 on";
  if (p.J * lanes > 32) return "the votes of an input capsule do not fit a warp";
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
