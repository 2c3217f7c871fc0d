// The gradient pass in the lanes layout, all iterations at once:
//   dvotes = sum_t [ c_t ds_t + db_t V_t ];  du = W^T dvotes;  dW = sum_b dvotes u^T;  dlogits = sum_t db_t
// Here t counts from 0 and V_t is what iteration t scored with, so V_0 = 0. No other task has the same input capsules
// and samples, so a task writes du (or dvotes) and dlogits of a sample once. It also writes dW, unless several tasks
// have the same input capsules (the batch is split) or the weight is shared. Then tasks have partial sums, which are
// added in a fixed order.
#pragma once

#include "../../cpu/vec.inl"
#include "scratch.h"
#include "gather.inl"
#include "lanes_products.inl"
#include "lanes_chunk.inl"
#include "lanes_vote_gradients.inl"

namespace capsfast::CAPSFAST_TARGET {

// Q: a quadratic pass of one iteration, which keeps the votes, less the center, from the score to dvotes.
template <class T, int L_, int K_, bool Q>
struct LanesGradient {
  using B_ = LanesProducts<T, L_, K_>;
  using VoteGradients = LanesVoteGradients<T, L_, Q>;
  using Tile = LanesTile<T, L_>;
  using V = typename B_::V;
  static constexpr int L = B_::L;
  static constexpr int kTogether = 4;  // iterations that are scored with one set of votes

  // Writes dot products of the votes with V and ds of every iteration to at.c and at.db, for output capsules [j0, j1)
  // and all input capsules of a chunk.
  static void score(const GradientPass<T>& pass, const Tile& tile, const LanesGradientScratch<T>& at, int64_t j0,
                    int64_t j1) {
    const Problem& p = *pass.problem;
    const int64_t J = p.J, D = p.D, K = B_::K_of(p.K), chunk = pass.plan->gradient_chunk;
    for (int64_t i = 0; i < tile.count; ++i) {
      const T* w = tile.weights + i * tile.pitch + j0 * B_::weight_rows_of(p) * K;
      const T* p_set[2 * kTogether];
      const T* q_set[2 * kTogether];
      T* out[2 * kTogether];
      for (int64_t from = pass.since; from < p.iterations; from += kTogether) {
        const int64_t to = from + kTogether < p.iterations ? from + kTogether : p.iterations;
        int64_t sets = 0;
        for (int64_t t = from; t < to; ++t) {
          T* c = at.c + (((t - pass.since) * chunk + i) * J + j0) * L;
          T* dc = at.db + (((t - pass.since) * chunk + i) * J + j0) * L;
          if (t < pass.scored) {
            __builtin_memset(c, 0, static_cast<size_t>((j1 - j0) * L) * sizeof(T));
          } else {
            p_set[sets] = Q && pass.score.squares
                              ? nullptr
                              : VoteGradients::parameters(pass.score.linear, pass, t, tile.t) + j0 * D * L;
            if (Q) q_set[sets] = VoteGradients::parameters(pass.score.square, pass, t, tile.t) + j0 * D * L;
            out[sets++] = c;
          }
          if (!VoteGradients::needs_db(pass, t)) continue;
          p_set[sets] = Q && pass.gradient.squares
                            ? nullptr
                            : VoteGradients::parameters(pass.gradient.linear, pass, t, tile.t) + j0 * D * L;
          if (Q) q_set[sets] = VoteGradients::parameters(pass.gradient.square, pass, t, tile.t) + j0 * D * L;
          out[sets++] = dc;
        }
        T* x = Q || pass.first.high != nullptr ? at.held + (i * J + j0) * D * L : nullptr;
        if (B_::votes_given(p)) {
          const T* votes = tile.votes + (i * J + j0) * D * L;
          if (p.capsule_lanes()) {
            B_::template score_stored<Q, true>(votes, j1 - j0, D, sets, p_set, q_set, out);
          } else {
            B_::template score_stored<Q, false>(votes, j1 - j0, D, sets, p_set, q_set, out);
          }
          continue;
        }
        const T* center = Q ? VoteGradients::parameters(pass.center, pass, 0, tile.t) + j0 * D * L : nullptr;
        B_::template scored_votes_apart<Q>(w, at.u + i * B_::pose_size_of(p) * L, tile.valid_of(i), center, K, p.P,
                                           j1 - j0, D, x, at.x, sets, p_set, q_set, out);
      }
    }
  }

  // All gradients of input capsule i that come from output capsule j, if a vector is one register and D a multiple of
  // L. dvotes stay in registers: they give du and then, transposed, dW.
  static void blocks(const GradientPass<T>& pass, const Tile& tile, const LanesGradientScratch<T>& at, int64_t i,
                     int64_t j, T* dw) {
    const int64_t D = pass.problem->D, K = B_::K_of(pass.problem->K);
    const T* u = at.u + i * K * L;
    const typename VoteGradients::template Gradient<> gradient(pass, tile, at, i, j);
    for (int64_t d = 0; d < D; d += L) {
      V rows[L];
      gradient.template rows<L>(d, rows);
      if (pass.du.data != nullptr) {
        const T* w = tile.weights + i * tile.pitch + (j * D + d) * K;
        T* du = at.du + i * K * L;
        B_::template pose_gradients_of_rows<B_::kPoses>(w, 0, K, rows, du);
      }
      if (dw == nullptr) continue;
      transpose<T, L>(rows);
      B_::weight_gradient_rows(rows, u, K, dw + (j * D + d) * K);
    }
  }

  static void write_weights(const GradientPass<T>& pass, const LanesGradientScratch<T>& at, int64_t i, const T* dw) {
    const Problem& p = *pass.problem;
    const int64_t rows = p.J * p.R(), size = rows * p.K;
    if (pass.dweight_sum != nullptr) {
      B_::weight_rows(dw, p.K, rows, at.row);
      const int64_t to = p.shared_weight ? 0 : i * size;
      for (int64_t n = 0; n < size; ++n) add_exactly(at.row[n], pass.dweight_sum + to + n, pass.dweight_low + to + n);
      return;
    }
    if (pass.dweight.storage == kStorage<T>) {
      B_::weight_rows(dw, p.K, rows, static_cast<T*>(pass.dweight.data) + i * size);
      return;
    }
    B_::weight_rows(dw, p.K, rows, at.row);
    scatter<T>(pass.dweight, i * size, {1, 1, size}, {0, 0, 1}, at.row);
  }

  static void tile_pass(const GradientPass<T>& pass, Tile& tile, int64_t t, const LanesGradientScratch<T>& at) {
    const Problem& p = *pass.problem;
    const int64_t J = p.J, D = p.D, K = B_::K_of(p.K), held = pass.plan->gradient_out_tile;
    const bool shared = p.shared_weight;
    const bool want_u = pass.du.data != nullptr, want_w = pass.dweight.data != nullptr;
    const int64_t row_blocks = (J * B_::weight_rows_of(p) + L - 1) / L;
    const T* center = Q ? VoteGradients::parameters(pass.center, pass, 0, t) : nullptr;
    tile.begin(p, t, center, at, pass.dlse);
    for (int64_t j0 = 0; j0 < J; j0 += held) score(pass, tile, at, j0, j0 + held < J ? j0 + held : J);
    VoteGradients::coefficients(pass, tile, at);
    if (pass.mass.high != nullptr) VoteGradients::add_sums(pass, tile, at);
    if (pass.dlogits != nullptr || pass.dlogits_sample.data != nullptr) VoteGradients::sum_logits(pass, tile, at);
    if (B_::votes_given(p)) {
      if (pass.dvotes.data != nullptr) VoteGradients::write_votes(pass, tile, at);
      return;
    }
    if (!want_u && !want_w) return;
    const int64_t pose = B_::pose_size_of(p);
    __builtin_memset(at.du, 0, static_cast<size_t>(tile.count * pose * L) * sizeof(T));
    for (int64_t j0 = 0; j0 < J; j0 += held) {
      const int64_t j1 = j0 + held < J ? j0 + held : J;
      const int64_t rows = (j1 - j0) * D, padded = (rows + L - 1) / L * L;
      for (int64_t i = 0; i < tile.count; ++i) {
        T* dw = want_w && pass.plan->weight_in_place
                    ? static_cast<T*>(pass.dweight.data) + (tile.i0 + i) * p.weight_size()
                    : at.dweight + (shared ? 0 : i) * row_blocks * L * K;
        if (B_::pose_matrices(p.P)) {
          VoteGradients::vote_gradients(pass, tile, at, i, j0, j1, at.dx);
          products_of_poses(pass, tile, at, i, j0, j1, dw);
          continue;
        }
        if constexpr (L == kLanes<T>) {
          if (D % L == 0) {
            for (int64_t j = j0; j < j1; ++j) blocks(pass, tile, at, i, j, want_w ? dw : nullptr);
            continue;
          }
        }
        VoteGradients::vote_gradients(pass, tile, at, i, j0, j1, at.dx);
        if (want_u) B_::pose_gradient(tile.weights + i * tile.pitch + j0 * D * K, K, at.dx, rows, at.du + i * K * L);
        if (!want_w) continue;
        for (int64_t row = rows; row < padded; ++row) store<L>(at.dx + row * L, V{});
        B_::weight_gradient(at.u + i * K * L, K, at.dx, padded, dw + j0 * D * K);
      }
    }
    if (!want_u) return;
    if (p.mask.data != nullptr) {
      for (int64_t n = 0; n < tile.count * pose; ++n) {
        const V ok = load<L>(at.valid + n / pose * L);
        store<L>(at.du + n * L, where(ok > V{}, load<L>(at.du + n * L), V{}));
      }
    }
    B_::unpack(at.du, tile.b0, tile.samples, tile.i0, tile.count, pose, at.buffer, pass.du);
  }

  // du and dW of pose matrices, from at.dx [j1 - j0][P][R][L]. Takes one pose at a time, whose rows at.x holds.
  static void products_of_poses(const GradientPass<T>& pass, const Tile& tile, const LanesGradientScratch<T>& at,
                                int64_t i, int64_t j0, int64_t j1, T* dw) {
    const Problem& p = *pass.problem;
    const int64_t R = p.R(), K = p.K, rows = (j1 - j0) * R, padded = (rows + L - 1) / L * L;
    const T* w = tile.weights + i * tile.pitch + j0 * R * K;
    for (int64_t row = rows; row < padded; ++row) store<L>(at.x + row * L, V{});
    for (int64_t pose = 0; pose < p.P; ++pose) {
      const int64_t place = (i * p.P + pose) * K * L;
      for (int64_t j = 0; j < j1 - j0; ++j)
        __builtin_memcpy(at.x + j * R * L, at.dx + (j * p.P + pose) * R * L, static_cast<size_t>(R * L) * sizeof(T));
      if (pass.du.data != nullptr) B_::pose_gradient(w, K, at.x, rows, at.du + place);
      if (pass.dweight.data != nullptr) B_::weight_gradient(at.u + place, K, at.x, padded, dw + j0 * R * K);
    }
  }

  static void run(const GradientPass<T>& pass, const Range& range, T* scratch) {
    const Problem& p = *pass.problem;
    const bool in_place = pass.plan->weight_in_place;
    const bool begun = in_place && pass.weight_begun, continued = in_place && pass.weight_continued;
    const LanesGradientScratch<T> at(p, *pass.plan, p.iterations - pass.since, scratch);
    const bool shared = p.shared_weight;
    const int64_t chunk = pass.plan->gradient_chunk, row_blocks = (p.J * p.R() + L - 1) / L,
                  row_size = row_blocks * p.K * L;
    Tile tile{};
    for (int64_t i0 = range.i0; i0 < range.i1; i0 += tile.count) {
      tile.begin_chunk(p, i0, range.i1, chunk, at.weights);
      const int64_t weight_count = shared ? 1 : tile.count;
      T* const dw =
          pass.dweight.data != nullptr && in_place ? static_cast<T*>(pass.dweight.data) + i0 * row_size : at.dweight;
      if (pass.dweight.data != nullptr && !begun)
        __builtin_memset(dw, 0, static_cast<size_t>(weight_count * row_size) * sizeof(T));
      if (pass.dlogits != nullptr)
        __builtin_memset(at.dlogits, 0, static_cast<size_t>(tile.count * p.J * L) * sizeof(T));
      for (int64_t t = range.tile0; t < range.tile1; ++t) tile_pass(pass, tile, t, at);
      if (pass.dweight.data != nullptr && !continued) {
        for (int64_t i = 0; i < weight_count; ++i) {
          if (in_place) {
            B_::transpose_weights(p.K, p.J * p.R(), at.block, dw + i * row_size);
          } else {
            write_weights(pass, at, i0 + i, dw + i * row_size);
          }
        }
      }
      if (pass.dlogits != nullptr) {
        for (int64_t n = 0; n < tile.count * p.J; ++n) {
          if (!p.capsule_lanes()) {
            pass.dlogits[i0 * p.J + n] += sum<T, L>(load<L>(at.dlogits + n * L));
            continue;
          }
          double* to = pass.dlogits + (i0 + n / p.J) * L * p.J + n % p.J;
          for (int64_t l = 0; l < tile.samples; ++l) to[l * p.J] += at.dlogits[n * L + l];
        }
      }
    }
  }
};

}  // namespace capsfast::CAPSFAST_TARGET
