// Copies tensors to lanes and back, and weights to contiguous memory, for any K.
#pragma once

#include "../../cpu/vec.inl"
#include "scratch.h"
#include "gather.inl"

namespace capsfast::CAPSFAST_TARGET {

// L_: lanes of one register, or of a vector of several registers.
template <class T, int L_ = kLanes<T>>
struct LanesPacking {
  static constexpr int L = L_;
  static constexpr int W = kLanes<T>;  // a block of W x W is transposed at a time
  // How many sums fit the registers beside the terms or, if a vector has several registers, beside a factor.
  static constexpr int kSums = L == W ? kRegisters / 4 : kRegisters / 2 * W / L;
  using V = Vec<T, L>;
  using Register = Vec<T, W>;

  // Transposes from[l] [count] of each sample l < samples to `to` [count][L]. Lanes from `samples` on become 0.
  static CAPSFAST_ONCE void interleave(const T* const* from, int64_t samples, int64_t count, T* to) {
    int64_t n = 0;
    for (; n + W <= count; n += W) {
      for (int lane0 = 0; lane0 < L; lane0 += W) {
        Register m[W];
#pragma GCC unroll 16
        for (int l = 0; l < W; ++l) m[l] = lane0 + l < samples ? load<W>(from[lane0 + l] + n) : Register{};
        transpose<T, W>(m);
#pragma GCC unroll 16
        for (int l = 0; l < W; ++l) store<W>(to + (n + l) * L + lane0, m[l]);
      }
    }
    for (; n < count; ++n) {
      for (int l = 0; l < L; ++l) to[n * L + l] = l < samples ? from[l][n] : T(0);
    }
  }

  static CAPSFAST_ONCE void deinterleave(const T* from, int64_t samples, int64_t count, T* const* to) {
    int64_t n = 0;
    for (; n + W <= count; n += W) {
      for (int64_t lane0 = 0; lane0 < samples; lane0 += W) {
        Register m[W];
#pragma GCC unroll 16
        for (int l = 0; l < W; ++l) m[l] = load<W>(from + (n + l) * L + lane0);
        transpose<T, W>(m);
        for (int64_t l = 0; l < W && lane0 + l < samples; ++l) store<W>(to[lane0 + l] + n, m[l]);
      }
    }
    for (; n < count; ++n) {
      for (int64_t l = 0; l < samples; ++l) to[l][n] = from[n * L + l];
    }
  }

  // Copies [b0, b0 + samples) x [i0, i0 + n1) x [0, n2) of a [B, I, n2] tensor to lanes, `to` [n1][n2][L]. Samples that
  // lie side by side, and contiguous samples of type T, are read in place; others are first copied to `buffer`
  // [L][n1][n2].
  static CAPSFAST_ONCE void pack(const View& view, int64_t b0, int64_t samples, int64_t i0, int64_t n1, int64_t n2,
                                 T* buffer, T* to) {
    if (view.stride[0] == 1) return pack_lanes(view, b0, samples, i0, n1, n2, to);
    const int64_t n[3] = {1, n1, n2}, s[3] = {0, view.stride[1], view.stride[2]};
    const T* from[L] = {};
    for (int64_t l = 0; l < samples; ++l) {
      const int64_t offset = (b0 + l) * view.stride[0] + i0 * view.stride[1];
      if (is_run<T>(view, n, s)) {
        from[l] = static_cast<const T*>(view.data) + offset;
      } else {
        gather<T>(view, offset, n, s, buffer + l * n1 * n2);
        from[l] = buffer + l * n1 * n2;
      }
    }
    interleave(from, samples, n1 * n2, to);
  }

  static CAPSFAST_ONCE void unpack(const T* from, int64_t b0, int64_t samples, int64_t i0, int64_t n1, int64_t n2,
                                   T* buffer, const View& view) {
    if (view.stride[0] == 1) return unpack_lanes(from, b0, samples, i0, n1, n2, view);
    const int64_t n[3] = {1, n1, n2}, s[3] = {0, view.stride[1], view.stride[2]};
    const bool run = is_run<T>(view, n, s);
    T* to[L] = {};
    for (int64_t l = 0; l < samples; ++l) {
      const int64_t offset = (b0 + l) * view.stride[0] + i0 * view.stride[1];
      to[l] = run ? static_cast<T*>(view.data) + offset : buffer + l * n1 * n2;
    }
    deinterleave(from, samples, n1 * n2, to);
    if (run) return;
    for (int64_t l = 0; l < samples; ++l) {
      scatter<T>(view, (b0 + l) * view.stride[0] + i0 * view.stride[1], n, s, to[l]);
    }
  }

  // pack() and unpack() where samples lie side by side.
  static CAPSFAST_ONCE void pack_lanes(const View& view, int64_t b0, int64_t samples, int64_t i0, int64_t n1,
                                       int64_t n2, T* to) {
    for (int64_t n = 0; n < n1; ++n) {
      for (int64_t m = 0; m < n2; ++m, to += L) {
        const int64_t at = b0 + (i0 + n) * view.stride[1] + m * view.stride[2];
        if (view.storage == kStorage<T>) {
          const T* row = static_cast<const T*>(view.data) + at;
          store<L>(to, samples == L ? load<L>(row) : load_part<L>(row, samples));
        } else {
          store<L>(to, V{});
          gather<T>(view, at, {1, 1, samples}, {0, 0, 1}, to);
        }
      }
    }
  }
  static CAPSFAST_ONCE void unpack_lanes(const T* from, int64_t b0, int64_t samples, int64_t i0, int64_t n1, int64_t n2,
                                         const View& view) {
    for (int64_t n = 0; n < n1; ++n) {
      for (int64_t m = 0; m < n2; ++m, from += L) {
        const int64_t at = b0 + (i0 + n) * view.stride[1] + m * view.stride[2];
        if (view.storage != kStorage<T>) {
          scatter<T>(view, at, {1, 1, samples}, {0, 0, 1}, from);
        } else if (samples == L) {
          store<L>(static_cast<T*>(view.data) + at, load<L>(from));
        } else {
          store_part<L>(static_cast<T*>(view.data) + at, load<L>(from), samples);
        }
      }
    }
  }

  // Samples of a tensor [B, n1, n2] to lanes [n1][n2][L], and back. In the rows layout L is 1.
  static void load_samples(const View& view, int64_t b0, int64_t samples, int64_t n1, int64_t n2, T* buffer, T* to) {
    if constexpr (L == 1) {
      gather<T>(view, b0 * view.stride[0], {1, n1, n2}, {0, view.stride[1], n2 == 1 ? 1 : view.stride[2]}, to);
    } else {
      pack(view, b0, samples, 0, n1, n2, buffer, to);
    }
  }
  static void store_samples(const T* from, int64_t b0, int64_t samples, int64_t n1, int64_t n2, T* buffer,
                            const View& view) {
    if constexpr (L == 1) {
      scatter<T>(view, b0 * view.stride[0], {1, n1, n2}, {0, view.stride[1], n2 == 1 ? 1 : view.stride[2]}, from);
    } else {
      unpack(from, b0, samples, 0, n1, n2, buffer, view);
    }
  }

  // Whether the passes read votes where they lie.
  static bool votes_in_place(const Problem& p, const T* center) { return p.capsule_lanes() && center == nullptr; }

  // Whether some lanes of a chunk must not count. Lanes without a sample hold zeros and do not matter.
  static bool masked(const Problem& p, int64_t samples) {
    return p.mask.data != nullptr || (p.capsule_lanes() && samples < L);
  }

  // How many lanes hold a sample of a tile or, if lanes are input capsules, an input capsule of a block.
  static int64_t lanes_used(const Problem& p, int64_t tile, int64_t i0) {
    return p.capsule_lanes() ? min(L, p.I - i0 * L) : min(L, p.B - tile * L);
  }

  // How many input capsules from i0 on make a chunk. A block with empty lanes is a chunk of its own.
  static int64_t chunk_of(const Problem& p, int64_t i0, int64_t i1, int64_t most) {
    const int64_t count = min(most, i1 - i0);
    return p.capsule_lanes() && count > 1 && (i0 + count) * L > p.I ? count - 1 : count;
  }

  // Copies the poses of a chunk to u [chunk][P K][L], or its votes, less a center that is not null, to u [chunk][J
  // D][L]. Masked capsules get zeros. If there is a mask, or a block is not full, valid [chunk][L] gets 1 or 0.
  static CAPSFAST_ONCE void pack_poses(const Problem& p, int64_t b0, int64_t samples, int64_t i0, int64_t count,
                                       const T* center, T* buffer, T* u, T* valid) {
    const int64_t size = p.votes_in_lanes() ? p.J * p.D : p.pose_size();
    const bool in_place = votes_in_place(p, center);
    if (in_place) {
      // Votes are read in place; masked votes are zeros already.
    } else if (p.capsule_lanes()) {
      const T* votes = static_cast<const T*>(p.votes.data) + i0 * size * L;
      for (int64_t n = 0; n < count * size * L; n += L) store<L>(u + n, load<L>(votes + n) - center[n / L % size]);
    } else if (p.votes_in_lanes()) {
      for (int64_t i = 0; i < count; ++i) {
        T* votes = u + i * size * L;
        pack(of_capsule(p.votes, i0 + i), b0, samples, 0, p.J, p.D, buffer, votes);
        for (int64_t n = 0; center != nullptr && n < size * L; n += L)
          store<L>(votes + n, load<L>(votes + n) - load<L>(center + n));
      }
    } else {
      pack(p.u, b0, samples, i0, count, size, buffer, u);
    }
    if (!masked(p, samples)) return;
    for (int64_t i = 0; i < count; ++i) {
      for (int l = 0; l < L; ++l) {
        const bool is = l < samples && (p.mask.data == nullptr || p.mask.at(b0 + l, i0 + i));
        valid[i * L + l] = is ? T(1) : T(0);
      }
      if (in_place) continue;
      const V ok = load<L>(valid + i * L);
      for (int64_t k = 0; k < size; ++k) {
        T* uk = u + (i * size + k) * L;
        store<L>(uk, where(ok > V{}, load<L>(uk), V{}));
      }
    }
  }

  // The votes [B, J, D] of an input capsule in a view [B, I, J, D].
  static View of_capsule(const View& votes, int64_t i) {
    View view = votes;
    const int64_t size = votes.storage == Storage::f64 ? 8 : votes.storage == Storage::f32 ? 4 : 2;
    view.data = static_cast<char*>(votes.data) + i * votes.stride[1] * size;
    view.stride[1] = votes.stride[2];
    view.stride[2] = votes.stride[3];
    return view;
  }

  // Copies the logits of a chunk: to [chunk][J][L] if they differ between samples, else to [chunk][J].
  static CAPSFAST_ONCE void pack_logits(const Problem& p, int64_t b0, int64_t samples, int64_t i0, int64_t count,
                                        T* buffer, T* to) {
    if (p.logits.stride[0] != 0) {
      pack(p.logits, b0, samples, i0, count, p.J, buffer, to);
      return;
    }
    gather<T>(p.logits, i0 * p.logits.stride[1], {1, count, p.J}, {0, p.logits.stride[1], p.logits.stride[2]}, to);
  }

  // Copies numbers [B, I] of a chunk, if there are any, to lanes, `to` [chunk][L], 0 for masked capsules. valid and
  // buffer as in pack_poses(), which has filled valid.
  static CAPSFAST_ONCE void pack_numbers(const View& view, const Problem& p, int64_t b0, int64_t samples, int64_t i0,
                                         int64_t count, const T* valid, T* buffer, T* to) {
    if (view.data == nullptr) return;
    pack(view, b0, samples, i0, count, 1, buffer, to);
    if (p.mask.data == nullptr) return;
    for (int64_t n = 0; n < count * L; n += L) store<L>(to + n, where(load<L>(valid + n) > V{}, load<L>(to + n), V{}));
  }

  // Copies the weight [J R K] of input capsule i to `out`.
  static CAPSFAST_ONCE void copy_weight(const Problem& p, int64_t i, T* out) {
    const View& w = p.weight;
    const int64_t n[3] = {p.J, p.R(), p.K}, s[3] = {w.stride[1], w.stride[2], w.stride[3]};
    if (w.storage != kStorage<T> || s[1] != 1 || s[2] == 1) return gather<T>(w, i * w.stride[0], n, s, out);
    // The rows r are neighbours in memory, as in weights that are stored [.., K, D].
    for (int64_t j = 0; j < p.J; ++j) {
      const T* from = static_cast<const T*>(w.data) + i * w.stride[0] + j * s[0];
      for (int64_t r = 0; r < p.R(); r += W) {
        for (int64_t k = 0; k < p.K; k += W) {
          transpose_block(from + r + k * s[2], s[2], min(p.R() - r, W), min(p.K - k, W), out + r * p.K + k, p.K);
        }
      }
      out += p.R() * p.K;
    }
  }

  static int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }

  // to[d][k] = from[k][d] for `rows` d and `columns` k, at most W each; rows of `from` are `pitch` apart.
  static CAPSFAST_INLINE void transpose_block(const T* from, int64_t pitch, int64_t rows, int64_t columns, T* to,
                                              int64_t K) {
    Register m[W];
#pragma GCC unroll 16
    for (int n = 0; n < W; ++n) {
      if (n >= columns) {
        m[n] = Register{};
      } else {
        m[n] = rows == W ? load<W>(from + n * pitch) : load_part<W>(from + n * pitch, rows);
      }
    }
    transpose<T, W>(m);
    for (int64_t d = 0; d < rows; ++d) {
      if (columns == W) {
        store<W>(to + d * K, m[d]);
      } else {
        store_part<W>(to + d * K, m[d], columns);
      }
    }
  }

  static void copy_weights(const Problem& p, int64_t i0, int64_t i1, T* out) {
    for (int64_t i = i0; i < i1; ++i, out += p.weight_size()) copy_weight(p, i, out);
  }

  // The weights [J R K] of `count` input capsules, *pitch elements apart (0 if shared): in place if they are contiguous
  // and of type T, else copied to `buffer`.
  static CAPSFAST_ONCE const T* weight_chunk(const Problem& p, int64_t i0, int64_t count, T* buffer, int64_t* pitch) {
    const View& w = p.weight;
    if (p.votes_in_lanes()) return nullptr;
    const int64_t n[3] = {p.J, p.R(), p.K}, s[3] = {w.stride[1], w.stride[2], w.stride[3]};
    if (is_run<T>(w, n, s)) {
      *pitch = w.stride[0];
      return static_cast<const T*>(w.data) + i0 * w.stride[0];
    }
    *pitch = w.stride[0] == 0 ? 0 : p.weight_size();
    for (int64_t i = 0; i < (*pitch == 0 ? 1 : count); ++i) copy_weight(p, i0 + i, buffer + i * *pitch);
    return buffer;
  }
};

}  // namespace capsfast::CAPSFAST_TARGET
