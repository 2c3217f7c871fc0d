#include "pass.h"

#include <algorithm>
#include <cstdint>

#include "pass_backward.h"
#include "pass_forward.h"
#include "packed_weight.h"
#include "slices.h"
#include "small_batch.h"

namespace capsfast {

namespace {

using namespace driver;

PassInputs slice(const PassInputs& in, const Problem& p, int64_t n) {
  return {samples(p, in.query, n), samples(p, in.precision, n), samples(p, in.center, n), samples(p, in.prior, n)};
}

template <class T>
PassOutputs slice(const PassOutputs& out, const Problem& p, int64_t n) {
  PassOutputs part = out;
  for (View* view : {&part.mass, &part.first, &part.second, &part.weights, &part.lse}) *view = samples(p, *view, n);
  part.norm = static_cast<T*>(out.norm) + (p.softmax_in() ? n * p.J : 0);
  return part;
}

template <class T>
PassSaved slice(const PassSaved& saved, const Problem& p, int64_t n) {
  PassSaved part = saved;
  for (View* view : {&part.dmass, &part.dfirst, &part.dsecond, &part.dweights, &part.dlse, &part.mass, &part.first,
                     &part.second, &part.weights}) {
    *view = samples(p, *view, n);
  }
  part.norm = static_cast<const T*>(saved.norm) + (p.softmax_in() ? n * p.J : 0);
  return part;
}

PassGradients slice(const PassGradients& out, const Problem& p, int64_t n) {
  PassGradients part = out;
  for (View* view : {&part.dquery, &part.dprecision, &part.dcenter, &part.dprior, &part.dactivation, &part.dlse,
                     p.votes_given ? &part.common.dweight : &part.common.du}) {
    *view = samples(p, *view, n);
  }
  if (out.common.per_sample_logits) part.common.dlogits = samples(p, out.common.dlogits, n);
  return part;
}

template <class T>
void forward(const Problem& p, const PassInputs& in, const PassOutputs& out) {
  const Slices slices = slices_of<T>(p, false);
  const auto sum = [&](int64_t n, int64_t count, int64_t threads) {
    const Problem part = driver::slice(p, n, count);
    const PassOutputs part_out = slice<T>(out, p, n);
    PassForward<T>(part, slice(in, p, n), part_out, threads).run();
  };
  for_tasks(slices.tasks, [&](int64_t task, int64_t) {
    for_slices(p, slices, task, [&](int64_t n, int64_t count) { sum(n, count, 1); });
  });
  const Parts parts = parts_of<T>(p);
  for (int64_t part = 0; part < parts.count && slices.tasks == 0; ++part)
    sum(parts.begin(part), parts.begin(part + 1) - parts.begin(part), num_threads());
}

// Parts that do not add to dW in place add to sums of its size. Parts pay only if they save more memory than these
// sums.
template <class T>
Parts backward_parts(const Problem& p, const PassGradients& out) {
  Parts parts = parts_of<T>(p);
  if (parts.count == 1 || out.common.dweight.data == nullptr || p.shared_weight) return parts;
  const Problem first = driver::slice(p, 0, parts.begin(1));
  const bool in_place =
      make_plan(first, kernels_for<T>(first, num_threads()).L, num_threads(), sizeof(T)).weight_in_place;
  if (!in_place && 2 * p.I * p.weight_size() > parts.saved) parts.count = 1;
  return parts;
}

template <class T>
void backward(const Problem& p, const PassInputs& in, const PassSaved& saved, const PassGradients& out) {
  const View& dlogits = out.common.dlogits;
  const int64_t logits = dlogits.data != nullptr && !out.common.per_sample_logits ? p.I * p.J : 0;
  const Slices slices = slices_of<T>(p, logits > 0);
  const int64_t tasks = std::max<int64_t>(1, slices.tasks);
  const Buffer<double> sums(tasks * logits);
  std::fill_n(sums.get(), tasks * logits, 0.0);
  const auto sum_of = [&](int64_t task) { return logits == 0 ? nullptr : sums.get() + task * logits; };
  const auto differentiate = [&](int64_t task, int64_t n, int64_t count, WeightSums<T>* weights, int64_t threads) {
    const Problem part = driver::slice(p, n, count);
    const PassSaved part_saved = slice<T>(saved, p, n);
    const PassGradients part_out = slice(out, p, n);
    PassBackward<T>(part, slice(in, p, n), part_saved, part_out, sum_of(task), weights, threads).run();
  };
  for_tasks(slices.tasks, [&](int64_t task, int64_t) {
    for_slices(p, slices, task, [&](int64_t n, int64_t count) {
      WeightSums<T> weights;
      differentiate(task, n, count, &weights, 1);
    });
  });
  const Parts parts = backward_parts<T>(p, out);
  WeightSums<T> weights(parts.count);
  for (int64_t part = 0; part < parts.count && slices.tasks == 0; ++part)
    differentiate(0, parts.begin(part), parts.begin(part + 1) - parts.begin(part), &weights, num_threads());
  add_up<double>(sums.get(), logits == 0 ? 0 : tasks, logits, dlogits);
}

}  // namespace

template <class T>
void pass_forward(const Problem& p, const PassInputs& in, const PassOutputs& out) {
  const auto tiles = [&](const Problem& part) { forward<T>(PackedWeight<T>(part).problem(), in, out); };
  for_parts<T>(p, tiles, [&](const Problem& part, int64_t b) {
    const SmallBatch<T> batch(part);
    forward<T>(batch.routed(), slice(in, p, b), slice<T>(out, p, b));
  });
}

template <class T>
void pass_backward(const Problem& given, const PassInputs& in, const PassSaved& saved, const PassGradients& out) {
  const Problem p = of_backward<T>(given, out.common);
  const BackwardOutputs& common = out.common;
  const auto tiles = [&](const Problem& part) { backward<T>(PackedWeight<T>(part).problem(), in, saved, out); };
  for_parts<T>(p, tiles, [&](const Problem& part, int64_t b) {
    const SmallBatch<T> batch(part);
    const Problem routed = batch.routed();
    PassGradients votes_out = slice(out, p, b);
    const bool needed = common.du.data != nullptr || common.dweight.data != nullptr;
    votes_out.common.du = View{};
    votes_out.common.dweight = needed ? routed.votes : View{};
    backward<T>(routed, slice(in, p, b), slice<T>(saved, p, b), votes_out);
    BackwardOutputs part_out = common;
    part_out.du = samples(p, common.du, b);
    batch.finish(part_out, b > 0);
  });
}

template void pass_forward<float>(const Problem&, const PassInputs&, const PassOutputs&);
template void pass_forward<double>(const Problem&, const PassInputs&, const PassOutputs&);
template void pass_backward<float>(const Problem&, const PassInputs&, const PassSaved&, const PassGradients&);
template void pass_backward<double>(const Problem&, const PassInputs&, const PassSaved&, const PassGradients&);

}  // namespace capsfast
