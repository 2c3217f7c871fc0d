// torch's own thread pool through the stable ABI: torch.set_num_threads is honoured.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstdint>

namespace capsfast {

inline int64_t num_threads() { return static_cast<int64_t>(torch::stable::get_num_threads()); }

// f(begin, end) over [0, count), at least `grain` at a time. What f throws arrives as a runtime error.
template <class F>
void parallel(int64_t count, int64_t grain, const F& f) {
  if (count > 0) torch::stable::parallel_for(0, count, grain, f);
}

}  // namespace capsfast
