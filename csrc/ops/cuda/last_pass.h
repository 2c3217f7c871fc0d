// What the last passes of all backwards share: du and dweight, or dvotes, and dlogits.
#pragma once

#include "call.h"

namespace capsfast::cuda {

inline bool wants_last_pass(const Problem& p, const BackwardOutputs& out) {
  return p.I > 0 && (out.du.data != nullptr || out.dweight.data != nullptr || out.dlogits.data != nullptr);
}

// Runs the last pass and adds up its partial sums. The samples are cut into `parts`, each with its own sum of dweight
// and dlogits. The input capsules are cut into `blocks`; if the weight is shared each has its own sum of dweight. args
// lacks nothing but what it writes.
template <class T, class Args, class Pass>
void last_pass(Call<T>& call, const BackwardOutputs& out, Args args, int64_t parts, int64_t blocks, const Pass& pass) {
  const Problem& p = call.p;
  args.shared_weight = p.shared_weight;
  if (!p.votes_given) args.du = operand(out.du, {p.B, p.I, p.K});
  using Sum = std::remove_reference_t<decltype(args.dweight[0])>;
  const int64_t weights = p.votes_given || out.dweight.data == nullptr ? 0 : out.weight_rows * p.J * p.D * p.K;
  const int64_t weight_parts = parts * (p.shared_weight ? blocks : 1);
  if (weights > 0) args.dweight = call.template scratch<Sum>(weight_parts * weights);
  const int64_t logits = out.dlogits.data != nullptr && !out.per_sample_logits ? p.I * p.J : 0;
  if (logits > 0) args.dlogits = call.template scratch<double>(parts * logits);
  if (out.per_sample_logits) args.dlogits_sample = operand(out.dlogits, {p.B, p.I, p.J});
  pass(args);
  if (weights > 0) call.join(args.dweight, weight_parts, weights, out.dweight);
  if (logits > 0) call.join(args.dlogits, parts, logits, out.dlogits);
}

// The tiles of the kernels that take FinalArgs, and dvotes.
template <class T>
FinalArgs<T> final_args(const Problem& p, const BackwardOutputs& out) {
  FinalArgs<T> args{};
  args.outputs = FinalTile<T>::outputs_for(p.J, p.D);
  args.components = FinalTile<T>::components_for(p.D);
  if (p.votes_given) args.dvotes = operand(out.dweight, {p.B, p.I, p.J, p.D});
  return args;
}

template <class T>
void general_last_pass(Call<T>& call, const BackwardOutputs& out, const FinalArgs<T>& general) {
  const GeneralPlan& plan = call.plan;
  last_pass(call, out, general, plan.final_splits, plan.final_blocks, [&](const FinalArgs<T>& args) {
    call.kernels().final(args, {{plan.final_blocks, plan.final_splits, 1}, call.context.stream()});
  });
}

}  // namespace capsfast::cuda
