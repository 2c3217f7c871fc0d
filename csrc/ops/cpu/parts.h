// Runs a call in parts along its samples: slices of votes that are given, tiles, and a small batch beside them.
//
// A Call is what an op computes from a Problem:
//   BackwardOutputs gradients;                              of the arguments that all ops have; empty in a forward
//   Call from(const Problem&, int64_t n) const;             its tensors from sample n on
//   Parts parts(const Problem&) const;                      parts of a batch in tiles, one after the other
//   void run(const Problem&, const Totals<T>&) const;       all passes of a part
#pragma once

#include <algorithm>
#include <cstdint>

#include "context.h"
#include "packed_weight.h"
#include "samples.h"
#include "small_batch.h"

namespace capsfast::driver {

template <class T>
Slices slices_of(const Problem& p, bool shared_logits_gradient) {
  if (!p.votes_given || p.capsule_lanes) return {};
  return make_slices(p, kernels<T>(isa(), true).L, num_threads(), sizeof(T), shared_logits_gradient);
}

template <class T>
Parts parts_of(const Problem& p) {
  return make_parts(p, kernels<T>(isa(), true).L, num_threads(), sizeof(T));
}

// Calls part(n, count) for the slices of a task: samples [n, n + count).
template <class F>
void for_slices(const Problem& p, const Slices& slices, int64_t task, const F& part) {
  if (p.positions < 0) {
    const int64_t end = p.B * (task + 1) / slices.tasks;
    for (int64_t n = p.B * task / slices.tasks; n < end; n += slices.samples)
      part(n, std::min(slices.samples, end - n));
    return;
  }
  const int64_t pieces = (p.positions + slices.samples - 1) / slices.samples;
  for (int64_t piece = p.B * pieces * task / slices.tasks; piece < p.B * pieces * (task + 1) / slices.tasks; ++piece) {
    const int64_t s = piece % pieces * slices.samples;
    part(piece / pieces * p.positions + s, std::min(slices.samples, p.positions - s));
  }
}

// What the parts of a call share.
template <class T>
struct Totals {
  double* dlogits = nullptr;         // [I, J], added to; null if it is not wanted
  double* dbias = nullptr;           // [J, D], likewise
  WeightSums<T>* weights = nullptr;  // of all parts; this is the next part
  int64_t threads = 1;               // that the part may use
};

inline BackwardOutputs samples(const Problem& p, const BackwardOutputs& out, int64_t n) {
  BackwardOutputs part = out;
  (p.votes_given ? part.dweight : part.du) = samples(p, p.votes_given ? out.dweight : out.du, n);
  if (out.per_sample_logits) part.dlogits = samples(p, out.dlogits, n);
  return part;
}

// The gradients that are sums over the batch, and the slices of a call. Each task of the slices has sums of its own.
template <class T>
class BatchSums {
 public:
  BatchSums(const Problem& p, const BackwardOutputs& gradients)
      : out(gradients),
        logits(out.dlogits.data != nullptr && !out.per_sample_logits ? p.I * p.J : 0),
        bias(out.dbias.data != nullptr ? p.J * p.D : 0),
        slices(slices_of<T>(p, logits > 0)),
        tasks(std::max<int64_t>(1, slices.tasks)),
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

  const Slices& cut() const { return slices; }

 private:
  const BackwardOutputs& out;
  int64_t logits, bias;
  Slices slices;
  int64_t tasks;
  Buffer<double> dlogits, dbias;
};

// Runs a call whose samples are all given votes, all in tiles, or all of a small batch with its votes.
template <class T, class Call>
void run_alike(const Problem& p, const Call& call, const BatchSums<T>& sums) {
  const auto run = [&](int64_t task, int64_t n, int64_t count, WeightSums<T>* weights, int64_t threads) {
    call.from(p, n).run(slice(p, n, count), sums.totals(task, weights, threads));
  };
  const Slices& slices = sums.cut();
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

// Runs a call: first the samples that go to tiles, then the others, as many of a small batch at a time as keep their
// votes. Forward and backward divide a batch alike: both layouts round logits in their own way, and with long votes
// the coupling of other logits has little to do with the coupling of the forward.
template <class T, class Call>
void run_call(const Problem& given, const Call& call) {
  Problem p = given;
  // A dW that is not added up in place is written by one of the two alone.
  p.together = p.shared_weight || p.weight.storage != kStorage<T>;
  const BatchSums<T> sums(p, call.gradients);
  const int64_t lanes = kernels<T>(isa()).L, in_tiles = samples_in_tiles(p, lanes, sizeof(T));
  if (in_tiles > 0 || p.B == 0) {
    Problem part = in_tiles == p.B ? p : slice(p, 0, in_tiles);
    part.tiled = true;
    run_alike<T>(PackedWeight<T>(part).problem(), call, sums);
  }
  const int64_t kept = samples_kept(p, lanes, sizeof(T));
  for (int64_t b = in_tiles; b < p.B; b += kept) {
    const Problem part = slice(p, b, std::min(kept, p.B - b));
    const SmallBatch<T> batch(part);
    const Problem routed = batch.routed();
    Call of_votes = call.from(p, b);
    const BackwardOutputs of_samples = of_votes.gradients;
    const bool wanted = of_samples.du.data != nullptr || of_samples.dweight.data != nullptr;
    of_votes.gradients.du = View{};
    of_votes.gradients.dweight = wanted ? routed.votes : View{};
    run_alike<T>(routed, of_votes, sums);
    batch.finish(of_samples, b > 0);
  }
  sums.write();
}

}  // namespace capsfast::driver
