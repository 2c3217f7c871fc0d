// How the samples and input capsules of a pass are dealt out to the blocks of the device, for host and kernels.
#pragma once

#include <cstdint>

#include "../../math/host_device.h"

namespace capsfast::cuda {

// Samples are cut into groups, and all pairs (group, input capsule), those of a group side by side, are one row that is
// cut into `units` equal parts, one for each cluster of blocks that the device runs at the same time. So every batch
// fills the device, and all of a pass runs at once. What a unit has of a group is a segment; a unit whose part crosses
// from one group to the next has two of them, or more. Each segment has one partial sum.
struct Work {
  int64_t I, group, groups, units;  // group: samples of a group

  CAPSFAST_HOST_DEVICE int64_t begin(int64_t unit) const { return groups * I * unit / units; }
  // The unit that has pair n.
  CAPSFAST_HOST_DEVICE int64_t unit_of(int64_t n) const { return ((n + 1) * units - 1) / (groups * I); }
  // Segments are numbered along the row: a border between units or groups adds one.
  CAPSFAST_HOST_DEVICE int64_t segment(int64_t unit, int64_t g) const { return unit + g; }
  CAPSFAST_HOST_DEVICE int64_t segments() const { return units > 0 ? units + groups - 1 : 0; }

  // The segments [first, end) of the group of sample b, and the row of output capsule j of that sample in arrays
  // [segments, group, J].
  CAPSFAST_HOST_DEVICE int64_t first(int64_t b) const {
    const int64_t g = b / group;
    return units > 0 ? segment(unit_of(g * I), g) : 0;
  }
  CAPSFAST_HOST_DEVICE int64_t end(int64_t b) const {
    const int64_t g = b / group;
    return units > 0 ? segment(unit_of((g + 1) * I - 1), g) + 1 : 0;
  }
  CAPSFAST_HOST_DEVICE int64_t row(int64_t segment, int64_t b, int64_t j, int64_t J) const {
    return (segment * group + b % group) * J + j;
  }
};

}  // namespace capsfast::cuda
