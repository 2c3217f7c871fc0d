// Included by ../instantiations/rows_*.cu.
#include "kernels.h"

namespace capsfast::cuda::rows {

template <class Tr>
Kernels kernels_of() {
  return {accumulate_kernel<Tr, false>, accumulate_kernel<Tr, true>, gradient_kernel<Tr>, accumulate_bytes<Tr>,
          [](const Inputs& in, const Shape& shape, bool with_dlogits) {
            return 4 * GradientMemory<Tr>(in, shape, with_dlogits).end;
          }};
}

template <int kTiles, int kSteps, bool kExact>
Kernels plain_kernels() {
  return kernels_of<Rows<kTiles, kSteps, kExact, Options::plain>>();
}

template <int kTiles, int kSteps>
Kernels kernels_with_options(bool in) {
  return in ? kernels_of<Rows<kTiles, kSteps, true, Options::in>>()
            : kernels_of<Rows<kTiles, kSteps, true, Options::any>>();
}

}  // namespace capsfast::cuda::rows
