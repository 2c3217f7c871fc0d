// torch's tensor by name alone. Files with kernels get along without its headers, which nvcc would read once for every
// architecture that it compiles for.
#pragma once

namespace torch::stable {
class Tensor;
}
