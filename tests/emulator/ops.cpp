// The routing ops with the CUDA kernels on CPU tensors: capsfast::emulated_<op>.
#include <string>

#include "../../csrc/ops/bindings.h"
#include "../../csrc/ops/cuda/engine.h"
#include "block.h"

namespace capsfast {

struct EmulatedEngine : cuda::Engine {
  static constexpr const char* device = "CPU";
  static bool holds(const torch::stable::Tensor& tensor) { return tensor.is_cpu(); }
};

}  // namespace capsfast

STABLE_TORCH_LIBRARY_IMPL(capsfast, CPU, m) { capsfast::register_ops<capsfast::EmulatedEngine>(m, "emulated_"); }

// "Name count" a line, of the launches since the last call.
extern "C" __attribute__((visibility("default"))) const char* capsfast_take_launches() {
  static std::string text;
  text.clear();
  for (const auto& [name, count] : capsfast::emulator::Block::take_launches()) text += name + " " + std::to_string(count) + "\n";
  return text.c_str();
}
