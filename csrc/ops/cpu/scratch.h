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

// Whether some lanes may not count.
inline bool masked(const Problem& p) { return p.mask.data != nullptr || p.capsule_lanes(); }

// How many numbers of a sample are copied at a time before they go to lanes: poses or votes, logits, activation or lse.
inline int64_t packing_buffer(const Problem& p, int64_t chunk) {
  const int64_t poses = p.votes_in_lanes() ? 0 : chunk * p.pose_size(), votes = p.votes_in_lanes() ? p.J * p.D : 0;
  return std::max({poses, votes, p.logits.data != nullptr ? chunk * p.J : 0, p.moments ? chunk : 0});
}

// The data of a chunk of input capsules in the lanes layout. weights [chunk][J R K], or [1][J R K] if shared: copies, if
// gather_rows. buffer [L][chunk][P K or J]: copies of poses or logits before they are transposed. u [chunk][P K][L]. With
// side_by_side, u holds the votes, less the center, [chunk][J D][L], and buffer the votes of an input capsule. logits
// [chunk][J][L], valid [chunk][L] (0 if masked). activation, lse and dlse [chunk][L].
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

// scores and dc [scored][J][L]: scored is 1 if all votes are held, else chunk. x [out_tile D][L]: the votes held. sum
// [out_tile D][L] and norm [J][L]: the sums of a chunk; sum has a tile of output capsules at a time. second and mass: as
// sum and norm.
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
// rows. du [chunk][K][L]. dweight [chunk or 1][ceil(J R / L)][K][L]: blocks of L rows, transposed. row [J R K]: dweight
// of an input capsule before it is added or converted. Neither exists if dW is added up in place. dlogits [chunk][J][L].
// block [K][L]. held [chunk][J D][L]: the votes of a routing_pass.
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
    constexpr int64_t kNumbers = 256;  // of the weight of a capsule; for L capsules, with gradients, they fill L1
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

// The arrays of a block of samples. size: their length in T, from `memory` on. Coefficients of a sample are
// [blocks][J][L]. A forward has coefficients of one iteration, and no arrays of the backward.
template <class T>
struct FactoredScratch {
  T *U, *Ut;          // [samples][blocks L][Kp], unless read in place, and [samples][blocks][K][L]. 0 if masked
  T* logits;          // [samples], or one for all
  T* valid;           // [samples][blocks][L], or [L] without a mask: 1 in lanes with an input capsule, else 0
  T* valid_out;       // [samples][J][L]
  T* c;               // [blocks][J][L]
  T* start;           // couplings of iteration 0, if all samples have the same
  T *mean, *inverse;  // [J][L]: of a softmax over the input capsules, sum_i c dc and 1 / sum_i exp(b - max)
  T *part, *low;      // [J][Kp]: a part of a sum, and rounding errors of adding parts
  // Forward.
  T *Z, *q;  // [rows][Kp]: sums z, and what an iteration scores with
  T* s;      // [rows][Dp]: W z, then the outputs
  // Backward. right, left, coefficients and vectors are each a factor of one product over all iterations.
  T *right, *left;  // [2 r - 1][rows][Kp] and [2 r - 1][rows][Dp], whose product is dW: z of all iterations and dq of
                    // all but the last; ds of all iterations and the outputs of all but the last
  T* sums;          // [r][rows][Dp]: W z and the bias
  T* back;          // [2 r - 1][rows][Kp]: dz of all iterations, and q of all but the first
  T *f, *squares;   // [r][rows]: factor of the squash, and |s|^2
  T* coefficients;  // [samples][2 r - 1], for du: c of all iterations, then the gradients of the logits
  T* vectors;       // [2 r - 1][J][Kp]: the vectors that the coefficients multiply
  T* inverses;      // [samples][r][J][L]: `inverse` of every iteration
  T* dlogits;       // [samples]
  T* du;            // [L][Kp]
  int64_t size = 0;

  FactoredScratch(const FactoredCall<T>& call, T* memory, bool backward) {
    const Problem& p = *call.problem;
    const int64_t n = call.samples, M = call.rows(), r = p.iterations, J = p.J, L = call.L, sets = 2 * r - 1;
    const int64_t Kp = call.Kp, Dp = call.Dp, Ip = call.blocks * L;
    Carver<T> carve(memory);
    const auto take = [&](bool wanted, int64_t count) { return carve.take(wanted ? count : 0); };
    const bool same = call.same_start();
    U = take(!call.in_place, n * Ip * Kp), Ut = take(true, n * Ip * Kp);
    logits = take(p.logits.data != nullptr, (same ? 1 : n) * J * Ip);
    valid = take(true, p.mask.data == nullptr ? L : n * Ip);
    valid_out = take(p.out_mask.data != nullptr, n * J * L);
    c = take(true, J * Ip), start = take(same, J * Ip);
    mean = take(true, J * L), inverse = take(true, J * L);
    part = take(true, J * Kp), low = take(true, J * Kp);
    Z = take(!backward, M * Kp), q = take(!backward, M * Kp), s = take(!backward, M * Dp);
    right = take(backward, sets * M * Kp), left = take(backward, sets * M * Dp);
    sums = take(backward, r * M * Dp), back = take(backward, sets * M * Kp);
    f = take(backward, r * M), squares = take(backward, r * M);
    coefficients = take(backward, n * sets * J * Ip), vectors = take(backward, sets * J * Kp);
    inverses = take(backward, n * r * J * L);
    dlogits = take(backward && call.need_logits, n * J * Ip), du = take(backward && !call.in_place, L * Kp);
    size = carve.used();
  }
};

}  // namespace capsfast
