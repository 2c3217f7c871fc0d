// What a pass over the input capsules gets and gives, and the table of kernels per instruction set.
//
// Two layouts. "lanes": L samples stand in the lanes of a vector; per-sample arrays are
// [tiles][rows][L] with tiles = ceil(B / L), weights are broadcast. "rows", for votes that exist: the
// lanes run along a vote; per-sample arrays are [B][rows]. T is the type sums are formed in.
#pragma once

#include <cstdint>

#include "../routing.h"

namespace capsfast {

// How the passes cut their work; chosen by plan.cpp.
struct Plan {
  bool lanes = true;         // layout
  bool small_batch = false;  // rows: the votes are made once and kept
  int64_t L = 1;             // samples (lanes) or row elements (rows) in a vector
  int64_t tiles = 1;         // lanes: ceil(B / L); rows: B
  int64_t chunk = 1;         // input capsules whose weights and poses are prepared at a time
  int64_t out_tile = 1;      // lanes: output capsules whose votes are held at a time
  int64_t tile_groups = 1;   // tasks along the batch
  int64_t splits = 1;        // tasks along the input capsules
  int64_t final_chunk = 1;   // the same three for the backward's last pass
  int64_t final_out_tile = 1;
  int64_t final_groups = 1;
  int64_t final_splits = 1;
  bool weight_in_place = false;  // lanes: one task writes a row of dW, whole vectors of it, and adds it up there
  bool gather_rows = false;      // weight or votes are not runs of T: they are copied first
};

// One task's share.
struct Range {
  int64_t tile0 = 0, tile1 = 0;
  int64_t i0 = 0, i1 = 0;
};

// A reducing pass. Forward: sum_i c votes. Backward: sum_i db votes with
// db = c (dc - sum c dc), dc = votes . ds + dcoupling.
template <class T>
struct ReducePass {
  const Problem* problem = nullptr;
  const Plan* plan = nullptr;
  const T* V = nullptr;          // [tiles][J D][L], null in the first iteration (V_0 = 0)
  const T* ds = nullptr;         // backward: the same shape; null forward
  const T* valid_out = nullptr;  // [tiles][J][L], 1 or 0; null where out_mask is absent
  const T* in_max = nullptr;     // softmax "in", backward and coupling: c = exp(b - max) scale, [tiles][J][L]
  const T* in_scale = nullptr;
  const T* c_dc = nullptr;  // softmax "in", backward: sum_i c dc, [tiles][J][L]
  View dcoupling;           // [B, I, J], backward of the last iteration
  View coupling;            // [B, I, J], where c is written
  bool unweighted = false;  // c is 1 everywhere: the caller scales the sum
  // Out, added to. What an addition rounds off is kept in `low`, so that the error of a sum over many
  // chunks stays that of one chunk.
  T* sum = nullptr;  // [tiles][J D][L]; null when only c is wanted
  T* low = nullptr;
  T* max = nullptr;  // softmax "in" forward: running maximum and sum of exponentials, [tiles][J][L]
  T* norm = nullptr;
  T* norm_low = nullptr;
};

// The backward's last pass: du, dweight (or dvotes) and dlogits from every iteration at once.
template <class T>
struct FinalPass {
  const Problem* problem = nullptr;
  const Plan* plan = nullptr;
  int64_t first = 0;      // iterations [first, r) take part
  const T* V = nullptr;   // [r][tiles][J D][L]; V[0] = 0 is not read
  const T* ds = nullptr;  // [r][tiles][J D][L]
  const T* valid_out = nullptr;
  const T* in_max = nullptr;  // [r][tiles][J][L]
  const T* in_scale = nullptr;
  const T* c_dc = nullptr;    // [r][tiles][J][L]
  View dcoupling;             // of the last iteration
  View du;                    // [B, I, K]
  View dvotes;                // [B, I, J, D]
  View dlogits_sample;        // [B, I, J]: per-sample logits
  double* dlogits = nullptr;  // [I, J], added to: shared logits
  T* dweight_sum = nullptr;   // [I or 1, J, D, K], added to; null when dweight is written once, below
  T* dweight_low = nullptr;   // what those additions round off
  View dweight;               // [I, J, D, K]
};

// lanes: between two passes. sum and low as above, a split every tiles [J D][L]; s and v [B, J, D].
template <class T>
struct Between {
  const Problem* problem = nullptr;
  const Plan* plan = nullptr;
  const T* bias = nullptr;       // [J D]
  const T* valid_out = nullptr;  // [tiles][J][L]
  T* sum = nullptr;
  T* low = nullptr;
  T* V = nullptr;  // [tiles][J D][L]; forward: null if no pass follows
  T* s = nullptr;  // of the iteration
  // Forward: s is the sum over the splits of factor [splits][J][L], the tile's own, times their sums. Both halves of
  // the first split's sums are used up. data null: v is not wanted.
  const T* factor = nullptr;
  View v;
  // Backward: data null, dv is what the passes summed.
  View dv;
  T* ds = nullptr;    // [tiles][J D][L]
  T* c_dc = nullptr;  // [tiles][J][L]: ds . s; null where it is not wanted
};

// What a small batch makes of dvotes [B, I, J, D]; fields as in FinalPass, dweight_sum for a shared weight.
template <class T>
struct SmallBatchGradients {
  const T* dvotes = nullptr;
  View du;
  View dweight;
  T* dweight_sum = nullptr;
  T* dweight_low = nullptr;
};

// Kernels of one instruction set; scratch is laid out by scratch.h and aligned to 64 bytes.
template <class T>
struct Kernels {
  int64_t L;
  void (*lanes_reduce)(const ReducePass<T>&, const Range&, T* scratch);
  void (*lanes_final)(const FinalPass<T>&, const Range&, T* scratch);
  void (*lanes_outputs)(const Between<T>&, int64_t tile);                    // s_t, v_t and V_t
  void (*lanes_restore)(const Between<T>&, int64_t tile);                    // V_{t+1} from V_t and s_t
  void (*lanes_differentiate)(const Between<T>&, int64_t tile, T* scratch);  // ds_t from dv_t; scratch 2 [J D][L]
  void (*rows_reduce)(const ReducePass<T>&, const Range&, T* scratch);
  void (*rows_final)(const FinalPass<T>&, const Range&, T* scratch);
  // The small batch's own, for input capsules [i0, i1).
  void (*small_votes)(const Problem&, int64_t i0, int64_t i1, T* votes, T* scratch);
  void (*small_gradients)(const SmallBatchGradients<T>&, const Problem&, int64_t i0, int64_t i1, T* scratch);
  T (*multiply_adds)(int64_t rounds);  // 12 vectors a round
};

}  // namespace capsfast
