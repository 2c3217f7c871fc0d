// What dynamic_routing and route_votes compute, as plain structs: shapes, strides, options, inputs, outputs.
//
// Symbols: u [B, I, K], weight [I, J, D, K], votes [B, I, J, D], v and s [B, J, D], r iterations.
// With V_0 = 0, V_t = V_{t-1} + squash(s_t), iteration t is one pass over the input capsules:
//   b_t = logits + votes . V_{t-1};  c_t = softmax(b_t);  s_t = sum_i c_t votes + bias.
#pragma once

#include <cstdint>

#include "../math/squash.h"

namespace capsfast {

enum class Storage : int { f32, f64, bf16, f16 };

// A strided tensor; strides in elements. data is null for an absent argument.
struct View {
  void* data = nullptr;
  Storage storage = Storage::f32;
  int64_t stride[4] = {0, 0, 0, 0};
};

// A bool matrix; data is null where everything is valid.
struct MaskView {
  const uint8_t* data = nullptr;
  int64_t stride[2] = {0, 0};
  bool at(int64_t row, int64_t column) const { return data[row * stride[0] + column * stride[1]] != 0; }
};

struct Problem {
  int64_t B = 0, I = 0, J = 0, D = 0, K = 1;
  int64_t iterations = 1;
  bool softmax_in = false;     // over the input capsules instead of the output capsules
  bool gradient_last = false;  // the agreement counts as a constant
  bool leaky = false;
  Squash squash = Squash::paper;
  double eps = 1e-8;
  bool tf32 = false;  // float32 products may be rounded to TF32

  bool votes_given = false;    // route_votes: votes instead of u and weight, K = 1
  bool shared_weight = false;  // one weight row for all input capsules: dweight is summed over them
  View u;                      // [B, I, K]
  View weight;                 // [I, J, D, K], stride 0 over I if shared
  View votes;                  // [B, I, J, D]
  View logits;                 // [B, I, J], stride 0 over B for [I, J]
  View bias;                   // [J, D]
  MaskView mask;               // [B, I]
  MaskView out_mask;           // [B, J]

  bool empty() const { return B == 0 || I == 0 || J == 0 || D == 0 || K == 0; }
};

// v [B, J, D] and coupling [B, I, J] in the storage of the inputs; for the backward, in the type sums are
// formed in, s [r, B, J, D] (without bias) and, for the softmax over the input capsules, norm
// [2, r, B, J]: m, which the largest logit exceeds by 8 at most, and 1 / sum_i exp(b - m). All contiguous.
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

}  // namespace capsfast
