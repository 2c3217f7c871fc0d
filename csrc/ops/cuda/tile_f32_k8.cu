#include "tiles.inl"

namespace capsfast::cuda {

template TileLauncher tile_launcher<float, 8>(int64_t, bool, bool);
template TileFinalLauncher tile_final_launcher<float, 8>(int64_t);

}  // namespace capsfast::cuda
