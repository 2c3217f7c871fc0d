// Chooses a tile kernel by element type, K and D.
#pragma once

#include "general.h"
#include "tile_final.h"

namespace capsfast::cuda {

template <bool kBackward>
struct TileKernel {
  // False if the passes were to run in one launch and the device refuses it. Nothing was launched then.
  bool (*launch)(const TilePasses<kBackward>&, int threads, const Launch&);
  // How many blocks a multiprocessor runs at the same time.
  int64_t (*blocks)(int J, bool softmax_in, int threads);
};

using TileFinalLauncher = void (*)(const TileFinalArgs&, int threads, const Launch&);

// Each type and K has a file tile_<type>_k<K>.cu, so that these compile in parallel. two: two row tiles a block.
template <class E, int K, bool kBackward>
TileKernel<kBackward> tile_kernel_for(int64_t D, bool two);
template <class E, int K>
TileFinalLauncher tile_final_launcher(int64_t D);

#define CAPSFAST_TILE_FILES(file)                                                                      \
  file(float, 4) file(float, 8) file(float, 16) file(BFloat16, 4) file(BFloat16, 8) file(BFloat16, 16) \
      file(Float16, 4) file(Float16, 8) file(Float16, 16)
#define CAPSFAST_TILE_FILE(E, K)                                                 \
  extern template TileKernel<false> tile_kernel_for<E, K, false>(int64_t, bool); \
  extern template TileKernel<true> tile_kernel_for<E, K, true>(int64_t, bool);   \
  extern template TileFinalLauncher tile_final_launcher<E, K>(int64_t);
CAPSFAST_TILE_FILES(CAPSFAST_TILE_FILE)
#undef CAPSFAST_TILE_FILE
#undef CAPSFAST_TILE_FILES

}  // namespace capsfast::cuda
