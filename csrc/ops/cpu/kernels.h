// Inputs and outputs of a pass over the input capsules, and the table of kernels of an instruction set.
//
// There are two layouts of arrays. In "lanes" a vector holds one number of L samples and weights are broadcast; an
// array with n numbers a sample is [tiles][n][L] with tiles = ceil(B / L). In "rows", for votes in memory, a vector
// holds L numbers of one vote; the array is [B][n], which the shapes below include as tiles = B, L = 1. If lanes are
// input capsules (Lane::capsule), the kernels of "lanes" run with arrays as in "rows"; only sums, and numbers [J][L] of
// output capsules, are in lanes. T is the type that sums are formed in.
#pragma once

#include <cstdint>

#include "../../cpu/isa.h"
#include "../problem.h"
#include "memory.h"

namespace capsfast {

// How the passes cut their work; chosen by plan.cpp.
struct Plan {
  bool lanes = true;           // layout: lanes, else rows
  int64_t L = 1;               // of a vector: samples or input capsules in lanes, numbers of a vote in rows
  int64_t tiles = 1;           // lanes: ceil(B / L); rows and lanes of input capsules: B
  int64_t capsules = 1;        // input capsules, or blocks of L if input capsules are lanes
  int64_t chunk = 1;           // input capsules whose weights and poses are prepared at a time
  int64_t out_tile = 1;        // lanes: output capsules whose votes are held at a time
  int64_t tile_groups = 1;     // shares of the tiles; a task has one group and one split
  int64_t splits = 1;          // shares of the input capsules
  int64_t gradient_chunk = 1;  // this and the next three: the same for the gradient pass
  int64_t gradient_out_tile = 1;
  int64_t gradient_groups = 1;
  int64_t gradient_splits = 1;
  bool sums_apart = false;       // sums of a gradient pass take a pass of their own, cut as an accumulate pass
  bool weight_in_place = false;  // lanes: one task writes a row of dW as whole vectors, and adds it up in place
  bool gather_rows = false;      // weight or votes are not contiguous rows of T, so tasks copy them first
};

// The tiles [tile0, tile1) and input capsules [i0, i1) of a task.
struct Range {
  int64_t tile0 = 0, tile1 = 0;
  int64_t i0 = 0, i1 = 0;
};

// A part of an array that may be absent.
template <class T>
const T* from(const T* all, int64_t offset) {
  return all == nullptr ? nullptr : all + offset;
}

// A quadratic form of the votes x for every output capsule: x . linear + x^2 . square + constant. A missing part is
// null. One form gives the scores of votes, another form gives the gradient of their coupling.
template <class T>
struct Form {
  const T* linear = nullptr;    // [tiles][J D][L]
  const T* square = nullptr;    // [tiles][J D][L]
  const T* constant = nullptr;  // [tiles][J][L]
  bool squares = false;         // linear holds zeros

  Form from(int64_t vectors, int64_t scalars) const {
    using capsfast::from;
    return {from(linear, vectors), from(square, vectors), from(constant, scalars), squares};
  }
};

// An accumulate pass: sum_i e, sum_i e x and sum_i e x^2 over the votes x, less the center if there is one. Forward: e
// is the coupling c = R activation, where R = normalize(score + logits). Backward, in routing alone: e is dl, the
// gradient of the logits, made from dc = gradient + dcoupling.
template <class T>
struct AccumulatePass {
  const Problem* problem = nullptr;
  const Plan* plan = nullptr;
  // With problem.quadratic there is a center, and every form has both linear and square.
  const T* center = nullptr;     // [tiles][J D][L]
  Form<T> score;                 // routing: V, none in the first iteration (V_0 = 0)
  Form<T> gradient;              // routing: ds; `linear` is null in the forward
  const T* valid_out = nullptr;  // [tiles][J][L], 1 or 0; null without out_mask
  // Softmax over the input capsules with a known normaliser: R = exp(b - in_max) in_scale. Null in the forward, except
  // in the pass that writes the coupling.
  const T* in_max = nullptr;    // [tiles][J][L]
  const T* in_scale = nullptr;  // [tiles][J][L]
  const T* c_dc = nullptr;      // sum_i c dc [tiles][J][L], with in_max in the backward
  View dcoupling;               // [B, I, J], in the backward (of the last iteration)
  View coupling;                // [B, I, J], written unless data is null
  View lse;                     // [B, I], written unless data is null: the lse of a softmax over the output capsules
  bool unweighted = false;      // c counts as 1 everywhere: the caller scales the sum
  Sum<T> mass;                  // [tiles][J][L]
  Sum<T> first;                 // [tiles][J D][L]; mass, first and second are null if not wanted
  Sum<T> second;                // [tiles][J D][L]
  // Softmax over the input capsules, forward: the largest logit so far, and sum_i exp(b - max).
  T* max = nullptr;  // [tiles][J][L]
  Sum<T> norm;       // [tiles][J][L]
};

// The gradient pass: du, dweight (or dvotes) and gradients of input capsules, for all iterations at once. For a
// routing_pass, which has one iteration, also sums over the input capsules as in AccumulatePass, weighted by dl: the
// gradients of output capsules follow from these sums.
template <class T>
struct GradientPass {
  const Problem* problem = nullptr;
  const Plan* plan = nullptr;
  const T* center = nullptr;  // as in AccumulatePass; a quadratic pass has one iteration
  int64_t since = 0;          // iterations [since, r) have gradients
  // [r][tiles][J D][L]. score.linear[t] is V_t; iteration t scored with it if t >= scored. gradient.linear[t] is ds_t.
  Form<T> score;
  Form<T> gradient;
  int64_t scored = 1;
  const T* valid_out = nullptr;
  const T* in_max = nullptr;  // [r][tiles][J][L]
  const T* in_scale = nullptr;
  const T* c_dc = nullptr;     // [r][tiles][J][L]
  const T* in_dlse = nullptr;  // [tiles][J][L], the gradient of the lse of this softmax; null without one
  View dcoupling;              // [B, I, J], of the last iteration
  View dlse;                   // [B, I], the gradient of the lse of a softmax over the output capsules
  View du;                     // [B, I, P K]
  View dvotes;                 // [B, I, J or 1, D]
  View dactivation;            // [B, I]
  View dlse_given;             // [B, I], the gradient of the lse of Normalize::lse
  View dlogits_sample;         // [B, I, J], if the logits are [B, I, J]
  Sum<T> mass, first, second;  // null where they are not wanted; first only with mass, second only with first
  double* dlogits = nullptr;   // [I, J], added to, if the logits are [I, J]
  T* dweight_sum = nullptr;    // [I or 1, J, R, K], added to; null if the pass writes dweight itself
  T* dweight_low = nullptr;    // as dweight_sum: rounding errors of the additions
  View dweight;                // [I, J, R, K]
  // Whether parts of the batch before this part (begun) or after it (continued) add to the same dweight in place.
  // Between parts dweight holds blocks of L rows.
  bool weight_begun = false, weight_continued = false;
};

// The update between two passes of routing. sum and low [splits][tiles][J D][L]: high and low of `first`. s and v: [B,
// J, D].
template <class T>
struct Update {
  const Problem* problem = nullptr;
  const Plan* plan = nullptr;
  const T* bias = nullptr;       // [J D]
  const T* valid_out = nullptr;  // [tiles][J][L]
  T* sum = nullptr;
  T* low = nullptr;
  T* V = nullptr;  // [tiles][J D][L]; forward: null if no pass follows
  T* s = nullptr;  // of the iteration
  // Forward: s is the sum over the splits of factor times the sums of the split; factor [splits][J][L] belongs to the
  // tile. Overwrites sum and low of split 0. If v.data is null, v is not wanted.
  const T* factor = nullptr;
  View v;
  // Backward: if dv.data is null, dv is the sum of the passes.
  View dv;
  T* ds = nullptr;    // [tiles][J D][L]
  T* c_dc = nullptr;  // [tiles][J][L]: ds . s; null where it is not wanted
};

// The gradients that a small batch computes from dvotes [B][ceil(I / L)][J D][L]. Fields as in GradientPass;
// dweight_sum is null unless the weight is shared.
template <class T>
struct SmallBatchGradients {
  T* dvotes = nullptr;
  bool add = false;  // add to dW, which is of type T
  View du;
  View dweight;
  T* dweight_sum = nullptr;
  T* dweight_low = nullptr;
};

// The work on arrays of output capsules, a tile of samples at a time.
template <class T>
struct TileKernels {
  // Samples [b0, b0 + samples) of a tensor [B, n1, n2] to lanes [n1][n2][L], and back. buffer [L][n1][n2].
  void (*load)(const View&, int64_t b0, int64_t samples, int64_t n1, int64_t n2, T* buffer, T* to);
  void (*store)(const T* from, int64_t b0, int64_t samples, int64_t n1, int64_t n2, T* buffer, const View&);
  void (*outputs)(const Update<T>&, int64_t tile);                    // s_t, v_t and V_t
  void (*restore)(const Update<T>&, int64_t tile);                    // V_{t+1} from V_t and s_t
  void (*differentiate)(const Update<T>&, int64_t tile, T* scratch);  // ds_t from dv_t; scratch 2 [J D][L]
};

// The kernels of the rows layout.
template <class T>
struct RowsKernels {
  void (*accumulate)(const AccumulatePass<T>&, const Range&, T* scratch);
  void (*gradient)(const GradientPass<T>&, const Range&, T* scratch);
};

// The kernels of a small batch, for blocks [n0, n1) of L input capsules; small_batch.inl has the shapes.
template <class T>
struct SmallBatchKernels {
  void (*votes)(const Problem&, int64_t n0, int64_t n1, T* votes, T* scratch);
  void (*gradients)(const SmallBatchGradients<T>&, const Problem&, int64_t n0, int64_t n1, T* scratch);
  // Adds up the lanes of sums [J][size][L] and adds the result to sums [J][size]. factor [J][L], unless null: the lanes
  // are first multiplied by it.
  void (*fold)(const Sum<T>& lanes, const T* factor, int64_t J, int64_t size, const Sum<T>& to);
};

// The kernels of one instruction set. `scratch` is aligned to 64 bytes; scratch.h says what is in it.
template <class T>
struct Kernels {
  int64_t L;  // of the vectors that lanes_* work on
  void (*lanes_accumulate)(const AccumulatePass<T>&, const Range&, T* scratch);
  void (*lanes_gradient)(const GradientPass<T>&, const Range&, T* scratch);
  TileKernels<T> lanes_tiles, rows_tiles;
  // The weights of input capsules [i0, i1), contiguous, to `out`.
  void (*copy_weights)(const Problem&, int64_t i0, int64_t i1, T* out);
  RowsKernels<T> rows;
  SmallBatchKernels<T> small_batch;
  T (*multiply_adds)(int64_t rounds);  // 12 multiply-adds of registers a round
};

}  // namespace capsfast
