// Launches of the kernels for given votes.
#pragma once

#include "../../cuda/context.h"
#include "given.h"

namespace capsfast::cuda {

// Calls f(E{}) with the element type of the votes.
template <class F>
auto for_given(const Problem& p, const F& f) {
  switch (p.votes.storage) {
    case Storage::bf16:
      return f(BFloat16{});
    case Storage::f16:
      return f(Float16{});
    default:
      return f(float{});
  }
}

// The streaming passes of a call: plans and launches them.
class GivenPasses {
 public:
  GivenPasses(const Problem& problem, const gpu::Context& on)
      : plan(plan_stream(problem, given_shape(problem, false, false, false), on.multiprocessors())),
        p(problem),
        context(on),
        shape(given_shape(problem, false, false, false)) {}

  void reduce(const ReduceArgs<float>& args) const {
    const bool backward = static_cast<bool>(args.scoring.ds);
    const GivenReduceArgs pass{args, stream(plan.splits, 1, backward)};
    launch(backward ? kernels().backward : kernels().forward, {plan.splits, plan.rows, 1}, pass, pass.stream.memory);
  }

  void final(const FinalArgs<float>& args) const {
    const GivenFinalArgs pass{args, stream(plan.final_splits, terms_together(p, shape), true)};
    launch(kernels().final, {plan.final_splits, plan.final_rows, 1}, pass, pass.stream.memory);
  }

  const StreamPlan plan;

 private:
  Stream stream(int64_t splits, int64_t together, bool backward) const {
    GivenNeeds needs;
    needs.together = together;
    needs.backward = backward;
    return {shape, given_memory(p, shape, needs), given_access(p, shape), static_cast<int>(divide_up(p.I, splits)),
            static_cast<int>(together)};
  }

  GivenStreamKernels kernels() const {
    return for_given(p, [&](auto type) { return given_stream_kernels<decltype(type)>(shape.exchange); });
  }

  template <class Args>
  void launch(gpu::Kernel<Args> kernel, gpu::Grid grid, const Args& args, const GivenMemory& memory) const {
    gpu::launch(kernel, grid, shape.threads, memory.end, context.stream(), args);
  }

  const Problem& p;
  const gpu::Context& context;
  const GivenShape shape;
};

}  // namespace capsfast::cuda
