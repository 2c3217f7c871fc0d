#include <algorithm>
#include <cstdint>

#include "backward.h"
#include "engine.h"
#include "forward.h"

namespace capsfast {

template <class T>
void routing_forward(const Problem& p, const ForwardOutputs& out) {
  driver::ForwardCall<T> call;
  call.v = out.v;
  call.s = out.s;
  call.out.batch = out.batch;
  call.out.weights = out.coupling;
  call.out.norm = out.norm;
  driver::run_call<T>(p, call);
}

template <class T>
void routing_backward(const Problem& p, const BackwardInputs& in, const BackwardOutputs& out) {
  driver::BackwardCall<T> call;
  call.dv = in.dv;
  call.s = in.s;
  call.saved.batch = in.batch;
  call.saved.weights = in.coupling;
  call.saved.dweights = in.dcoupling;
  call.saved.norm = in.norm;
  call.out.common = out;
  driver::run_call<T>(p, call);
}

template <class T>
void pass_forward(const Problem& p, const PassInputs& in, const PassOutputs& out) {
  driver::run_call<T>(p, driver::ForwardCall<T>{in, out});
}

template <class T>
void pass_backward(const Problem& p, const PassInputs& in, const PassSaved& saved, const PassGradients& out) {
  driver::run_call<T>(p, driver::BackwardCall<T>{in, saved, out});
}

template <class T>
CallPlan plan_of_call(const Problem& p, int64_t threads) {
  const driver::BatchCut<T> cut(p);
  const bool small = cut.in_tiles == 0 && p.B > 0;
  Problem alike = cut.tiles(p);
  if (small) alike = driver::routed_votes(driver::slice(p, 0, std::min(cut.kept, p.B)), View{});
  if (driver::PackedWeight<T>::wanted(alike)) alike.weight = driver::PackedWeight<T>::packed_view(alike, nullptr);
  const Slices slices = driver::slices_of<T>(p, threads, false);
  const Parts parts = driver::parts_of<T>(alike, threads, {});
  const int64_t count = slices.tasks > 0 ? slices.samples : parts.begin(1);
  const Problem part = driver::slice(alike, 0, count);
  return {p.B - cut.in_tiles, parts.count, part.lane, driver::Planned<T>(part, slices.tasks > 0 ? 1 : threads).plan};
}

#define CAPSFAST_INSTANTIATE(T)                                                                              \
  template void routing_forward<T>(const Problem&, const ForwardOutputs&);                                   \
  template void routing_backward<T>(const Problem&, const BackwardInputs&, const BackwardOutputs&);          \
  template void pass_forward<T>(const Problem&, const PassInputs&, const PassOutputs&);                      \
  template void pass_backward<T>(const Problem&, const PassInputs&, const PassSaved&, const PassGradients&); \
  template CallPlan plan_of_call<T>(const Problem&, int64_t);
CAPSFAST_INSTANTIATE(float)
CAPSFAST_INSTANTIATE(double)
#undef CAPSFAST_INSTANTIATE

}  // namespace capsfast
