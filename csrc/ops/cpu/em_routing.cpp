// The op em_routing and its backward: EM routing (Hinton, Sabour, Frosst 2018, procedure 1); em_update.h describes a
// step. The center of the first pass is the mean of the votes at equal coupling, which the backward takes as a
// constant.
//
// A part of the batch runs all iterations before the next part: so a small batch makes its votes once, and given votes
// are read from memory once. The backward of a part takes its iterations from the last to the first.
//
// The state has, for each iteration and with a row for each sample: mass and prior [rows, J]; first, second, center and
// precision [rows, J, D]. The first pass has no prior and no precision; the results of the final step lie in their
// place. Without a backward two iterations take turns in the memory of the state, because an iteration reads only the
// one before.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "backward.h"
#include "em_update.h"
#include "engine.h"
#include "forward.h"
#include "gradient_total.h"

namespace capsfast {

namespace {

using namespace driver;

// A call: the problem of its passes, and what the steps read.
struct Routing : Arguments<CpuEngine> {
  Tensor u;                         // [B, I, P K]; without a weight votes [B, I, J or 1, D] or [B, I, J, D, S]
  OptionalTensor weight;            // [I or 1, J, R, K]
  OptionalTensor activation, mask;  // [B, I]
  Tensor beta_a, beta_u;            // [J]
  OptionalTensor out_mask;          // [B, J]
  std::vector<double> inverse_temperatures;
  em::Options options;
  int64_t stride;  // every stride-th input capsule gives the center of the first pass
  int64_t last;    // the last iteration
  int64_t kept;    // the number of iterations in the state
  Problem p;

  void take_tensors(Stack& stack) { stack >> u >> weight >> activation >> beta_a >> beta_u >> mask >> out_mask; }
  void take_options(Stack& stack) {
    std::optional<int64_t> J;
    bool leaky, tf32;
    stack >> J >> inverse_temperatures;
    options.take(stack);
    stack >> leaky >> stride >> tf32;
    last = static_cast<int64_t>(inverse_temperatures.size()) - 1;
    kept = last + 1;
    STD_TORCH_CHECK(last >= 0, "capsfast: inverse_temperatures must not be empty");
    STD_TORCH_CHECK(stride >= 1, "capsfast: stride must be at least 1");
    p = problem_of(u, weight, J);
    STD_TORCH_CHECK(p.votes_given || !p.shared_outputs, "capsfast: J must equal the J of weight");
    p.moments = p.quadratic = true;
    p.leaky = leaky, p.tf32 = tf32;
    add_logits_and_masks(p, {}, mask, out_mask);
    p.activation = view("activation", activation, p, {p.B, p.I});
    for (Tensor* beta : {&beta_a, &beta_u}) saved("beta_a and beta_u", *beta, u, {p.J});
  }

  int64_t state_size() const { return kept * p.samples() * p.J * (4 * p.D + 2); }
};

// An iteration in the state, from a row on.
template <class T>
struct Iteration {
  T *mass, *prior, *first, *second, *center, *precision;

  Iteration(const Routing& call, T* state, int64_t t, int64_t row) {
    const Problem& p = call.p;
    const int64_t scalars = p.samples() * p.J, vectors = scalars * p.D;
    T* const here = state + t % call.kept * (2 * scalars + 4 * vectors);
    mass = here + row * p.J;
    prior = mass + scalars;
    first = here + 2 * scalars + row * p.J * p.D;
    second = first + vectors, center = second + vectors, precision = center + vectors;
  }
};

// Contiguous rows as arguments of a pass.
template <class T>
View scalars(const Problem& p, T* rows) {
  return {rows, kStorage<T>, {p.J, 1}};
}
template <class T>
View vectors(const Problem& p, T* rows) {
  return {rows, kStorage<T>, {p.J * p.D, p.D, 1}};
}

// The passes and the steps of some samples, from `row` on.
template <class T>
struct Samples {
  const Routing& call;
  T* state;
  int64_t row = 0;

  Iteration<T> iteration(int64_t t) const { return {call, state, t, row}; }

  PassInputs inputs(const Problem& p, int64_t t) const {
    const Iteration<T> at = iteration(t);
    if (t == 0) return {{}, {}, vectors(p, at.center), {}};
    return {{}, vectors(p, at.precision), vectors(p, at.center), scalars(p, at.prior)};
  }

  em::Step<T> step(const Problem& p, int64_t t) const {
    const Iteration<T> at = iteration(t);
    em::Step<T> step{call.options, call.inverse_temperatures[static_cast<size_t>(t)]};
    step.final = t == call.last;
    step.held = call.options.momentum != 0;
    step.B = p.B, step.J = p.J, step.D = p.D;
    step.mass = at.mass, step.first = at.first, step.second = at.second, step.center = at.center;
    step.last = t > 0 ? at.center : nullptr;
    step.beta_a = static_cast<const T*>(call.beta_a.data_ptr());
    step.beta_u = static_cast<const T*>(call.beta_u.data_ptr());
    step.out_mask = p.out_mask;
    return step;
  }
};

// Computes the center of the first iteration from the moments at equal coupling, which lie where the moments of the
// first iteration will lie.
template <class T>
void make_center(const Iteration<T>& at, int64_t rows, int64_t D) {
  parallel(rows, std::max<int64_t>(1, 4096 / std::max<int64_t>(1, D)), [&](int64_t begin, int64_t end) {
    for (int64_t n = begin * D; n < end * D; ++n) at.center[n] = at.first[n] * em::inverse(at.mass[n / D]);
  });
}

// The problem of the pass at equal coupling.
Problem at_equal_coupling(Problem p, int64_t stride) {
  p.quadratic = p.leaky = false;
  p.I = (p.I + stride - 1) / stride;
  p.weight.stride[0] *= stride;
  for (int64_t* along : {p.u.stride, p.votes.stride, p.activation.stride, p.mask.stride}) along[1] *= stride;
  return p;
}

template <class T>
struct EMForward {
  Samples<T> samples;
  View poses, activations;  // [B, J, D] and [B, J]
  BackwardOutputs none = {};

  BackwardOutputs& gradients() { return none; }
  EMForward from(const Problem& p, int64_t n) const {
    return {{samples.call, samples.state, samples.row + n},
            driver::samples(p, poses, n),
            driver::samples(p, activations, n)};
  }
  Parts parts(const Problem& p) const { return parts_of<T>(p, num_threads(), {}); }

  void run(const Problem& p, const Totals<T>& totals) const {
    const Routing& call = samples.call;
    const Iteration<T> results = samples.iteration(0);
    if (call.stride == 1) {
      const Problem equal = at_equal_coupling(p, 1);
      const PassOutputs out = outputs(p, 0, false);
      Forward<T>(equal, {{}, out}, totals.threads).run();
      make_center(results, p.B * p.J, p.D);
    }
    for (int64_t t = 0; t <= call.last; ++t) {
      const PassInputs in = samples.inputs(p, t);
      const PassOutputs out = outputs(p, t, true);
      Forward<T>(p, {in, out}, totals.threads).run();
      if (t == call.last) {
        em::update<T>(samples.step(p, t), results.precision, nullptr, results.prior);
      } else {
        const Iteration<T> next = samples.iteration(t + 1);
        em::update<T>(samples.step(p, t), next.center, next.precision, next.prior);
      }
    }
    for (int64_t b = 0; b < p.B; ++b) {
      scatter<T>(poses, b * poses.stride[0], {1, p.J, p.D}, {0, poses.stride[1], poses.stride[2]},
                 results.precision + b * p.J * p.D);
      scatter<T>(
          activations, b * activations.stride[0], {1, 1, p.J}, {0, 0, activations.stride[1]}, results.prior + b * p.J);
    }
  }

  PassOutputs outputs(const Problem& p, int64_t t, bool second) const {
    const Iteration<T> at = samples.iteration(t);
    PassOutputs out;
    out.mass = scalars(p, at.mass), out.first = vectors(p, at.first);
    if (second) out.second = vectors(p, at.second);
    return out;
  }
};

template <class T>
struct EMBackward {
  Samples<T> samples;
  View dposes, dactivations;  // [B, J, D] and [B, J]; data is null if they are zero
  T* shares;                  // [r][2][rows][J]: the samples' shares of dbeta_a and dbeta_u
  View dactivation;           // [B, I]
  BackwardOutputs of_votes;

  BackwardOutputs& gradients() { return of_votes; }
  EMBackward from(const Problem& p, int64_t n) const {
    return {{samples.call, samples.state, samples.row + n},
            driver::samples(p, dposes, n),
            driver::samples(p, dactivations, n),
            shares,
            driver::samples(p, dactivation, n),
            driver::samples(p, of_votes, n)};
  }
  // The passes of all iterations and parts add to one dW if this takes no memory. Otherwise all tiles are one part, and
  // each pass cuts it into parts of its own. A part of a small batch is one sample, because a sample needs memory for
  // the dvotes of two iterations.
  Parts parts(const Problem& p) const {
    Parts parts;
    parts.samples = p.B;
    if (p.capsule_lanes()) parts.count = parts.rounds = p.B, parts.round = 1;
    if (p.votes_given) return parts;
    const Parts cut = parts_of<T>(p, num_threads(), {});
    const Problem part = slice(p, 0, cut.begin(1));
    if (!Planned<T>(part, num_threads()).plan.weight_in_place && !p.shared_weight) return parts;
    parts = cut, parts.passes = samples.call.last + 1;
    return parts;
  }

  void run(const Problem& p, const Totals<T>& totals) const {
    const Routing& call = samples.call;
    const int64_t scalar = p.B * p.J, vector = scalar * p.D, last = call.last;
    const bool positions = p.lane == Lane::position, held = call.options.momentum != 0;
    const int64_t vote_rows = positions ? p.I * p.J * p.D : 1, capsule_rows = positions ? p.I : 1;
    const bool adds = !p.votes_given && totals.weights->parts() > 1;
    const GradientTotal<T> du(p, of_votes.du, p.B, last, false);
    const GradientTotal<T> dweight(p, of_votes.dweight, p.votes_given ? p.B : of_votes.weight_rows, adds ? 0 : last,
                                   p.capsule_lanes(), vote_rows, positions ? of_votes.dweight.stride[3] : 0);
    const GradientTotal<T> dactivations_total(
        p, dactivation, p.B, last, false, capsule_rows, positions ? dactivation.stride[1] : 0);
    const bool inputs = of_votes.du.data != nullptr || of_votes.dweight.data != nullptr || dactivation.data != nullptr;

    const Buffer<T> memory(2 * scalar + (held ? 6 : 5) * vector);
    T *const dmass = memory.get(), *const dscore = dmass + scalar;
    T *const dpose = dscore + scalar, *const dprecision = dpose + vector, *const dfirst = dprecision + vector;
    T *const dsecond = dfirst + vector, *const dcenter = dsecond + vector, *const dlast = dcenter + vector;
    load(p, dposes, p.D, dpose);
    load(p, dactivations, 1, dscore);
    for (int64_t t = last; t >= 0; --t) {
      T* const share = shares + 2 * t * call.p.samples() * p.J + samples.row * p.J;
      em::for_samples<T>(
          samples.step(p, t), em::Gradients<T>{dpose, t == last ? nullptr : dprecision, dscore, dmass, dfirst, dsecond,
                                               dpose, held ? dlast : nullptr, share, share + call.p.samples() * p.J});
      if (t == 0 && !inputs) return;
      const Iteration<T> at = samples.iteration(t);
      const PassInputs in = samples.inputs(p, t);
      PassSaved saved;
      saved.dmass = scalars(p, dmass), saved.dfirst = vectors(p, dfirst), saved.dsecond = vectors(p, dsecond);
      saved.mass = scalars(p, at.mass), saved.first = vectors(p, at.first), saved.second = vectors(p, at.second);
      PassGradients out;
      out.common = of_votes;
      out.common.du = du.of(t), out.common.dweight = dweight.of(t), out.dactivation = dactivations_total.of(t);
      if (t > 0) {
        out.dprecision = vectors(p, dprecision), out.dcenter = vectors(p, dcenter), out.dprior = scalars(p, dscore);
      }
      if (p.votes_given || adds) {
        Backward<T>(p, {in, saved, out}, totals).run();
      } else {
        pass_backward<T>(p, in, saved, out);
      }
      for (const GradientTotal<T>* total : {&du, &dweight, &dactivations_total}) total->add(t);
      // In the order of the passes' path.
      parallel(t > 0 ? vector : 0, 4096, [&](int64_t begin, int64_t end) {
        for (int64_t n = begin; n < end && held; ++n) dpose[n] += dlast[n];
        for (int64_t n = begin; n < end; ++n) dpose[n] += dcenter[n];
      });
    }
  }

  // Rows [J][size] of every sample; zeros if data is null.
  static void load(const Problem& p, const View& view, int64_t size, T* to) {
    if (view.data == nullptr) return (void)std::fill_n(to, p.B * p.J * size, T(0));
    for (int64_t b = 0; b < p.B; ++b) {
      gather<T>(view, b * view.stride[0], {1, p.J, size}, {0, view.stride[1], size == 1 ? 1 : view.stride[2]},
                to + b * p.J * size);
    }
  }
};

void em_routing(Stack& stack) {
  Routing call;
  bool return_state;
  call.take_tensors(stack);
  call.take_options(stack);
  stack >> return_state;
  if (!return_state) call.kept = std::min<int64_t>(call.kept, 2);
  const Problem& p = call.p;
  const Tensor& u = call.u;
  const ScalarType wide = wide_type(u);
  const Tensor poses = empty(u, {p.B, p.J, p.D}, wide, p.positions),
               activations = empty(u, {p.B, p.J}, wide, p.positions), state = empty(u, {call.state_size()}, wide);
  with_type(wide, [&](auto zero) {
    using T = decltype(zero);
    CpuEngine::run(p, [&] {
      const EMForward<T> forward{{call, static_cast<T*>(state.data_ptr())},
                                 view_of(poses, p.has_positions()),
                                 view_of(activations, p.has_positions())};
      if (call.stride > 1) {
        PassOutputs out = forward.outputs(p, 0, false);
        for (View* view : {&out.mass, &out.first}) {
          view->position = view->stride[0];
          if (p.has_positions()) view->stride[0] *= p.positions;
        }
        pass_forward<T>(at_equal_coupling(p, call.stride), {}, out);
        make_center(forward.samples.iteration(0), p.samples() * p.J, p.D);
      }
      driver::run_call<T>(p, forward);
    });
  });
  stack.give({poses, activations, return_state ? state : empty(u, {0}, wide)});
}

void em_routing_backward(Stack& stack) {
  Routing call;
  OptionalTensor dposes, dactivations;
  Tensor state;
  stack >> dposes >> dactivations;
  call.take_tensors(stack);
  stack >> state;
  call.take_options(stack);
  const std::vector<bool> needed = stack.needed(5);
  const Problem& p = call.p;
  const ScalarType wide = wide_type(call.u);
  STD_TORCH_CHECK(state.numel() > 0 || call.state_size() == 0,
                  "capsfast: em_routing has no backward without its state; call it with return_state=True");
  Routing::saved("state", state, call.u, {call.state_size()});

  BackwardOutputs gradients;
  View dactivation_view;
  const auto of_votes = gradients_of(call, p, needed, gradients);
  const Tensor dactivation = gradient_of(call.activation, call.u, needed[2], p, &dactivation_view);
  Tensor dbeta[2];
  for (const size_t n : {0, 1}) dbeta[n] = empty(call.u, {needed[3 + n] ? p.J : 0}, wide);
  with_type(wide, [&](auto zero) {
    using T = decltype(zero);
    const int64_t rows = p.samples(), share = rows * p.J;
    const Buffer<T> shares(2 * (call.last + 1) * share);
    const EMBackward<T> backward{
        {call, static_cast<T*>(state.data_ptr())},
        Routing::view("dposes", dposes, p, {p.B, p.J, p.D}),
        Routing::view("dactivations", dactivations, p, {p.B, p.J}),
        shares.get(),
        dactivation_view,
        gradients};
    const bool any = std::find(needed.begin(), needed.end(), true) != needed.end();
    if (any) CpuEngine::run(p, [&] { driver::run_call<T>(p, backward); });
    for (const int64_t n : {0, 1}) {
      T* const total = static_cast<T*>(dbeta[n].data_ptr());
      if (!needed[static_cast<size_t>(3 + n)]) continue;
      std::fill_n(total, p.J, T(0));
      for (int64_t t = call.last; t >= 0; --t) em::add_shares(shares.get() + (2 * t + n) * share, rows, p.J, total);
    }
  });
  stack.give({of_votes.u, of_votes.weight, dactivation, dbeta[0], dbeta[1]});
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(capsfast, CPU, m) {
  m.impl("em_routing", &boxed<em_routing>);
  m.impl("em_routing_backward", &boxed<em_routing_backward>);
}

}  // namespace capsfast
