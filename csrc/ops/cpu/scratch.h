// Lays out the scratch memory of a task. If `base` is null only `size`, in elements, is of use.
#pragma once

#include <algorithm>

#include "passes.h"

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

// Whether lanes may have nothing that counts.
inline bool masked(const Problem& p) { return p.mask.data != nullptr || p.capsule_lanes; }

// How many numbers of a sample are copied before they go to lanes: poses or votes, logits, numbers of input capsules.
inline int64_t packing_buffer(const Problem& p, int64_t chunk) {
  const int64_t poses = p.side_by_side ? 0 : chunk * p.pose_size(), votes = p.side_by_side ? p.J * p.D : 0;
  return std::max({poses, votes, p.logits.data != nullptr ? chunk * p.J : 0, p.moments ? chunk : 0});
}

// weights [chunk][J R K], or [1][J R K] if shared: copies, if gather_rows. buffer [L][chunk][P K or J]: copies of poses
// or logits before they are transposed. u [chunk][P K][L]; where samples are positions the votes, less the center,
// [chunk][J D][L], and buffer has room for those of an input capsule. logits [chunk][J][L], valid [chunk][L] (0 if
// masked). scores and dc [scored][J][L], where scored is 1 if all votes are held and else chunk. x [out_tile D][L]: the
// votes held. sum [out_tile D][L] and norm [J][L]: the sums of a chunk, those of s for a tile of output capsules at a
// time.
template <class T>
struct LanesAccumulateScratch {
  T *weights, *buffer, *u, *logits, *valid, *scores, *dc, *x, *sum, *norm, *second, *mass, *activation, *lse, *dlse;
  int64_t size;

  LanesAccumulateScratch(const Problem& p, const Plan& plan, T* base) {
    Carver<T> carve(base);
    const int64_t L = plan.L, pair = p.quadratic ? 2 : 1,
                  scored = plan.out_tile >= p.J && !p.side_by_side ? pair : plan.chunk;
    weights = carve.take(plan.gather_rows ? (p.weight.stride[0] == 0 ? 1 : plan.chunk) * p.weight_size() : 0);
    buffer = carve.take(packing_buffer(p, plan.chunk) * L);
    u = carve.take(plan.chunk * (p.side_by_side ? p.J * p.D : p.pose_size()) * L);
    logits = carve.take(p.logits.data != nullptr ? plan.chunk * p.J * L : 0);
    valid = carve.take(masked(p) ? plan.chunk * L : 0);
    scores = carve.take(scored * p.J * L);
    dc = carve.take(scored * p.J * L);
    x = carve.take(pair * plan.out_tile * p.D * L);
    sum = carve.take(plan.out_tile * p.D * L);
    norm = carve.take(p.J * L);
    second = carve.take(p.moments ? plan.out_tile * p.D * L : 0);
    mass = carve.take(p.moments ? p.J * L : 0);
    activation = carve.take(p.moments ? plan.chunk * L : 0);
    lse = carve.take(p.moments ? plan.chunk * L : 0);
    dlse = carve.take(p.moments ? plan.chunk * L : 0);
    size = carve.used();
  }
};

// weights, buffer, u, logits and valid as above, but for rows (j, r) of the weight where it says J D. c and db
// [iterations][chunk][J][L]. x and dx [out_tile D][L]: votes and their gradients, padded to a multiple of L rows. du
// [chunk][K][L]. dweight [chunk or 1][ceil(J D / L)][K][L]: blocks of L rows, transposed, and row [J D K], dweight of
// an input capsule before it is added or converted: both unless dW is added up in place. dlogits [chunk][J][L]. block
// [K][L]. held [chunk][J D][L]: the votes of a quadratic pass. activation, lse and dlse [chunk][L].
template <class T>
struct LanesGradientScratch {
  T *weights, *buffer, *u, *logits, *valid, *c, *db, *x, *dx, *du, *dweight, *dlogits, *row, *block, *held, *activation,
      *lse, *dlse;
  int64_t size;

  LanesGradientScratch(const Problem& p, const Plan& plan, int64_t iterations, T* base) {
    Carver<T> carve(base);
    const int64_t L = plan.L, chunk = plan.gradient_chunk, rows = p.J * p.R(), votes = p.J * p.D;
    const bool in_place = plan.weight_in_place;
    const int64_t tile_rows = (plan.gradient_out_tile * p.D + L - 1) / L * L;
    weights = carve.take(plan.gather_rows ? (p.weight.stride[0] == 0 ? 1 : chunk) * rows * p.K : 0);
    buffer = carve.take(packing_buffer(p, chunk) * L);
    u = carve.take(chunk * (p.side_by_side ? votes : p.pose_size()) * L);
    logits = carve.take(p.logits.data != nullptr ? chunk * p.J * L : 0);
    valid = carve.take(masked(p) ? chunk * L : 0);
    c = carve.take(iterations * chunk * p.J * L);
    db = carve.take(iterations * chunk * p.J * L);
    x = carve.take(tile_rows * L);
    dx = carve.take(tile_rows * L);
    du = carve.take(chunk * p.pose_size() * L);
    dweight =
        carve.take(in_place || p.side_by_side ? 0 : (p.shared_weight ? 1 : chunk) * ((rows + L - 1) / L) * p.K * L);
    dlogits = carve.take(p.logits.data != nullptr ? chunk * p.J * L : 0);
    row = carve.take(in_place ? 0 : rows * p.K);
    block = carve.take(in_place ? p.K * L : 0);
    held = p.side_by_side ? u : carve.take(p.quadratic ? chunk * votes * L : 0);
    activation = carve.take(p.moments ? chunk * L : 0);
    lse = carve.take(p.moments ? chunk * L : 0);
    dlse = carve.take(p.moments ? chunk * L : 0);
    size = carve.used();
  }
};

// Of a small batch, for a block of L input capsules and `outputs` output capsules at a time. buffer [L][..]: copies
// before they are transposed. u and du [B][P K][L]. valid [B][L]. weight and dweight [outputs][R K][L].
template <class T>
struct SmallBatchScratch {
  int64_t outputs;
  T *buffer, *u, *du, *valid, *weight, *dweight;
  int64_t size;

  SmallBatchScratch(const Problem& p, int64_t L, T* base) {
    constexpr int64_t kNumbers =
        256;  // of a capsule's weight; with those of L capsules and their gradients they fill L1
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
// 16 output capsules. scores and dc [J][L]. sum [J][vectors of D][L] and norm [J]: the sums of a chunk. second and mass:
// as sum and norm. activation, lse and dlse [L].
template <class T>
struct RowsAccumulateScratch {
  T *rows, *part, *scores, *dc, *sum, *norm, *second, *mass, *activation, *lse, *dlse;
  int64_t size;

  RowsAccumulateScratch(const Problem& p, const Plan& plan, T* base) {
    Carver<T> carve(base);
    const int64_t L = plan.L, sums = p.J * ((p.D + L - 1) / L * L);
    rows = carve.take(plan.gather_rows ? L * p.votes_size() : 0);
    part = carve.take(16 * L * L);
    scores = carve.take(p.J * L);
    dc = carve.take(p.J * L);
    sum = carve.take(sums);
    norm = carve.take(p.J);
    second = carve.take(p.moments ? sums : 0);
    mass = carve.take(p.moments ? p.J : 0);
    activation = carve.take(p.moments ? L : 0);
    lse = carve.take(p.moments ? L : 0);
    dlse = carve.take(p.moments ? L : 0);
    size = carve.used();
  }
};

// rows and part as above. c and db [iterations][J][L]. row [J D or D]: dvotes before they are converted to another
// dtype. activation, lse and dlse [L].
template <class T>
struct RowsGradientScratch {
  T *rows, *part, *c, *db, *row, *activation, *lse, *dlse;
  int64_t size;

  RowsGradientScratch(const Problem& p, const Plan& plan, int64_t iterations, T* base) {
    Carver<T> carve(base);
    const int64_t L = plan.L;
    rows = carve.take(plan.gather_rows ? L * p.votes_size() : 0);
    part = carve.take(16 * L * L);
    c = carve.take(iterations * p.J * L);
    db = carve.take(iterations * p.J * L);
    row = carve.take(p.votes_size());
    activation = carve.take(p.moments ? L : 0);
    lse = carve.take(p.moments ? L : 0);
    dlse = carve.take(p.moments ? L : 0);
    size = carve.used();
  }
};

}  // namespace capsfast
