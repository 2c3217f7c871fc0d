// Uses torch's own thread pool through the stable ABI, so that torch.set_num_threads holds here too.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstdint>

namespace capsfast {

inline int64_t num_threads() { return static_cast<int64_t>(torch::stable::get_num_threads()); }

// Calls f(begin, end) on parts of [0, count) of at least `grain` elements. An exception from f reaches the caller as a
// std::runtime_error.
template <class F>
void parallel(int64_t count, int64_t grain, const F& f) {
  if (count > 0) torch::stable::parallel_for(0, count, grain, f);
}

}  // namespace capsfast
