// Registers capsfast::emulated_<op>: the routing and the pass ops on CPU tensors, with the CUDA kernels run by the
// emulator.
#include "../../csrc/ops/bindings.h"
#include "../../csrc/ops/cuda/engine.h"
#include "../../csrc/ops/pass_bindings.h"

namespace capsfast {

struct EmulatedEngine : cuda::Engine {
  static constexpr const char* device = "CPU";
  static constexpr bool kSharedOutputs = false;
  static bool holds(const torch::stable::Tensor& tensor) { return tensor.is_cpu(); }
};

}  // namespace capsfast

STABLE_TORCH_LIBRARY_IMPL(capsfast, CPU, m) {
  capsfast::register_ops<capsfast::EmulatedEngine>(m, "emulated_");
  capsfast::register_pass_ops<capsfast::EmulatedEngine>(m, "emulated_");
}
