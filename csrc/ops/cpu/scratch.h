// Lays out the scratch memory of a task. If `base` is null, only `size` (in elements) means anything.
#pragma once

#include <algorithm>

#include "kernels.h"

namespace capsfast {

template <class T>
class Carver {
 public:
  explicit Carver(T* base) : base_(base) {}
  // Every array starts at a multiple of 16 elements, hence at a cache line, so that full vectors are aligned.
  T* take(int64_t count) {
    T* here = base_ == nullptr ? nullptr : base_ + used_;
    used_ += (count + 15) / 16 * 16;
    return here;
  }
  int64_t used() const { return used_; }

 private:
  T* base_;
  int64_t used_ = 0;
};

// Whether some lanes may not count.
inline bool masked(const Problem& p) { return p.mask.data != nullptr || p.capsule_lanes(); }

// How many numbers of a sample are copied at a time before they go to lanes: poses or votes, logits, activation or lse.
inline int64_t packing_buffer(const Problem& p, int64_t chunk) {
  const int64_t poses = p.votes_in_lanes() ? 0 : chunk * p.pose_size(), votes = p.votes_in_lanes() ? p.J * p.D : 0;
  return std::max({poses, votes, p.logits.data != nullptr ? chunk * p.J : 0, p.moments ? chunk : 0});
}

// The data of a chunk of input capsules in the lanes layout. weights [chunk][J R K], or [1][J R K] if shared: copied
// weights, only with gather_rows. buffer [L][chunk][P K or J]: copies of poses or logits before they are transposed. u
// [chunk][P K][L]: the poses. If votes lie in lanes, u [chunk][J D][L] holds the votes, less the center, and buffer the
// votes of an input capsule. logits [chunk][J][L], valid [chunk][L] (0 if masked). activation, lse and dlse [chunk][L].
template <class T>
struct LanesChunkScratch {
  T *weights, *buffer, *u, *logits, *valid, *activation, *lse, *dlse;

  LanesChunkScratch(const Problem& p, const Plan& plan, int64_t chunk, Carver<T>* carve) {
    const auto take = [&](bool wanted, int64_t count) { return carve->take(wanted ? count * plan.L : 0); };
    const int64_t rows = p.weight.stride[0] == 0 ? 1 : chunk;
    weights = carve->take(plan.gather_rows ? rows * p.weight_size() : 0);
    buffer = take(true, packing_buffer(p, chunk));
    u = take(true, chunk * (p.votes_in_lanes() ? p.J * p.D : p.pose_size()));
    logits = take(p.logits.data != nullptr, chunk * p.J);
    valid = take(masked(p), chunk);
    activation = take(p.moments, chunk), lse = take(p.moments, chunk), dlse = take(p.moments, chunk);
  }
};

// scores and dc [scored][J][L]: scored is chunk, or 1 (2 in a quadratic pass) if x holds the votes of all output
// capsules. x [1 or 2][out_tile D][L]: votes. sum [out_tile D][L] and norm [J][L]: the sums of a chunk; sum has a tile
// of output capsules at a time. second is like sum, mass like norm.
template <class T>
struct LanesAccumulateScratch : private Carver<T>, LanesChunkScratch<T> {
  T *scores, *dc, *x, *sum, *norm, *second, *mass;
  int64_t size;

  LanesAccumulateScratch(const Problem& p, const Plan& plan, T* base)
      : Carver<T>(base), LanesChunkScratch<T>(p, plan, plan.chunk, this) {
    const auto take = [&](bool wanted, int64_t count) { return Carver<T>::take(wanted ? count * plan.L : 0); };
    const int64_t pair = p.quadratic ? 2 : 1, scored = plan.out_tile >= p.J && !p.votes_in_lanes() ? pair : plan.chunk;
    scores = take(true, scored * p.J), dc = take(true, scored * p.J);
    x = take(true, pair * plan.out_tile * p.D);
    sum = take(true, plan.out_tile * p.D), norm = take(true, p.J);
    second = take(p.moments, plan.out_tile * p.D), mass = take(p.moments || p.softmax_in(), p.J);
    size = Carver<T>::used();
  }
};

// c and db [iterations][chunk][J][L]. x and dx [out_tile D][L]: votes and their gradients, padded to a multiple of L
// rows. du [chunk][P K][L]. dweight [chunk or 1][ceil(J R / L)][K][L]: blocks of L rows, transposed. row [J R K]:
// dweight of an input capsule before it is added or converted. If dW is added up in place, dweight and row do not
// exist, but block [K][L] does. dlogits [chunk][J][L]. held [chunk][J D][L]: the votes of a routing_pass.
template <class T>
struct LanesGradientScratch : private Carver<T>, LanesChunkScratch<T> {
  T *c, *db, *x, *dx, *du, *dweight, *dlogits, *row, *block, *held;
  int64_t size;

  LanesGradientScratch(const Problem& p, const Plan& plan, int64_t iterations, T* base)
      : Carver<T>(base), LanesChunkScratch<T>(p, plan, plan.gradient_chunk, this) {
    const auto take = [&](bool wanted, int64_t count) { return Carver<T>::take(wanted ? count * plan.L : 0); };
    const int64_t L = plan.L, chunk = plan.gradient_chunk, rows = p.J * p.R();
    const bool in_place = plan.weight_in_place;
    const int64_t tile_rows = (plan.gradient_out_tile * p.D + L - 1) / L * L;
    c = take(true, iterations * chunk * p.J), db = take(true, iterations * chunk * p.J);
    x = take(true, tile_rows), dx = take(true, tile_rows);
    du = take(true, chunk * p.pose_size());
    dweight = take(!in_place && !p.votes_in_lanes(), (p.shared_weight ? 1 : chunk) * ((rows + L - 1) / L) * p.K);
    dlogits = take(p.logits.data != nullptr, chunk * p.J);
    row = Carver<T>::take(in_place ? 0 : rows * p.K);
    block = take(in_place, p.K);
    held = p.votes_in_lanes() ? this->u : take(p.moments, chunk * p.J * p.D);
    size = Carver<T>::used();
  }
};

// For a small batch: a block of L input capsules and `outputs` output capsules at a time. buffer [L][..]: copies before
// they are transposed. u and du [B][P K][L]. valid [B][L]. weight and dweight [outputs][R K][L].
template <class T>
struct SmallBatchScratch {
  int64_t outputs;
  T *buffer, *u, *du, *valid, *weight, *dweight;
  int64_t size;

  SmallBatchScratch(const Problem& p, int64_t L, T* base) {
    constexpr int64_t kNumbers = 256;  // of the weight of a capsule; L capsules with their gradients fill L1
    const int64_t row = p.R() * p.K;
    outputs = std::clamp<int64_t>(kNumbers / std::max<int64_t>(1, row), 1, p.J);
    Carver<T> carve(base);
    buffer = carve.take(L * std::max(p.pose_size(), outputs * row));
    u = carve.take(p.B * p.pose_size() * L);
    du = carve.take(p.B * p.pose_size() * L);
    valid = carve.take(p.mask.data != nullptr ? p.B * L : 0);
    weight = carve.take(outputs * row * L);
    dweight = carve.take(outputs * row * L);
    size = carve.used();
  }
};

// For blocks of L input capsules. rows [L][J D or D]: copies of votes, if gather_rows. part [16][L][L]: partial sums of
// 16 output capsules. If votes are keys, rows are padded to whole vectors and part is [vectors of D][L]. c and db
// [iterations][J][L]; a pass that accumulates has one iteration. valid, activation, lse and dlse [L].
// sum and second [J][vectors of D][L] and mass [J][L]: the sums of a chunk. Only to accumulate: norm [J].
// Only for gradients: row [J D or D], dvotes before they are converted to another dtype. For keys also gradients
// [L][vectors of D] of a block, and padded [J][vectors of D], the vectors that make them.
template <class T>
struct RowsScratch {
  T *rows, *part, *c, *db, *valid, *activation, *lse, *dlse, *sum, *norm, *second, *mass, *row, *gradients, *padded;
  int64_t size;

  RowsScratch(const Problem& p, const Plan& plan, int64_t iterations, bool gradient, T* base) {
    Carver<T> carve(base);
    const auto take = [&](bool wanted, int64_t count) { return carve.take(wanted ? count : 0); };
    const int64_t L = plan.L, vote = (p.D + L - 1) / L * L, sums = p.J * vote;
    rows = take(p.keys() || plan.gather_rows, L * (p.keys() ? vote : p.votes_size()));
    part = take(true, p.keys() ? L * vote : 16 * L * L);
    c = take(true, iterations * p.J * L), db = take(true, iterations * p.J * L);
    valid = take(true, L);
    activation = take(p.moments, L), lse = take(p.moments, L), dlse = take(p.moments, L);
    sum = take(!gradient || p.moments, sums), norm = take(!gradient, p.J);
    second = take(p.moments, sums), mass = take(p.moments || p.softmax_in(), p.J * L);
    row = take(gradient, p.votes_size());
    gradients = take(gradient && p.keys(), L * vote), padded = take(gradient && p.keys(), sums);
    size = carve.used();
  }
};

}  // namespace capsfast
