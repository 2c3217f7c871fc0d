// Registers capsfast::emulated_<op>: the routing and pass ops on CPU tensors; the emulator runs the CUDA kernels.
#include "../../csrc/ops/cuda/launch.h"
#include "../../csrc/ops/cuda/engine.h"
#include "../../csrc/ops/dynamic_routing.h"
#include "../../csrc/ops/routing_pass.h"

namespace capsfast {

struct EmulatedEngine : cuda::Engine {
  static constexpr const char* device = "CPU";
  static constexpr bool kSharedOutputs = false;
  static bool holds(const torch::stable::Tensor& tensor) { return tensor.is_cpu(); }
};

}  // namespace capsfast

STABLE_TORCH_LIBRARY_IMPL(capsfast, CPU, m) {
  capsfast::register_dynamic_routing<capsfast::EmulatedEngine>(m, "emulated_dynamic_routing");
  capsfast::register_routing_pass<capsfast::EmulatedEngine>(m, "emulated_");
}

// The plan of a call [B, I, J, D, K] of float32 without options; backend.py names the values.
extern "C" __attribute__((visibility("default"))) void capsfast_rows_plan(const int64_t* sizes, bool backward,
                                                                          int64_t* values) {
  using namespace capsfast;
  Problem p;
  p.B = sizes[0], p.I = sizes[1], p.J = sizes[2], p.D = sizes[3], p.K = sizes[4];
  const int64_t strides[] = {p.J * p.D * p.K, p.D * p.K, p.K, 1};
  std::copy(strides, strides + 4, p.weight.stride);
  const cuda::Inputs in = cuda::inputs_of(p);
  const gpu::Context context{torch::stable::Tensor()};
  const cuda::rows::Launcher launcher(p, in, backward, context);
  const cuda::rows::AccumulatePlan plan = launcher.plan();
  const cuda::rows::GradientPlan gradient = launcher.plan_gradient();
  const int64_t found[] = {plan.shape.strips(),  plan.work.groups,        plan.work.units, plan.cluster,
                           gradient.shape.chunk, gradient.shape.strips(), gradient.parts,  gradient.splits};
  std::copy(found, found + 8, values);
}
