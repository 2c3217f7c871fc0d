// The launches of a forward and of a backward by the columns family.
#include "routing.h"

#include "../operands.h"
#include "../scratch.h"
#include "plan.h"
#include "steps.h"

namespace capsfast::cuda::columns {

namespace {

class Routing : Scratch {
 public:
  Routing(const Problem& problem, const gpu::Context& context)
      : Scratch(context),
        p(problem),
        on(context),
        in(inputs_of(problem)),
        kernels(choose(problem)),
        planner_(problem, in, kernels, context),
        uniform_(problem.logits.data == nullptr && problem.out_mask.data == nullptr) {}

  bool plan(bool backward) { return planner_.plan(backward, backward ? iterations() - paired() : 0, &plan_); }

  void forward(const ForwardOutputs& out) {
    const auto coupling = operand(out.coupling, {p.B, p.I, p.J});
    with([&] {
      V_ = take<float>(vectors());
      take_sums();
    });
    StepArgs step = step_args();
    step.v = operand(out.v, {p.B, p.J, p.D});
    step.s = {static_cast<float*>(out.s), p.iterations * p.B * p.J * p.D};
    for (int t = 0; t < iterations(); ++t) {
      PassArgs pass = pass_args(t > 0 ? Global<const float>(V_) : Global<const float>());
      const bool last = t + 1 == iterations();
      if (last) pass.coupling = coupling;
      pass.sums = sums_;
      step.t = t;
      step.unweighted = t == 0 && p.logits.data == nullptr && p.mask.data == nullptr && !pass.coupling.data;
      step.unweighted ? launch_pass(kernels.unweighted, pass) : run<false>(pass);
      run(forward_step_kernel, step);
    }
  }

  void backward(const BackwardInputs& inputs, const BackwardOutputs& out) {
    const bool wanted = out.du.data != nullptr || out.dweight.data != nullptr || out.dlogits.data != nullptr;
    const bool accumulates = !p.gradient_last && iterations() > 1;
    GradientArgs gradient = gradient_args(out);
    const int64_t parts = plan_.gradient_parts, numbers = out.weight_rows * p.J * p.D * p.K;
    const bool with_dweight = out.dweight.data != nullptr && !p.votes_given;
    const int64_t weight_parts =
        parts * (p.shared_weight ? int64_t{plan_.gradient.splits} * plan_.gradient.streams : 1);
    const bool direct = with_dweight && weight_parts == 1 && out.dweight.storage == Storage::f32;
    const bool sums_logits = out.dlogits.data != nullptr && !out.per_sample_logits;
    Global<float> G;
    with([&] {
      V_ = take<float>(p.iterations * vectors());
      ds_ = take<float>(p.iterations * vectors());
      G = take<float>(vectors());
      if (accumulates) take_sums();
      if (!accumulates && wanted) take_norms();
      if (wanted) pairs_ = take<float>((iterations() - paired()) * pairs(plan_.together));
      if (with_dweight && !direct) gradient.dweight = take<float>(weight_parts * numbers);
      if (sums_logits) gradient.dlogits = take<float>(parts * p.I * p.J);
    });
    if (direct) gradient.dweight = {static_cast<float*>(out.dweight.data), numbers};
    const auto dcoupling = operand(inputs.dcoupling, {p.B, p.I, p.J});

    StepArgs step = step_args();
    step.dv = operand(inputs.dv, {p.B, p.J, p.D});
    step.s = {static_cast<float*>(const_cast<void*>(inputs.s)), p.iterations * p.B * p.J * p.D};
    step.ds = ds_;
    step.G = G;
    step.t = iterations() - 1;
    StepArgs restoring = step;
    restoring.step.slices = 1;  // it adds up no splits
    run(backward_step_kernel, restoring);
    const auto scores = [&](int t) {
      PassArgs pass = pass_args(t > 0 ? V_.from(t * vectors(), vectors()) : Global<float>());
      pass.ds = ds_.from(t * vectors(), vectors());
      if (t + 1 == iterations()) pass.dcoupling = dcoupling;
      return pass;
    };
    for (int t = iterations() - 1; t > 0 && accumulates; --t) {
      PassArgs pass = scores(t);
      pass.sums = sums_;
      if (wanted && plan_.stored) pass.pairs = pairs_of(t, static_cast<int>(p.I));
      run<true>(pass);
      step.t = t - 1;
      step.sums_alone = t + 1 == iterations() || !p.squash.accumulate;
      run(backward_step_kernel, step);
    }
    if (out.dbias.data != nullptr) {
      const Cut& cut = plan_.pass;
      run(bias_kernel, {kernels.tiles, cut.column_warps(), 1}, 32 * kBiasWarps,
          kBiasWarps * 8 * static_cast<int>(sizeof(double)),
          BiasArgs{planner_.strips(), cut.column_warps(), kernels.tiles, cut.lanes, static_cast<int>(p.J),
                   static_cast<int>(p.D), start(), iterations(), ds_, operand(out.dbias, {p.J * p.D})});
    }
    if (!wanted) return;
    gradient.V = V_;
    gradient.ds = ds_;
    gradient.pairs = pairs_;
    for (int begin = 0; begin < static_cast<int>(p.I); begin += plan_.together) {
      gradient.begin = begin;
      gradient.adds = begin > 0;
      gradient.count = std::min(plan_.together, static_cast<int>(p.I) - begin);
      for (int t = paired(); t < iterations(); ++t) {
        if (plan_.stored && accumulates && t > 0) continue;  // the accumulating pass has stored them
        PassArgs pass = scores(t);
        pass.begin = begin;
        pass.count = gradient.count;
        pass.pairs = pairs_of(t, gradient.count);
        run<true>(pass);
      }
      const Cut& cut = plan_.gradient;
      run(kernels.gradient, {parts, cut.splits, 1}, 32 * cut.warps * cut.streams, kernels.gradient_bytes(in, cut),
          gradient);
    }
    if (with_dweight && !direct) join(gradient.dweight, weight_parts, numbers, out.dweight);
    if (sums_logits) join(gradient.dlogits, parts, p.I * p.J, out.dlogits);
  }

 private:
  int iterations() const { return static_cast<int>(p.iterations); }
  // start(): the first iteration with a gradient. paired(): the first iteration whose c and db the gradient pass reads;
  // in iteration 0 all c are the same if there are no logits and no mask of output capsules.
  int start() const { return p.gradient_last ? iterations() - 1 : 0; }
  int paired() const { return uniform_ && start() == 0 ? 1 : start(); }

  // Numbers of an array in the order of the fragments, and of the stored pairs of `count` input capsules in an
  // iteration.
  int64_t vectors() const { return int64_t{planner_.strips()} * plan_.pass.column_warps() * kernels.tiles * 128; }
  int64_t pairs(int count) const {
    return int64_t{planner_.strips()} * count * plan_.pass.column_warps() * kernels.pairs;
  }
  Global<float> pairs_of(int t, int count) const { return pairs_.from((t - paired()) * pairs(count), pairs(count)); }

  void take_norms() {
    if (plan_.pass.sections > 1) norms_ = take<Norm>(int64_t{planner_.strips()} * p.I * kStrip * plan_.pass.sections);
  }
  void take_sums() {
    const Cut& cut = plan_.pass;
    sums_ = take<float>(int64_t{cut.splits} * cut.groups * cut.strips * cut.column_warps() * kernels.tiles * 128);
    take_norms();
  }

  PassArgs pass_args(const Global<const float>& V) const {
    PassArgs args{};
    args.in = in;
    args.cut = plan_.pass;
    args.count = static_cast<int>(p.I);
    args.V = V;
    return args;
  }
  StepArgs step_args() const {
    StepArgs args{};
    const Cut& cut = plan_.pass;
    args.step.tiles = kernels.tiles;
    const int64_t most = kMostStepThreads / args.step.fours();
    args.step.slices = static_cast<int>(std::clamp<int64_t>(divide_up(cut.splits, kTogether), 1, most));
    args.strips = planner_.strips();
    args.sums_strips = cut.groups * cut.strips;
    args.column_warps = cut.column_warps();
    args.lanes = cut.lanes;
    args.splits = cut.splits;
    args.B = static_cast<int>(p.B);
    args.J = static_cast<int>(p.J);
    args.D = static_cast<int>(p.D);
    args.iterations = iterations();
    args.leaky = p.leaky;
    args.squash = {p.squash, operand(p.bias, {p.J, p.D})};
    args.out_mask = in.out_mask;
    args.V = V_;
    args.sums = sums_;
    return args;
  }
  GradientArgs gradient_args(const BackwardOutputs& out) const {
    GradientArgs args{};
    args.in = in;
    args.cut = plan_.gradient;
    args.start = start();
    args.paired = paired();
    args.iterations = iterations();
    args.gradient_last = p.gradient_last;
    args.shared_weight = p.shared_weight;
    if (p.votes_given) {
      args.dvotes = operand(out.dweight, {p.B, p.I, p.J, p.D});
    } else {
      args.du = operand(out.du, {p.B, p.I, p.K});
    }
    if (out.per_sample_logits) args.dlogits_sample = operand(out.dlogits, {p.B, p.I, p.J});
    args.strips = planner_.strips();
    args.scale = start() < paired() ? static_cast<float>(p.J + p.leaky) : 1.0f;
    args.unscale = (kernels.exact ? 1.0f : kOfSingle) / args.scale;
    return args;
  }

  // Runs a pass, after a sweep if blocks share the output capsules.
  template <bool kBackward>
  void run(PassArgs pass) {
    const Cut& cut = pass.cut;
    const bool masked = p.logits.data != nullptr || p.mask.data != nullptr || p.out_mask.data != nullptr || p.leaky;
    const bool options = masked || cut.sections > 1 || !pass.V || pass.coupling.data || pass.dcoupling.data;
    const auto kernel = kernels.pass[kBackward][options];
    if (cut.sections > 1) {
      pass.norms = norms_;
      PassArgs sweep = pass;
      sweep.sweep = true;
      sweep.sums = {};
      launch_pass(kernel, sweep);
    }
    launch_pass(kernel, pass);
  }
  void launch_pass(gpu::Kernel<PassArgs> kernel, const PassArgs& args) {
    const Cut& cut = args.cut;
    run(kernel, {int64_t{cut.groups} * cut.splits, cut.sections, 1}, cut.threads(), kernels.pass_bytes(in, cut), args);
  }
  void run(gpu::Kernel<StepArgs> kernel, const StepArgs& args) {
    const gpu::Grid grid{args.strips, args.column_warps, 8 / kStepGroups};
    run(kernel, grid, args.step.threads(), args.step.bytes(), args);
  }
  // to [size] = the sum of `parts` arrays.
  void join(const Global<float>& from, int64_t parts, int64_t size, const View& to) {
    constexpr int64_t kMostBlocks = 1 << 20;  // blocks may take several numbers in turn
    if (size % 4 != 0) {
      const JoinArgs<float> args{parts, size, from, operand(to, {size})};
      const gpu::Grid grid{std::min(divide_up(size, kThreads), kMostBlocks), 1, 1};
      return gpu::launch(join_kernel<float>, grid, kThreads, 0, on.stream, args);
    }
    PartsArgs args{static_cast<int>(parts), 1, size, from, operand(to, {size})};
    while (args.slices < kThreads / 4 && parts > kTogether * args.slices) args.slices *= 2;
    const int width = kThreads / args.slices;
    run(join_parts_kernel, {std::min(divide_up(size / 4, width), kMostBlocks), 1, 1}, kThreads, 16 * kThreads, args);
  }
  // All launches of a call but the first start early: see wait_for_launch_before(). Kernels between passes have as much
  // shared memory as a pass, although they need less: a multiprocessor that divides its memory anew waits until it is
  // idle.
  template <class Args>
  void run(gpu::Kernel<Args> kernel, const gpu::Grid& grid, int threads, int bytes, const Args& args) {
    const int shared = std::max(bytes, kernels.pass_bytes(in, plan_.pass));
    if (bytes > 0) gpu::limits().prefer_shared(kernel, shared);
    gpu::launch(kernel, grid, threads, bytes, on.stream, args, {1, false, launched_ && on.early});
    launched_ = true;
  }

  const Problem& p;
  const gpu::Context& on;
  Inputs in;
  const Kernels kernels;
  const Planner planner_;
  const bool uniform_;
  Plan plan_{};
  bool launched_ = false;
  Global<float> V_, ds_, sums_, pairs_;
  Global<Norm> norms_;
};

}  // namespace

bool forward(const Problem& p, const ForwardOutputs& out, const gpu::Context& context) {
  Routing routing(p, context);
  if (!routing.plan(false)) return false;
  routing.forward(out);
  return true;
}

bool backward(const Problem& p, const BackwardInputs& inputs, const BackwardOutputs& out, const gpu::Context& context) {
  Routing routing(p, context);
  if (!routing.plan(true)) return false;
  routing.backward(inputs, out);
  return true;
}

}  // namespace capsfast::cuda::columns
