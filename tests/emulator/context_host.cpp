// gpu::Context for the emulated device.
#include "../../csrc/cuda/context.h"
#include <torch/csrc/stable/tensor.h>

#include "machine.h"

namespace capsfast::gpu {

struct Context::Guard {};

Context::Context(const torch::stable::Tensor&) {
  const emulator::Machine& machine = emulator::Machine::current();
  multiprocessors_ = machine.multiprocessors;
  clusters_ = machine.clusters != 0;
  cooperative_ = cooperative_wanted(machine.capturing != 0) && machine.cooperative != 0;
}

Context::~Context() = default;

}  // namespace capsfast::gpu
