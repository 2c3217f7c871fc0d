// The barrier of a cooperative launch, see device.h.
#pragma once

#include "device.h"

#if !defined(CAPSFAST_EMULATED)

#include <cooperative_groups.h>

namespace capsfast::gpu {

CAPSFAST_DEVICE void grid_barrier() { cooperative_groups::this_grid().sync(); }

}  // namespace capsfast::gpu

#endif
