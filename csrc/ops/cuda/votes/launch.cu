#include "launch.h"

#include "../launch.h"
#include "kernels.h"

namespace capsfast::cuda {

namespace {

// A call with its plan for these kernels.
class VotesCall {
 public:
  VotesCall(const Problem& problem, const Tensor& like, bool backward)
      : call(problem, like, backward, false),
        p(problem),
        plan(planned(call.context.clusters() ? VotesSize::cluster : 1, backward)),
        kernels(kernels_of(problem, plan.shape)) {
    // The device may refuse such a cluster: an instance of a partitioned GPU may be too small for it, and kernels that
    // were compiled for an older architecture have no clusters.
    while (plan.cluster > 1 && max_active_clusters(backward) == 0) plan = planned(plan.cluster / 2, backward);
  }

  bool serves() const { return plan.cluster > 0; }

  template <class Args>
  void launch(gpu::Kernel<Args> kernel, const Args& args, int64_t clusters) const {
    gpu::launch(kernel, {clusters * plan.cluster, 1, 1}, plan.shape.threads, plan.memory.end, call.context.stream(),
                args, {plan.cluster, false});
  }

  // How many clusters to launch if each has its own sum of dlogits [I, J]: as many as the device runs at the same time,
  // but at least so many that none has more than VotesSize::samples samples.
  int64_t clusters_that_join() const {
    const int64_t least = divide_up(p.B, VotesSize::samples);
    return std::clamp<int64_t>(2 * call.context.multiprocessors() / plan.cluster, least, p.B);
  }

  Call<float> call;
  const Problem& p;
  VotesPlan plan;
  const VotesKernels kernels;

 private:
  static VotesKernels kernels_of(const Problem& p, const VotesShape& shape) {
    switch (p.votes.storage) {
      case Storage::bf16:
        return votes_kernels<BFloat16>(shape.exchange, shape.elements);
      case Storage::f16:
        return votes_kernels<Float16>(shape.exchange, shape.elements);
      default:
        return votes_kernels<float>(shape.exchange, shape.elements);
    }
  }

  VotesPlan planned(int64_t cluster, bool backward) const {
    const gpu::Context& on = call.context;
    return plan_votes(p, {on.multiprocessors(), on.shared_bytes(), on.shared_bytes_together(), cluster}, backward);
  }

  int64_t max_active_clusters(bool backward) const {
    return backward ? gpu::max_active_clusters(kernels.backward, plan.cluster, plan.shape.threads, plan.memory.end)
                    : gpu::max_active_clusters(kernels.forward, plan.cluster, plan.shape.threads, plan.memory.end);
  }
};

}  // namespace

bool votes_forward(const Problem& p, const ForwardOutputs& out, const Tensor& like) {
  if (why_not_votes(p) != nullptr) return false;
  const VotesCall votes(p, like, false);
  if (!votes.serves()) return false;
  const Call<float>& call = votes.call;
  VotesForwardArgs args{};
  args.in = call.in;
  args.squash = call.squash;
  args.plan = votes.plan;
  args.iterations = static_cast<int>(p.iterations);
  args.v = operand(out.v, {p.B, p.J, p.D});
  args.coupling = operand(out.coupling, {p.B, p.I, p.J});
  args.s = {static_cast<float*>(out.s), p.iterations * call.vectors()};
  if (p.softmax_in()) args.norm = {static_cast<float*>(out.norm), 2 * p.iterations * call.scalars()};
  votes.launch(votes.kernels.forward, args, p.B);
  return true;
}

bool votes_backward(const Problem& p, const BackwardInputs& in, const BackwardOutputs& out, const Tensor& like) {
  // If only dbias is wanted, of one iteration, the kernel would not read the votes it has started to copy, and a block
  // must not leave before its copies have arrived.
  const bool reads_votes =
      out.dweight.data != nullptr || out.dlogits.data != nullptr || first_term(p) + 1 < p.iterations;
  if (why_not_votes(p) != nullptr || !reads_votes) return false;
  VotesCall votes(p, like, true);
  if (!votes.serves()) return false;
  Call<float>& call = votes.call;
  VotesBackwardArgs args{};
  args.in = call.in;
  args.squash = call.squash;
  args.plan = votes.plan;
  args.first = static_cast<int>(first_term(p));
  args.iterations = static_cast<int>(p.iterations);
  args.gradient_last = p.gradient_last;
  args.dv = operand(in.dv, {p.B, p.J, p.D});
  args.coupling = operand(in.coupling, {p.B, p.I, p.J});
  args.dcoupling = operand(in.dcoupling, {p.B, p.I, p.J});
  args.dvotes = operand(out.dweight, {p.B, p.I, p.J, p.D});
  if (out.per_sample_logits) args.dlogits_sample = operand(out.dlogits, {p.B, p.I, p.J});
  args.s = {static_cast<const float*>(in.s), p.iterations * call.vectors()};
  if (p.softmax_in()) args.norm = {static_cast<const float*>(in.norm), 2 * p.iterations * call.scalars()};
  if (out.dbias.data != nullptr) args.ds = call.scratch<float>(p.iterations * call.vectors());
  const int64_t logits = out.dlogits.data != nullptr && !out.per_sample_logits ? p.I * p.J : 0;
  const int64_t clusters = logits > 0 ? votes.clusters_that_join() : p.B;
  if (logits > 0) args.dlogits = call.scratch<double>(clusters * logits);
  votes.launch(votes.kernels.backward, args, clusters);
  const int64_t terms = p.iterations - first_term(p);
  if (args.ds)
    call.sum_vectors(
        args.ds.from(first_term(p) * call.vectors(), terms * call.vectors()), terms, p.B, {p.J, p.D, 0}, out.dbias);
  if (logits > 0) call.sum_vectors(args.dlogits, 1, clusters, {p.I, p.J, 0}, out.dlogits);
  return true;
}

}  // namespace capsfast::cuda
