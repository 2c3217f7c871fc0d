// The work between two passes, a tile of samples at a time; a tile of the rows layout is a sample (L = 1). Forward:
// s_t, v_t and V_t from the partial sums. Backward: V_t from the saved s_t, and ds_t from dv_t. With few input capsules
// this is a good part of a call.
#pragma once

#include "../../cpu/vec.inl"
#include "scratch.h"
#include "lanes_packing.inl"

namespace capsfast::CAPSFAST_TARGET {

template <class T, int L_>
struct LanesUpdate {
  using B_ = LanesPacking<T, L_>;
  using V = typename B_::V;
  static constexpr int L = B_::L;

  static int64_t samples(const Update<T>& at, int64_t tile) {
    return tile * L + L < at.problem->B ? L : at.problem->B - tile * L;
  }

  // The tile's rows of [tiles][J D][L].
  static int64_t rows_of(const Update<T>& at, int64_t tile) { return tile * at.problem->J * at.problem->D * L; }

  // 1 in lanes where output capsule j of the tile is valid, else 0, also in lanes without a sample.
  static V valid(const Update<T>& at, int64_t tile, int64_t j) {
    if (at.valid_out != nullptr) return load<L>(at.valid_out + (tile * at.problem->J + j) * L);
    T ok[L];
    for (int64_t l = 0; l < L; ++l) ok[l] = l < samples(at, tile) ? T(1) : T(0);
    return load<L>(ok);
  }

  static V squash_factor(const Problem& p, bool last, V n) {
    T f[L];
    store<L>(f, n);
    for (int l = 0; l < L; ++l) f[l] = p.squash.factor(last, f[l]);
    return load<L>(f);
  }

  // Rows of the tile's samples in at.s [B, J D], to lanes and back.
  static void read_sums(const Update<T>& at, int64_t tile, T* to) {
    const int64_t JD = at.problem->J * at.problem->D;
    B_::load_samples({at.s, kStorage<T>, {JD, JD, 1}}, tile * L, samples(at, tile), 1, JD, nullptr, to);
  }
  static void write_sums(const Update<T>& at, int64_t tile, const T* from) {
    const int64_t JD = at.problem->J * at.problem->D;
    B_::store_samples(from, tile * L, samples(at, tile), 1, JD, nullptr, {at.s, kStorage<T>, {JD, JD, 1}});
  }

  // v = squash(s + bias) of output capsule j, both [J D][L]; v may be s. Forward and backward call the same code, so
  // that their v agree to the bit: where long votes make logits of 1e6, one bit of V would change coefficients by
  // percents.
  static CAPSFAST_ONCE void squash(const Update<T>& at, int64_t tile, int64_t j, bool last, const T* s, T* v) {
    const int64_t begin = j * at.problem->D, end = begin + at.problem->D;
    V n{};
    for (int64_t row = begin; row < end; ++row) {
      const V x = load<L>(s + row * L) + at.bias[row];
      n += x * x;
    }
    const V f = squash_factor(*at.problem, last, n), ok = valid(at, tile, j);
    for (int64_t row = begin; row < end; ++row)
      store<L>(v + row * L, where(ok > V{}, f * (load<L>(s + row * L) + at.bias[row]), V{}));
  }

  // V of the next iteration, from V of this iteration (`before`) and its v.
  static V following(const Problem& p, V before, V v) { return p.squash.accumulate ? before + v : v; }

  static void outputs(const Update<T>& at, int64_t tile) {
    const Problem& p = *at.problem;
    const int64_t D = p.D, JD = p.J * D, pitch = at.plan->tiles * JD * L, here = rows_of(at, tile);
    T *const s = at.sum + here, *const v = at.low + here, *const V_t = at.V == nullptr ? nullptr : at.V + here;
    for (int64_t j = 0; j < p.J; ++j) {
      for (int64_t row = j * D; row < (j + 1) * D; ++row) {
        V x{};
        for (int64_t split = 0; split < at.plan->splits; ++split) {
          const int64_t part = split * pitch + row * L;
          x += load<L>(at.factor + (split * p.J + j) * L) * (load<L>(s + part) + load<L>(v + part));
        }
        store<L>(s + row * L, x);
      }
      squash(at, tile, j, at.v.data != nullptr, s, v);
      for (int64_t row = j * D; row < (j + 1) * D && at.V != nullptr; ++row)
        store<L>(V_t + row * L, following(p, load<L>(V_t + row * L), load<L>(v + row * L)));
    }
    write_sums(at, tile, s);
    if (at.v.data == nullptr) return;
    // The sums are not needed any more: s is a buffer for numbers of another type.
    B_::store_samples(v, tile * L, samples(at, tile), p.J, D, s, at.v);
  }

  // V_{t+1} from V_t and squash(s_t + bias). at.V points to V_t; V_{t+1} follows one iteration later in memory.
  static void restore(const Update<T>& at, int64_t tile) {
    const int64_t J = at.problem->J, JD = J * at.problem->D;
    const T* const before = at.V + rows_of(at, tile);
    T* const after = at.V + at.plan->tiles * JD * L + rows_of(at, tile);
    read_sums(at, tile, after);
    for (int64_t j = 0; j < J; ++j) squash(at, tile, j, false, after, after);
    for (int64_t n = 0; n < JD * L; n += L)
      store<L>(after + n, following(*at.problem, load<L>(before + n), load<L>(after + n)));
  }

  // ds is the derivative of the squash times dv, where dv is at.dv or the sum of the passes. c_dc [tiles][J][L], if
  // wanted, gets ds . s.
  // scratch: s [J D][L], and as much again for a dv that is not stored in T.
  static void differentiate(const Update<T>& at, int64_t tile, T* scratch) {
    const Problem& p = *at.problem;
    const int64_t D = p.D, JD = p.J * D, pitch = at.plan->tiles * JD * L, here = rows_of(at, tile);
    T *const s = scratch, *const ds = at.ds + here;
    const bool last = at.dv.data != nullptr;
    read_sums(at, tile, s);
    if (at.dv.data != nullptr) B_::load_samples(at.dv, tile * L, samples(at, tile), p.J, D, scratch + JD * L, ds);
    for (int64_t j = 0; j < p.J; ++j) {
      V n{}, s_dv{};
      for (int64_t row = j * D; row < (j + 1) * D; ++row) {
        V g = at.dv.data != nullptr ? load<L>(ds + row * L) : V{};
        for (int64_t split = 0; at.dv.data == nullptr && split < at.plan->splits; ++split) {
          const int64_t part = here + split * pitch + row * L;
          g += load<L>(at.sum + part) + load<L>(at.low + part);
        }
        store<L>(ds + row * L, g);
        const V x = load<L>(s + row * L) + at.bias[row];
        n += x * x;
        s_dv += x * g;
      }
      T slopes[L], along[L];
      store<L>(slopes, n);
      store<L>(along, s_dv);
      for (int l = 0; l < L; ++l) slopes[l] = p.squash.slope(last, slopes[l], along[l]);
      const V f = squash_factor(p, last, n), slope = load<L>(slopes), ok = valid(at, tile, j);
      V total{};
      for (int64_t row = j * D; row < (j + 1) * D; ++row) {
        const V x = load<L>(s + row * L);
        const V value = where(ok > V{}, f * load<L>(ds + row * L) + slope * (x + at.bias[row]), V{});
        store<L>(ds + row * L, value);
        total += value * x;
      }
      if (at.c_dc != nullptr) store<L>(at.c_dc + (tile * p.J + j) * L, total);
    }
  }
};

}  // namespace capsfast::CAPSFAST_TARGET
