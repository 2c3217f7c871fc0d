// Cuts a call along its samples into parts, and runs the parts.
//
// Given votes are cut into slices, and tasks run slices side by side. Samples that make their votes go to tiles; a
// routing_pass or EM routing cuts these samples into parts that run one after the other. The remaining samples are a
// small batch.
//
// A Call has the tensors of an op:
//   BackwardOutputs& gradients();                           of the arguments that all ops have; empty in a forward
//   Call from(const Problem&, int64_t n) const;             its tensors from sample n on
//   Parts parts(const Problem&) const;                      parts of a batch in tiles
//   void run(const Problem&, const Totals<T>&) const;       all passes of a part
#pragma once

#include <algorithm>
#include <cstdint>

#include "context.h"
#include "prepared.h"
#include "samples.h"

namespace capsfast::driver {

template <class T>
Slices slices_of(const Problem& p, int64_t threads, bool shared_logits_gradient) {
  if (!p.votes_given || p.capsule_lanes()) return {};
  return make_slices(p, kernels<T>(isa(), true).L, threads, sizeof(T), shared_logits_gradient);
}

// The parts of samples in tiles. gradients: of the call. Unless parts add to dW in place, they add to sums as large as
// dW. Then parts pay only if they save more memory than these sums take.
template <class T>
Parts parts_of(const Problem& p, int64_t threads, const BackwardOutputs& gradients) {
  Parts parts = make_parts(p, kernels<T>(isa(), true).L, threads, sizeof(T));
  if (parts.count == 1 || gradients.dweight.data == nullptr || p.shared_weight) return parts;
  const Problem part = slice(p, 0, parts.begin(1));
  if (!Planned<T>(part, threads).plan.weight_in_place && 2 * p.I * p.weight_size() > parts.saved) parts.count = 1;
  return parts;
}

// The samples that go to tiles, from sample 0 on. The other samples are a small batch, of which `kept` samples keep
// their votes at a time. Forward and backward must cut a batch alike: tiles and small batches round logits differently,
// and with long votes a small difference of the logits changes the coupling much.
template <class T>
struct BatchCut {
  int64_t in_tiles, kept;

  explicit BatchCut(const Problem& p)
      : in_tiles(samples_in_tiles(p, kernels<T>(isa()).L, sizeof(T))),
        kept(samples_kept(p, kernels<T>(isa()).L, sizeof(T))) {}
  Problem tiles(const Problem& p) const {
    Problem part = in_tiles == p.B ? p : slice(p, 0, in_tiles);
    if (!p.votes_given) part.lane = Lane::sample;
    return part;
  }
};

// Calls run(n, count) for the slices of a task: samples [n, n + count).
template <class F>
void for_slices(const Problem& p, const Slices& slices, int64_t task, const F& run) {
  if (!p.has_positions()) {
    const int64_t end = p.B * (task + 1) / slices.tasks;
    for (int64_t n = p.B * task / slices.tasks; n < end; n += slices.samples) run(n, std::min(slices.samples, end - n));
    return;
  }
  const int64_t pieces = (p.positions + slices.samples - 1) / slices.samples;
  for (int64_t piece = p.B * pieces * task / slices.tasks; piece < p.B * pieces * (task + 1) / slices.tasks; ++piece) {
    const int64_t s = piece % pieces * slices.samples;
    run(piece / pieces * p.positions + s, std::min(slices.samples, p.positions - s));
  }
}

// What the parts of a call share.
template <class T>
struct Totals {
  double* dlogits = nullptr;         // [I, J], added to; null if it is not wanted
  double* dbias = nullptr;           // [J, D], likewise
  WeightSums<T>* weights = nullptr;  // of all parts; begin() goes to the next part
  int64_t threads = 1;               // that the part may use
};

// The gradients that are sums over the batch, and the slices of a call. Each task of the slices has sums of its own.
template <class T>
class BatchSums {
 public:
  BatchSums(const Problem& p, const BackwardOutputs& gradients)
      : out(gradients),
        logits(out.dlogits.data != nullptr && !out.per_sample_logits ? p.I * p.J : 0),
        bias(out.dbias.data != nullptr ? p.J * p.D : 0),
        slices_(slices_of<T>(p, num_threads(), logits > 0)),
        tasks(std::max<int64_t>(1, slices_.tasks)),
        dlogits(tasks * logits),
        dbias(tasks * bias) {
    std::fill_n(dlogits.get(), tasks * logits, 0.0);
    std::fill_n(dbias.get(), tasks * bias, 0.0);
  }
  Totals<T> totals(int64_t task, WeightSums<T>* weights, int64_t threads) const {
    return {logits == 0 ? nullptr : dlogits.get() + task * logits, bias == 0 ? nullptr : dbias.get() + task * bias,
            weights, threads};
  }
  void write() const {
    add_up<double>(dlogits.get(), logits == 0 ? 0 : tasks, logits, out.dlogits);
    add_up<double>(dbias.get(), bias == 0 ? 0 : tasks, bias, out.dbias);
  }
  const Slices& slices() const { return slices_; }

 private:
  const BackwardOutputs out;
  int64_t logits, bias;
  Slices slices_;
  int64_t tasks;
  Buffer<double> dlogits, dbias;
};

// Runs a call whose samples are all alike: given votes, samples in tiles, or a small batch with its votes.
template <class T, class Call>
void run_alike(const Problem& p, const Call& call, const BatchSums<T>& sums) {
  const auto run = [&](int64_t task, int64_t n, int64_t count, WeightSums<T>* weights, int64_t threads) {
    call.from(p, n).run(slice(p, n, count), sums.totals(task, weights, threads));
  };
  const Slices& slices = sums.slices();
  for_tasks(slices.tasks, [&](int64_t task, int64_t) {
    for_slices(p, slices, task, [&](int64_t n, int64_t count) {
      WeightSums<T> weights;
      run(task, n, count, &weights, 1);
    });
  });
  if (slices.tasks > 0) return;
  const Parts parts = call.parts(p);
  WeightSums<T> weights(parts.count * parts.passes);
  for (int64_t part = 0; part < parts.count; ++part)
    run(0, parts.begin(part), parts.begin(part + 1) - parts.begin(part), &weights, num_threads());
}

// Runs a call: the samples that go to tiles, then the others as a small batch.
template <class T, class Call>
void run_call(const Problem& p, Call call) {
  const BatchSums<T> sums(p, call.gradients());
  const BatchCut<T> cut(p);
  if (cut.in_tiles > 0 || p.B == 0) run_alike<T>(PackedWeight<T>(cut.tiles(p)).problem(), call, sums);
  for (int64_t b = cut.in_tiles; b < p.B; b += cut.kept) {
    const Problem part = slice(p, b, std::min(cut.kept, p.B - b));
    const SmallBatch<T> batch(part);
    const Problem routed = batch.routed();
    Call of_votes = call.from(p, b);
    BackwardOutputs& gradients = of_votes.gradients();
    const BackwardOutputs of_samples = gradients;
    const bool wanted = of_samples.du.data != nullptr || of_samples.dweight.data != nullptr;
    gradients.du = View{};
    gradients.dweight = wanted ? routed.votes : View{};
    run_alike<T>(routed, of_votes, sums);
    batch.finish(of_samples, b > 0);
  }
  sums.write();
}

}  // namespace capsfast::driver
