// The forward: each iteration is an accumulating pass, after which s, v and V are computed from its sums.
#include "columns/routing.h"
#include "engine.h"
#include "launch.h"

namespace capsfast::cuda {

template <class T>
void Engine::forward(const Problem& p, const ForwardOutputs& out, const Tensor& like) {
  if (p.B == 0 || p.J == 0) return;
  const gpu::Context context(like);
  Family family = Family::general;
  if constexpr (std::is_same_v<T, float>) {
    family = family_of(p, context, out.coupling.data != nullptr);
    if (family == Family::columns && columns::forward(p, out, context)) return;
  }
  Call<T> call(p, context, false, family);
  ForwardSteps<T> steps{};
  steps.in = call.in;
  steps.squash = call.squash;
  steps.iterations = p.iterations;
  steps.coupling = operand(out.coupling, {p.B, p.I, p.J});
  steps.v = operand(out.v, {p.B, p.J, p.D});
  steps.order = call.order();
  steps.s = {static_cast<T*>(out.s), p.iterations * call.vectors()};
  if (p.softmax_in()) steps.norm = {static_cast<T*>(out.norm), 2 * p.iterations * call.scalars()};
  call.with([&] {
    steps.V = call.take_vectors(1);
    steps.parts = call.take_parts(p.softmax_in());
    if (call.plan.row_norm_apart) call.take_row_norms(1);
  });
  call.run(steps);
}

template void Engine::forward<float>(const Problem&, const ForwardOutputs&, const Tensor&);
template void Engine::forward<double>(const Problem&, const ForwardOutputs&, const Tensor&);

}  // namespace capsfast::cuda
