#include "tiles.inl"

namespace capsfast::cuda {

template TileKernel<false> tile_kernel_for<Float16, 8, false>(int64_t, bool);
template TileKernel<true> tile_kernel_for<Float16, 8, true>(int64_t, bool);
template TileFinalLauncher tile_final_launcher<Float16, 8>(int64_t);

}  // namespace capsfast::cuda
