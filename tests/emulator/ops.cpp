// Registers capsfast::emulated_<op>: the routing and pass ops on CPU tensors; the emulator runs the CUDA kernels. Also
// a kernel for tests of the context of a call.
#include "../../csrc/ops/cuda/columns/plan.h"
#include "../../csrc/ops/cuda/launch.h"
#include "../../csrc/ops/cuda/engine.h"
#include "../../csrc/ops/dynamic_routing.h"
#include "../../csrc/ops/routing_pass.h"
#include "../../csrc/new_tensor.h"

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

namespace planted {

struct TouchArgs {
  capsfast::gpu::Global<float> scratch;
  bool waits;
};
CAPSFAST_KERNEL(32, 1)
touch(TouchArgs a) {
  if (a.waits) capsfast::gpu::wait_for_launch_before();
  a.scratch[capsfast::gpu::thread()] = 0.0f;
  capsfast::gpu::wait_for_launch_before();
}

}  // namespace planted

// A call of `launches` launches that touch its scratch memory, the last one early if the context allows it. `waits`:
// they wait for the launch before first. Returns the fault that the emulator found, or "".
extern "C" __attribute__((visibility("default"))) const char* capsfast_touch_scratch(int launches, bool waits) {
  using namespace capsfast;
  static std::string found;
  found.clear();
  const int64_t size = 1;
  const auto like = new_tensor(aoti_torch_device_type_cpu(), 0, &size, &size, 1, aoti_torch_dtype_float32(), 4);
  const gpu::Context context(like);
  const gpu::Global<float> scratch(reinterpret_cast<float*>(context.scratch(128)), 32);
  context.scratch(64);
  const planted::TouchArgs args{scratch, waits};
  try {
    for (int left = launches; left > 0; --left)
      gpu::launch(&planted::touch, {}, 32, 0, context.stream, args, {1, false, context.early && left == 1});
  } catch (const emulator::Fault& fault) { found = fault.what(); }
  return found.c_str();
}

// A call [B, I, J, D, K] of float32 without options.
static capsfast::Problem plain(const int64_t* sizes) {
  capsfast::Problem p;
  p.B = sizes[0], p.I = sizes[1], p.J = sizes[2], p.D = sizes[3], p.K = sizes[4];
  p.iterations = 3;
  const int64_t strides[] = {p.J * p.D * p.K, p.D * p.K, p.K, 1};
  std::copy(strides, strides + 4, p.weight.stride);
  return p;
}

// How the rows family cuts such a call; backend.py names the values.
extern "C" __attribute__((visibility("default"))) void capsfast_rows_plan(const int64_t* sizes, bool backward,
                                                                          int64_t* values) {
  using namespace capsfast;
  const Problem p = plain(sizes);
  const cuda::Inputs in = cuda::inputs_of(p);
  const gpu::Context context{torch::stable::Tensor()};
  const cuda::rows::Launcher launcher(p, in, backward, context);
  const cuda::rows::AccumulatePlan plan = launcher.plan();
  const cuda::rows::GradientPlan gradient = launcher.plan_gradient();
  const int64_t found[] = {plan.shape.strips(),  plan.work.groups,        plan.work.units, plan.cluster,
                           gradient.shape.chunk, gradient.shape.strips(), gradient.parts,  gradient.splits};
  std::copy(found, found + 8, values);
}

// How the columns family cuts a call and its backward.
extern "C" __attribute__((visibility("default"))) void capsfast_columns_plan(const int64_t* sizes, int64_t* values) {
  using namespace capsfast;
  const Problem p = plain(sizes);
  const cuda::Inputs in = cuda::inputs_of(p);
  const gpu::Context context{torch::stable::Tensor()};
  const cuda::columns::Kernels kernels = cuda::columns::choose(p);
  cuda::columns::Plan plan{};
  cuda::columns::Planner(p, in, kernels, context).plan(true, 2, &plan);
  const cuda::columns::Cut &pass = plan.pass, &gradient = plan.gradient;
  const int64_t found[] = {
      pass.warps,  pass.strips, pass.streams,     pass.chunk,          pass.stages,     pass.sections,
      pass.splits, pass.groups, gradient.streams, plan.gradient_parts, gradient.splits, plan.together};
  std::copy(found, found + 12, values);
}
