#include "tiles.inl"

namespace capsfast::cuda {

template TileLauncher tile_launcher<BFloat16, 16>(int64_t, bool, bool);
template TileFinalLauncher tile_final_launcher<BFloat16, 16>(int64_t);

}  // namespace capsfast::cuda
