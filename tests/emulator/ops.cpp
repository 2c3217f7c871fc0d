// The routing ops with the CUDA kernels on CPU tensors: capsfast::emulated_<op>.
#include "../../csrc/ops/bindings.h"
#include "../../csrc/ops/cuda/engine.h"

namespace capsfast {

struct EmulatedEngine : cuda::Engine {
  static constexpr const char* device = "CPU";
  static bool holds(const torch::stable::Tensor& tensor) { return tensor.is_cpu(); }
};

}  // namespace capsfast

STABLE_TORCH_LIBRARY_IMPL(capsfast, CPU, m) { capsfast::register_ops<capsfast::EmulatedEngine>(m, "emulated_"); }
