#include "routing.h"

#include <algorithm>
#include <cstdint>

#include "backward.h"
#include "context.h"
#include "forward.h"
#include "slices.h"
#include "small_batch.h"

namespace capsfast {

namespace {

using namespace driver;

template <class T>
void passes_forward(const Problem& p, const ForwardOutputs& out) {
  const Slices slices = p.votes_given ? make_slices(p, num_threads(), sizeof(T), false) : Slices{};
  if (slices.tasks == 0) return Forward<T>(p, out, num_threads()).run();
  parallel(slices.tasks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t b = p.B * begin / slices.tasks; b < p.B * end / slices.tasks; b += slices.samples) {
      const int64_t samples = std::min(slices.samples, p.B * end / slices.tasks - b);
      ForwardOutputs part = out;
      part.v = shifted(out.v, b * p.J * p.D);
      part.coupling = shifted(out.coupling, b * p.I * p.J);
      part.s = static_cast<T*>(out.s) + b * p.J * p.D;
      part.norm = static_cast<T*>(out.norm) + (p.softmax_in() ? b * p.J : 0);
      Forward<T>(slice(p, b, samples), part, 1).run();
    }
  });
}

template <class T>
void passes_backward(const Problem& p, const BackwardInputs& in, const BackwardOutputs& out) {
  const int64_t logits = out.dlogits.data != nullptr && !out.per_sample_logits ? p.I * p.J : 0;
  const Slices slices = p.votes_given ? make_slices(p, num_threads(), sizeof(T), logits > 0) : Slices{};
  const int64_t tasks = std::max<int64_t>(1, slices.tasks);
  const int64_t bias = out.dbias.data != nullptr ? p.J * p.D : 0;
  const Buffer<double> dlogits(tasks * logits), dbias(tasks * bias);
  std::fill_n(dlogits.get(), tasks * logits, 0.0);
  std::fill_n(dbias.get(), tasks * bias, 0.0);
  const auto logits_of = [&](int64_t task) { return logits == 0 ? nullptr : dlogits.get() + task * logits; };
  const auto bias_of = [&](int64_t task) { return bias == 0 ? nullptr : dbias.get() + task * bias; };
  if (slices.tasks == 0) {
    Backward<T>(p, in, out, logits_of(0), bias_of(0), num_threads()).run();
  } else {
    parallel(tasks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task) {
        const int64_t b1 = p.B * (task + 1) / tasks;
        for (int64_t b = p.B * task / tasks; b < b1; b += slices.samples) {
          BackwardInputs part_in = in;
          part_in.dv = shifted(in.dv, b * in.dv.stride[0]);
          part_in.dcoupling = shifted(in.dcoupling, b * in.dcoupling.stride[0]);
          part_in.coupling = shifted(in.coupling, b * in.coupling.stride[0]);
          part_in.s = static_cast<const T*>(in.s) + b * p.J * p.D;
          part_in.norm = static_cast<const T*>(in.norm) + (p.softmax_in() ? b * p.J : 0);
          BackwardOutputs part_out = out;
          part_out.dweight = shifted(out.dweight, b * p.I * (p.shared_outputs ? 1 : p.J) * p.D);
          if (out.per_sample_logits) part_out.dlogits = shifted(out.dlogits, b * p.I * p.J);
          const Problem part = slice(p, b, std::min(slices.samples, b1 - b));
          Backward<T>(part, part_in, part_out, logits_of(task), bias_of(task), 1).run();
        }
      }
    });
  }
  add_up<double>(dlogits.get(), logits == 0 ? 0 : tasks, logits, out.dlogits);
  add_up<double>(dbias.get(), bias == 0 ? 0 : tasks, bias, out.dbias);
}

}  // namespace

template <class T>
void routing_forward(const Problem& p, const ForwardOutputs& out) {
  if (!is_small_batch<T>(p)) return passes_forward<T>(p, out);
  const SmallBatch<T> batch(p);
  passes_forward<T>(batch.routed(), out);
}

template <class T>
void routing_backward(const Problem& p, const BackwardInputs& in, const BackwardOutputs& out) {
  if (!is_small_batch<T>(p)) return passes_backward<T>(p, in, out);
  const SmallBatch<T> batch(p);
  const Problem routed = batch.routed();
  BackwardOutputs votes_out = out;
  votes_out.du = View{};
  votes_out.dweight = out.du.data == nullptr && out.dweight.data == nullptr ? View{} : routed.votes;
  passes_backward<T>(routed, in, votes_out);
  batch.finish(out);
}

template void routing_forward<float>(const Problem&, const ForwardOutputs&);
template void routing_forward<double>(const Problem&, const ForwardOutputs&);
template void routing_backward<float>(const Problem&, const BackwardInputs&, const BackwardOutputs&);
template void routing_backward<double>(const Problem&, const BackwardInputs&, const BackwardOutputs&);

}  // namespace capsfast
