// Declares torch's tensor without its headers. nvcc would read the headers once for every architecture that it compiles
// for.
#pragma once

namespace torch::stable {
class Tensor;
}
