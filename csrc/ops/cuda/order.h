// The order of vectors [B, J, D] that only kernels of a call read, V and ds.
#pragma once

#include <cstdint>

#include "../../math/host_device.h"

namespace capsfast::cuda {

// The column (j, d) of votes that is the n-th, 0 <= n < 8, of a tile: see rows/layout.h.
struct Component {
  int j, d;
};

CAPSFAST_HOST_DEVICE constexpr Component component_of(int tiles, int tile, int n) {
  const int quad = n / 2, e = n % 2, G = tile / 8, t = tile % 8;
  if (G < tiles / 8) return {4 * G + quad, 2 * t + e};
  return {4 * G + quad / 2, 4 * t + 2 * (quad % 2) + e};
}

// The tile and the n of a column: the inverse of component_of.
struct TileColumn {
  int tile, n;
};

CAPSFAST_HOST_DEVICE constexpr TileColumn tile_column_of(int tiles, int j, int d) {
  const int G = j / 4;
  if (G < tiles / 8) return {8 * G + d / 2, 2 * (j % 4) + d % 2};
  return {8 * G + d / 4, 4 * (j % 4) + d % 4};
}

// [B, J, D] or, if `tiles` is not 0, the order in which the rows family reads them: [B / 16][tiles][32 lanes][4], of
// which what is padding is 0.
struct VectorOrder {
  int64_t J, D;
  int tiles;

  CAPSFAST_HOST_DEVICE int64_t size(int64_t B) const { return tiles == 0 ? B * J * D : (B + 15) / 16 * tiles * 128; }
  CAPSFAST_HOST_DEVICE bool padded(int64_t B) const { return tiles != 0 && size(B) != B * J * D; }
  CAPSFAST_HOST_DEVICE int64_t at(int64_t b, int64_t j, int64_t d) const {
    if (tiles == 0) return (b * J + j) * D + d;
    const TileColumn column = tile_column_of(tiles, static_cast<int>(j), static_cast<int>(d));
    const int64_t lane = b % 8 * 4 + column.n / 2;
    return ((b / 16 * tiles + column.tile) * 32 + lane) * 4 + b % 16 / 8 * 2 + column.n % 2;
  }
};

}  // namespace capsfast::cuda
