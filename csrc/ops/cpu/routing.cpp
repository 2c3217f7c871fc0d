#include "routing.h"

#include <algorithm>
#include <cstdint>

#include "backward.h"
#include "context.h"
#include "forward.h"
#include "packed_weight.h"
#include "slices.h"
#include "small_batch.h"

namespace capsfast {

namespace {

using namespace driver;

template <class T>
ForwardOutputs slice(const ForwardOutputs& out, const Problem& p, int64_t b) {
  ForwardOutputs part = out;
  part.v = samples(p, out.v, b);
  part.coupling = samples(p, out.coupling, b);
  if (p.positions >= 0) return part;
  part.s = static_cast<T*>(out.s) + b * p.J * p.D;
  part.norm = static_cast<T*>(out.norm) + (p.softmax_in() ? b * p.J : 0);
  return part;
}

template <class T>
BackwardInputs slice(const BackwardInputs& in, const Problem& p, int64_t b) {
  BackwardInputs part = in;
  part.dv = samples(p, in.dv, b);
  part.dcoupling = samples(p, in.dcoupling, b);
  part.coupling = samples(p, in.coupling, b);
  if (p.positions >= 0) return part;
  part.s = static_cast<const T*>(in.s) + b * p.J * p.D;
  part.norm = static_cast<const T*>(in.norm) + (p.softmax_in() ? b * p.J : 0);
  return part;
}

// What a forward leaves for its backward, for a slice of positions. It is not kept between the two calls: it would take
// r / I of the memory of the votes, and I is small. So the backward routes a slice again while its votes are in the
// cache.
template <class T>
class Intermediate {
 public:
  explicit Intermediate(const Problem& slice)
      : p_(slice),
        sums_(slice.side_by_side && !slice.capsule_lanes ? p_.iterations * p_.B * p_.J : 0),
        s_(sums_ * p_.D),
        norm_(p_.softmax_in() ? 2 * sums_ : 0) {}
  // Makes `kept` point to this memory.
  template <class Kept>
  void replace(Kept* kept) const {
    if (sums_ == 0) return;
    kept->batch = p_.B;
    kept->s = s_.get();
    kept->norm = norm_.get();
  }
  // Routes the slice for a backward.
  void route(BackwardInputs* in) const {
    if (sums_ == 0) return;
    const Buffer<T> v(p_.B * p_.J * p_.D);
    ForwardOutputs again;
    again.v = View{v.get(), kStorage<T>, {p_.J * p_.D, p_.D, 1}};
    replace(&again);
    Forward<T>(p_, again, 1).run();
    replace(in);
  }

 private:
  const Problem& p_;
  int64_t sums_;
  Buffer<T> s_, norm_;
};

template <class T>
void passes_forward(const Problem& p, const ForwardOutputs& out) {
  const Slices slices = slices_of<T>(p, false);
  const auto route = [&](int64_t n, int64_t count, int64_t threads) {
    const Problem part = driver::slice(p, n, count);
    ForwardOutputs part_out = slice<T>(out, p, n);
    const Intermediate<T> intermediate(part);
    intermediate.replace(&part_out);
    Forward<T>(part, part_out, threads).run();
  };
  if (slices.tasks == 0) return route(0, p.B, num_threads());
  for_tasks(slices.tasks, [&](int64_t task, int64_t) {
    for_slices(p, slices, task, [&](int64_t n, int64_t count) { route(n, count, 1); });
  });
}

template <class T>
void passes_backward(const Problem& p, const BackwardInputs& in, const BackwardOutputs& out) {
  const int64_t logits = out.dlogits.data != nullptr && !out.per_sample_logits ? p.I * p.J : 0;
  const Slices slices = slices_of<T>(p, logits > 0);
  const int64_t tasks = std::max<int64_t>(1, slices.tasks);
  const int64_t bias = out.dbias.data != nullptr ? p.J * p.D : 0;
  const Buffer<double> dlogits(tasks * logits), dbias(tasks * bias);
  std::fill_n(dlogits.get(), tasks * logits, 0.0);
  std::fill_n(dbias.get(), tasks * bias, 0.0);
  const auto logits_of = [&](int64_t task) { return logits == 0 ? nullptr : dlogits.get() + task * logits; };
  const auto bias_of = [&](int64_t task) { return bias == 0 ? nullptr : dbias.get() + task * bias; };
  const auto differentiate = [&](int64_t task, int64_t n, int64_t count, int64_t threads) {
    const Problem part = driver::slice(p, n, count);
    BackwardInputs part_in = slice<T>(in, p, n);
    const Intermediate<T> intermediate(part);
    intermediate.route(&part_in);
    BackwardOutputs part_out = out;
    if (p.votes_given) part_out.dweight = samples(p, out.dweight, n);
    if (out.per_sample_logits) part_out.dlogits = samples(p, out.dlogits, n);
    Backward<T>(part, part_in, part_out, logits_of(task), bias_of(task), threads).run();
  };
  for_tasks(slices.tasks, [&](int64_t task, int64_t) {
    for_slices(p, slices, task, [&](int64_t n, int64_t count) { differentiate(task, n, count, 1); });
  });
  if (slices.tasks == 0) differentiate(0, 0, p.B, num_threads());
  add_up<double>(dlogits.get(), logits == 0 ? 0 : tasks, logits, out.dlogits);
  add_up<double>(dbias.get(), bias == 0 ? 0 : tasks, bias, out.dbias);
}

}  // namespace

template <class T>
void routing_forward(const Problem& p, const ForwardOutputs& out) {
  const auto tiles = [&](const Problem& part) { passes_forward<T>(PackedWeight<T>(part).problem(), out); };
  for_parts<T>(p, tiles, [&](const Problem& part, int64_t b) {
    const SmallBatch<T> batch(part);
    passes_forward<T>(batch.routed(), slice<T>(out, p, b));
  });
}

template <class T>
void routing_backward(const Problem& given, const BackwardInputs& in, const BackwardOutputs& out) {
  const Problem p = of_backward<T>(given, out);
  const auto tiles = [&](const Problem& part) { passes_backward<T>(PackedWeight<T>(part).problem(), in, out); };
  for_parts<T>(p, tiles, [&](const Problem& part, int64_t b) {
    const SmallBatch<T> batch(part);
    const Problem routed = batch.routed();
    BackwardOutputs part_out = out, votes_out = out;
    part_out.du = samples(p, out.du, b);
    votes_out.du = View{};
    votes_out.dweight = out.du.data == nullptr && out.dweight.data == nullptr ? View{} : routed.votes;
    if (out.per_sample_logits) votes_out.dlogits = samples(p, out.dlogits, b);
    passes_backward<T>(routed, slice<T>(in, p, b), votes_out);
    batch.finish(part_out, b > 0);
  });
}

template void routing_forward<float>(const Problem&, const ForwardOutputs&);
template void routing_forward<double>(const Problem&, const ForwardOutputs&);
template void routing_backward<float>(const Problem&, const BackwardInputs&, const BackwardOutputs&);
template void routing_backward<double>(const Problem&, const BackwardInputs&, const BackwardOutputs&);

}  // namespace capsfast
