// Launchers of the tile kernels of one element type and K; included by tile_<type>_k<K>.cu.
#include "tiles.h"

namespace capsfast::cuda {

template <class E, int K, int D, bool kBackward, bool kTwo>
TileKernel<kBackward> tile_kernel_of() {
  using Tr = Tiles<E, K, D, kBackward, kTwo>;
  return {
      [](const TilePasses<kBackward>& args, int threads, const Launch& at) {
        const Inputs& in = args.steps.in;
        const int bytes = Tr::bytes(static_cast<int>(in.J), threads, in.softmax_in);
        return gpu::try_launch(
            tile_kernel<E, K, D, kBackward, kTwo>, at.grid, threads, bytes, at.stream, args, {1, args.together});
      },
      [](int J, bool softmax_in, int threads) {
        return gpu::max_active_blocks(
            tile_kernel<E, K, D, kBackward, kTwo>, threads, Tr::bytes(J, threads, softmax_in));
      },
  };
}

template <class E, int K, int D, bool kBackward>
TileKernel<kBackward> tile_kernel_with(bool two) {
  return two ? tile_kernel_of<E, K, D, kBackward, true>() : tile_kernel_of<E, K, D, kBackward, false>();
}

template <class E, int K, bool kBackward>
TileKernel<kBackward> tile_kernel_for(int64_t D, bool two) {
  return D == 8    ? tile_kernel_with<E, K, 8, kBackward>(two)
         : D == 16 ? tile_kernel_with<E, K, 16, kBackward>(two)
                   : tile_kernel_with<E, K, 32, kBackward>(two);
}

template <class E, int K, int D>
void launch_tile_final(const TileFinalArgs& args, int threads, const Launch& at) {
  const int bytes =
      4 * FinalTiles<E, K, D>::memory(
              static_cast<int>(args.in.J), threads, static_cast<int>(args.iterations - args.first), args.in.softmax_in)
              .end;
  gpu::launch(tile_final_kernel<E, K, D>, at.grid, threads, bytes, at.stream, args);
}

template <class E, int K>
TileFinalLauncher tile_final_launcher(int64_t D) {
  return D == 8 ? launch_tile_final<E, K, 8> : D == 16 ? launch_tile_final<E, K, 16> : launch_tile_final<E, K, 32>;
}

}  // namespace capsfast::cuda
