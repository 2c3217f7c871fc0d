#include "routing.h"

#include <cstdint>

#include "pass_backward.h"
#include "pass_forward.h"
#include "parts.h"

namespace capsfast {

namespace {

using namespace driver;

PassInputs samples(const Problem& p, const PassInputs& in, int64_t n) {
  return {driver::samples(p, in.query, n), driver::samples(p, in.precision, n), driver::samples(p, in.center, n),
          driver::samples(p, in.prior, n)};
}

template <class T>
struct PassForwardCall {
  PassInputs in;
  PassOutputs out;
  BackwardOutputs gradients = {};

  PassForwardCall from(const Problem& p, int64_t n) const {
    PassForwardCall part{samples(p, in, n), out};
    for (View* view : {&part.out.mass, &part.out.first, &part.out.second, &part.out.weights, &part.out.lse})
      *view = driver::samples(p, *view, n);
    part.out.norm = static_cast<T*>(out.norm) + (p.softmax_in() ? n * p.J : 0);
    return part;
  }
  Parts parts(const Problem& p) const { return parts_of<T>(p); }
  void run(const Problem& p, const Totals<T>& totals) const { PassForward<T>(p, in, out, totals.threads).run(); }
};

template <class T>
struct PassBackwardCall {
  PassInputs in;
  PassSaved saved;
  PassGradients out;
  BackwardOutputs gradients = out.common;

  PassBackwardCall from(const Problem& p, int64_t n) const {
    PassBackwardCall part{samples(p, in, n), saved, out, driver::samples(p, gradients, n)};
    PassSaved& s = part.saved;
    PassGradients& g = part.out;
    for (View* view : {&s.dmass, &s.dfirst, &s.dsecond, &s.dweights, &s.dlse, &s.mass, &s.first, &s.second, &s.weights,
                       &g.dquery, &g.dprecision, &g.dcenter, &g.dprior, &g.dactivation, &g.dlse})
      *view = driver::samples(p, *view, n);
    s.norm = static_cast<const T*>(saved.norm) + (p.softmax_in() ? n * p.J : 0);
    return part;
  }
  // Parts that do not add to dW in place add to sums of its size. Parts pay only if they save more memory than these
  // sums.
  Parts parts(const Problem& p) const {
    Parts parts = parts_of<T>(p);
    if (parts.count == 1 || gradients.dweight.data == nullptr || p.shared_weight) return parts;
    const Problem first = slice(p, 0, parts.begin(1));
    const bool in_place =
        make_plan(first, kernels_for<T>(first, num_threads()).L, num_threads(), sizeof(T)).weight_in_place;
    if (!in_place && 2 * p.I * p.weight_size() > parts.saved) parts.count = 1;
    return parts;
  }
  void run(const Problem& p, const Totals<T>& totals) const {
    PassGradients part = out;
    part.common = gradients;
    PassBackward<T>(p, in, saved, part, totals).run();
  }
};

}  // namespace

template <class T>
void pass_forward(const Problem& p, const PassInputs& in, const PassOutputs& out) {
  driver::run_call<T>(p, PassForwardCall<T>{in, out});
}

template <class T>
void pass_backward(const Problem& p, const PassInputs& in, const PassSaved& saved, const PassGradients& out) {
  driver::run_call<T>(p, PassBackwardCall<T>{in, saved, out});
}

template void pass_forward<float>(const Problem&, const PassInputs&, const PassOutputs&);
template void pass_forward<double>(const Problem&, const PassInputs&, const PassOutputs&);
template void pass_backward<float>(const Problem&, const PassInputs&, const PassSaved&, const PassGradients&);
template void pass_backward<double>(const Problem&, const PassInputs&, const PassSaved&, const PassGradients&);

}  // namespace capsfast
