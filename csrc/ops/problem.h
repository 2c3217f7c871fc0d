// What dynamic_routing computes, as plain structs: shapes, strides, options, inputs, outputs.
//
// Symbols: u [B, I, K], weight [I, J, D, K], votes [B, I, J, D], v and s [B, J, D], r iterations.
// With V_0 = 0, V_t = V_{t-1} + squash(s_t), iteration t is one pass over the input capsules (Squashing::accumulate
// tells of another V):
//   b_t = logits + votes . V_{t-1};  c_t = softmax(b_t);  s_t = sum_i c_t votes + bias.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../math/squash.h"

namespace capsfast {

enum class Storage : int { f32, f64, bf16, f16 };
inline size_t size_of(Storage storage) { return storage == Storage::f64 ? 8 : storage == Storage::f32 ? 4 : 2; }

// A strided tensor; strides in elements. `data` is null if the argument is absent. If votes have positions, every
// tensor with an axis B ends in an axis of positions, with stride `position`. Shapes in these headers leave that axis
// out.
struct View {
  void* data = nullptr;
  Storage storage = Storage::f32;
  int64_t stride[4] = {0, 0, 0, 0};
  int64_t position = 0;
};

// A bool matrix. If there is no mask, `data` is null and everything is valid.
struct MaskView {
  const uint8_t* data = nullptr;
  int64_t stride[2] = {0, 0};
  int64_t position = 0;
  bool at(int64_t row, int64_t column) const { return data[row * stride[0] + column * stride[1]] != 0; }
};

// How routing logits b become coupling coefficients: a softmax over the output or over the input capsules, a sigmoid, b
// itself, or exp(b - lse) with a given lse. The routing ops take only the two softmaxes.
enum class Normalize : int { out, in, sigmoid, none, lse };

// What a lane of a vector holds while the CPU runs a part of a call. any: the plan still chooses, or the votes are
// given and a vector holds numbers of one vote. sample, position: one sample, or one position of the votes. capsule:
// one input capsule of a sample. With `capsule`, votes are [B][ceil(I / L)][J D][L]: a block of L input capsules stands
// where one input capsule stood. Votes of masked input capsules, and lanes without an input capsule, are 0.
enum class Lane : int { any, sample, position, capsule };

struct Problem {
  int64_t B = 0, I = 0, J = 0, D = 0, K = 1;
  int64_t P = 1;           // poses of an input capsule that share its weights (pose matrices); D is P R
  int64_t positions = -1;  // S of votes [B, I, J, D, S], where each position is routed alone; negative: no such axis
  int64_t iterations = 1;
  Normalize normalize = Normalize::out;
  bool gradient_last = false;  // gradient="last": the agreement is a constant
  bool leaky = false;          // every softmax has one more entry, with logit 0; its coupling is dropped
  Squashing squash;
  bool tf32 = false;  // float32 products may be rounded to TF32

  bool votes_given = false;     // votes instead of u and weight, K = 1
  bool shared_weight = false;   // one weight for all input capsules: dweight is the sum over input capsules
  bool shared_outputs = false;  // one vote (stride 0) for all output capsules: dvotes is the sum over output capsules
  Lane lane = Lane::any;
  View u;                          // [B, I, P K]
  View weight;                     // [I, J, R, K]; the stride over I is 0 if shared
  Storage dweight = Storage::f32;  // of dW: the storage of the op's weight, while `weight` may be a copy
  View votes;                      // [B, I, J, D]; the stride over J is 0 if shared_outputs
  View logits;                     // [B, I, J]; the stride over B is 0 for logits [I, J]
  View bias;                       // [J, D]
  MaskView mask;                   // [B, I]
  MaskView out_mask;               // [B, J]

  // Only for the op routing_pass.
  bool moments = false;    // this is a routing_pass: it has mass, activation and lse
  bool quadratic = false;  // the pass subtracts a center, scores squares, or has second moments
  View activation;         // [B, I], multiplies the coupling
  View lse;                // [B, I], for Normalize::lse

  bool softmax_in() const { return normalize == Normalize::in; }
  bool empty() const { return B == 0 || I == 0 || J == 0 || D == 0 || K == 0 || positions == 0; }
  int64_t R() const { return D / P; }                  // size of the vote of one pose
  int64_t weight_size() const { return J * R() * K; }  // size of the weight of an input capsule
  int64_t pose_size() const { return P * K; }          // size of all poses of an input capsule
  // Size of the votes of an input capsule. A shared vote takes memory even if J = 0.
  int64_t votes_size() const { return (shared_outputs ? 1 : J) * D; }
  bool has_positions() const { return positions >= 0; }
  bool capsule_lanes() const { return lane == Lane::capsule; }
  // Whether neighbours in memory are numbers of different lanes, so that votes are copied as they are.
  bool votes_in_lanes() const { return lane == Lane::position || lane == Lane::capsule; }
  // Whether a block of votes is a matrix.
  bool keys() const { return votes_given && shared_outputs && !quadratic; }
  int64_t samples() const { return has_positions() ? B * positions : B; }
};

// Contiguous tensors. v and coupling have the storage of the inputs. s and norm are kept for the backward, in the type
// that sums are formed in; with positions they are not kept. norm is written for the softmax over the input capsules
// only. norm[0] is a number m, which the largest logit exceeds by 8 at most; norm[1] is 1 / sum_i exp(b - m).
struct ForwardOutputs {
  int64_t batch = 0;     // B of s and norm: all samples, even if the call works on a part
  View v;                // [B, J, D]
  View coupling;         // [B, I, J]; data is null if it is not wanted
  void* s = nullptr;     // [r, B, J, D], without bias
  void* norm = nullptr;  // [2, r, B, J]
};

struct BackwardInputs {
  int64_t batch = 0;           // as in ForwardOutputs, and so are s and norm
  View dv;                     // [B, J, D]
  View dcoupling;              // [B, I, J]; data is null if it is zero
  View coupling;               // [B, I, J]; needed only with dcoupling
  const void* s = nullptr;     // [r, B, J, D]
  const void* norm = nullptr;  // [2, r, B, J]
};

// Contiguous gradients; `data` is null if a gradient is not wanted.
struct BackwardOutputs {
  View du;       // [B, I, P K]
  View dweight;  // [I or 1, J, R, K]; if votes are given, dvotes [B, I, J or 1, D]
  View dlogits;  // [I, J] or, if per_sample_logits, [B, I, J]
  View dbias;    // [J, D]
  bool per_sample_logits = false;
  int64_t weight_rows = 0;  // I, or 1 for a shared weight
};

}  // namespace capsfast
