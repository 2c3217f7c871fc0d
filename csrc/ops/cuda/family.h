// Which family of kernels serves a call: the one place that chooses.
#pragma once

#include "columns/kernels.h"
#include "rows/kernels.h"
#include "update.h"

namespace capsfast::cuda {

enum class Family { rows, columns, general };

// For sums in float. with_coupling: the coupling is an output; in the backward: the coupling or the logits have a
// gradient.
inline Family family_of(const Problem& p, const gpu::Context& on, bool with_coupling) {
  const int architecture = gpu::limits().of(join_kernel<float>).architecture;
  if (!on.columns_first && rows::why_not(p, with_coupling, architecture) == nullptr) return Family::rows;
  return columns::why_not(p, architecture) == nullptr ? Family::columns : Family::general;
}

}  // namespace capsfast::cuda
