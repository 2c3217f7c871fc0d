// The forward: a reducing pass an iteration, and between them s, v and V.
#include "call.h"

namespace capsfast::cuda {

namespace {

template <class T>
class Forward {
 public:
  Forward(const Problem& problem, const ForwardOutputs& outputs, const Tensor& like)
      : call(problem, like),
        p(problem),
        out(outputs),
        coupling(operand(outputs.coupling, {p.B, p.I, p.J})),
        V(call.template scratch<T>(call.vectors())),
        parts(call.parts(p.softmax_in)),
        row_max(call.template scratch<T>(call.plan.rows_apart ? p.B * p.I : 0)),
        row_scale(call.template scratch<T>(call.plan.rows_apart ? p.B * p.I : 0)),
        s(static_cast<T*>(outputs.s), p.iterations * call.vectors()),
        norm(static_cast<T*>(outputs.norm), p.softmax_in ? 2 * p.iterations * call.scalars() : 0) {}

  void run() {
    for (int64_t t = 0; t < p.iterations; ++t) {
      const bool last = t + 1 == p.iterations, wants_coupling = last && coupling.data;
      ReduceArgs<T> pass = reading_V(t);
      if (wants_coupling && !p.softmax_in) pass.coupling = coupling;
      pass.unweighted = t == 0 && p.logits.data == nullptr && !pass.coupling.data && !(p.softmax_in && p.mask.data != nullptr);
      if (p.softmax_in && !pass.unweighted) {
        pass.max = parts.max;
        pass.total = parts.total;
      }
      if (call.plan.rows_apart && !pass.unweighted) pass.norm = row_normaliser(pass.scoring);
      call.reduce(pass, parts);
      add_output(t, pass.unweighted, last);
      if (wants_coupling && p.softmax_in) write_coupling(t);
    }
  }

 private:
  static Global<const T> present(const Global<T>& memory, bool is) { return is ? Global<const T>(memory) : Global<const T>(); }

  ReduceArgs<T> reading_V(int64_t t) const {
    ReduceArgs<T> pass{};
    pass.in = call.in;
    pass.scoring.V = present(V, t > 0);
    return pass;
  }

  Normaliser<T> row_normaliser(const Scoring<T>& scoring) const {
    call.rows({call.in, scoring, row_max, row_scale, {}});
    return {row_max, row_scale, {}};
  }

  void add_output(int64_t t, bool unweighted, bool last) const {
    OutputArgs<T> args{};
    args.in = call.in;
    args.squash = call.squash;
    args.parts = parts;
    args.unweighted = unweighted;
    args.first = t == 0;
    args.s = s.from(t * call.vectors(), call.vectors());
    args.max = norm_of(t, 0);
    args.scale = norm_of(t, 1);
    // The last V is read by nobody, but for the coupling that needs the one before.
    if (!last) args.V = V;
    if (last) args.v = operand(out.v, {p.B, p.J, p.D});
    call.per_output(output_kernel<T>, args);
  }

  Global<T> norm_of(int64_t t, int64_t which) const {
    if (!p.softmax_in) return {};
    return norm.from((which * p.iterations + t) * call.scalars(), call.scalars());
  }

  // With the softmax over the input capsules the coupling is known when the pass is over, and takes one more.
  void write_coupling(int64_t t) const {
    ReduceArgs<T> pass = reading_V(t);
    pass.norm = {norm_of(t, 0), norm_of(t, 1), {}};
    pass.coupling = coupling;
    call.reduce_coupling(pass);
  }

  Call<T> call;
  const Problem& p;
  const ForwardOutputs& out;
  Operand coupling;
  Global<T> V;
  Parts<T> parts;
  Global<T> row_max, row_scale;
  Global<T> s, norm;
};

}  // namespace

template <class T>
void forward(const Problem& p, const ForwardOutputs& out, const Tensor& like) {
  if (p.B == 0 || p.J == 0) return;
  Forward<T>(p, out, like).run();
}

template void forward<float>(const Problem&, const ForwardOutputs&, const Tensor&);
template void forward<double>(const Problem&, const ForwardOutputs&, const Tensor&);

}  // namespace capsfast::cuda
