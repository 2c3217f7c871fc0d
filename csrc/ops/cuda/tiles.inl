// The launchers of one type and K; included by tile_<type>_k<K>.cu.
#include "tiles.h"

namespace capsfast::cuda {

template <class E, int K, int D, bool kBackward, bool kTwo>
void launch_tiles(const TileArgs& args, int threads, const Launch& at) {
  const int bytes = Tiles<E, K, D, kBackward, kTwo>::bytes(static_cast<int>(args.in.J), threads, args.in.softmax_in);
  gpu::launch(tile_kernel<E, K, D, kBackward, kTwo>, at.grid, threads, bytes, at.stream, args);
}

template <class E, int K, int D>
TileLauncher pick_tiles(bool backward, bool two) {
  if (backward) return two ? launch_tiles<E, K, D, true, true> : launch_tiles<E, K, D, true, false>;
  return two ? launch_tiles<E, K, D, false, true> : launch_tiles<E, K, D, false, false>;
}

template <class E, int K>
TileLauncher tile_launcher(int64_t D, bool backward, bool two) {
  return D == 8 ? pick_tiles<E, K, 8>(backward, two) : D == 16 ? pick_tiles<E, K, 16>(backward, two) : pick_tiles<E, K, 32>(backward, two);
}

template <class E, int K, int D>
void launch_tile_final(const TileFinalArgs& args, int threads, const Launch& at) {
  const int bytes = 4 * FinalTiles<E, K, D>::memory(static_cast<int>(args.in.J), threads, static_cast<int>(args.iterations - args.first), args.in.softmax_in).end;
  gpu::launch(tile_final_kernel<E, K, D>, at.grid, threads, bytes, at.stream, args);
}

template <class E, int K>
TileFinalLauncher tile_final_launcher(int64_t D) {
  return D == 8 ? launch_tile_final<E, K, 8> : D == 16 ? launch_tile_final<E, K, 16> : launch_tile_final<E, K, 32>;
}

}  // namespace capsfast::cuda
