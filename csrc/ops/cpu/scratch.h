// One task's scratch memory, laid out for a plan. With base = nullptr only the size counts.
#pragma once

#include "passes.h"

namespace capsfast {

template <class T>
class Carver {
 public:
  explicit Carver(T* base) : base_(base) {}
  // Runs of whole cache lines, so that vectors in different arrays never share one.
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

// weights [chunk][J D K] where they are not a run of T; buffer: strided storage on its way to lanes;
// u [chunk][K][L]; logits [chunk][J][L]; valid [chunk][L]; scores and dc [scored][J][L] with scored = 1
// while all votes are held, else chunk; x, the votes held; sum [J D][L] and norm [J][L] of a chunk.
template <class T>
struct LanesReduceScratch {
  T *weights, *buffer, *u, *logits, *valid, *scores, *dc, *x, *sum, *norm;
  int64_t size;

  LanesReduceScratch(const Problem& p, const Plan& plan, T* base) {
    Carver<T> carve(base);
    const int64_t L = plan.L, scored = plan.out_tile >= p.J ? 1 : plan.chunk;
    weights = carve.take(plan.gather_rows ? (p.weight.stride[0] == 0 ? 1 : plan.chunk) * p.J * p.D * p.K : 0);
    buffer = carve.take(plan.chunk * (p.K > p.J ? p.K : p.J) * L);
    u = carve.take(plan.chunk * p.K * L);
    logits = carve.take(p.logits.data != nullptr ? plan.chunk * p.J * L : 0);
    valid = carve.take(p.mask.data != nullptr ? plan.chunk * L : 0);
    scores = carve.take(scored * p.J * L);
    dc = carve.take(scored * p.J * L);
    x = carve.take(plan.out_tile * p.D * L);
    sum = carve.take(p.J * p.D * L);
    norm = carve.take(p.J * L);
    size = carve.used();
  }
};

// As above; c and db [iterations][chunk][J][L]; x and dx [out_tile D, to a multiple of L][L];
// du [chunk][K][L]; dweight [chunk][J D / L][K][L], transposed; dlogits [chunk][J][L]; row [J D K].
template <class T>
struct LanesFinalScratch {
  T *weights, *buffer, *u, *logits, *valid, *c, *db, *x, *dx, *du, *dweight, *dlogits, *row;
  int64_t size;

  LanesFinalScratch(const Problem& p, const Plan& plan, int64_t iterations, T* base) {
    Carver<T> carve(base);
    const int64_t L = plan.L, chunk = plan.final_chunk, rows = p.J * p.D;
    const int64_t tile_rows = (plan.final_out_tile * p.D + L - 1) / L * L;
    weights = carve.take(plan.gather_rows ? (p.weight.stride[0] == 0 ? 1 : chunk) * rows * p.K : 0);
    buffer = carve.take(chunk * (p.K > p.J ? p.K : p.J) * L);
    u = carve.take(chunk * p.K * L);
    logits = carve.take(p.logits.data != nullptr ? chunk * p.J * L : 0);
    valid = carve.take(p.mask.data != nullptr ? chunk * L : 0);
    c = carve.take(iterations * chunk * p.J * L);
    db = carve.take(iterations * chunk * p.J * L);
    x = carve.take(tile_rows * L);
    dx = carve.take(tile_rows * L);
    du = carve.take(chunk * p.K * L);
    dweight = carve.take((p.shared_weight ? 1 : chunk) * ((rows + L - 1) / L) * p.K * L);
    dlogits = carve.take(chunk * p.J * L);
    row = carve.take(rows * p.K);
    size = carve.used();
  }
};

// Blocks of L input capsules: rows [L][J D K] where storage is not a run of T, pose [K], u [L][D K];
// V, ds and sum [samples][J][D K]; norm [samples][J]; scores and dc [J][L].
template <class T>
struct RowsReduceScratch {
  T *rows, *pose, *u, *V, *ds, *scores, *dc, *sum, *norm;
  int64_t size;

  RowsReduceScratch(const Problem& p, const Plan& plan, T* base) {
    Carver<T> carve(base);
    const int64_t M = p.D * p.K, L = plan.L;
    const int64_t samples = p.votes_given ? 1 : (p.B + plan.tile_groups - 1) / plan.tile_groups;
    rows = carve.take(plan.gather_rows ? L * p.J * M : 0);
    pose = carve.take(p.K);
    u = carve.take(p.votes_given ? 0 : L * (M + L));
    V = carve.take(samples * p.J * M);
    ds = carve.take(samples * p.J * M);
    scores = carve.take(p.J * L);
    dc = carve.take(p.J * L);
    sum = carve.take(samples * p.J * M);
    norm = carve.take(samples * p.J);
    size = carve.used();
  }
};

// As above; V and ds [samples][iterations][J][D K]; c and db [iterations][J][L]; du [D K]; dw [L][J D K].
template <class T>
struct RowsFinalScratch {
  T *rows, *pose, *u, *V, *ds, *c, *db, *du, *dw;
  int64_t size;

  RowsFinalScratch(const Problem& p, const Plan& plan, int64_t iterations, T* base) {
    Carver<T> carve(base);
    const int64_t M = p.D * p.K, L = plan.L;
    const int64_t samples = p.votes_given ? 1 : (p.B + plan.final_groups - 1) / plan.final_groups;
    rows = carve.take(plan.gather_rows ? L * p.J * M : 0);
    pose = carve.take(p.K);
    u = carve.take(p.votes_given ? 0 : L * (M + L));
    V = carve.take(samples * iterations * p.J * M);
    ds = carve.take(samples * iterations * p.J * M);
    c = carve.take(iterations * p.J * L);
    db = carve.take(iterations * p.J * L);
    du = carve.take(p.votes_given ? 0 : M);
    dw = carve.take(p.votes_given ? p.J * M : L * p.J * M);
    size = carve.used();
  }
};

}  // namespace capsfast
