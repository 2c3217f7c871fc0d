// The barrier of a cooperative launch. Not in device.h, because cooperative_groups.h is long.
#pragma once

#include "device.h"

#if !defined(CAPSFAST_EMULATED)

#include <cooperative_groups.h>

namespace capsfast::gpu {

// A barrier of all threads. After the barrier every thread sees what any thread wrote before it.
CAPSFAST_DEVICE void grid_barrier() { cooperative_groups::this_grid().sync(); }

}  // namespace capsfast::gpu

#endif
