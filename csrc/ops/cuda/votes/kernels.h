// The votes family: routing of given votes with the softmax over the output capsules. A cluster of blocks copies the
// votes of a sample into its shared memory once, and runs all passes of a forward or backward there. Each block has
// some of the input capsules and writes its sums to memory; then the updates of steps.h follow, for this sample.
#pragma once

#include <type_traits>

#include "../steps.h"
#include "resident.h"

namespace capsfast::cuda::votes {

template <bool kBackward>
struct RoutingArgs {
  std::conditional_t<kBackward, BackwardSteps<float>, ForwardSteps<float>> steps;
  Cut cut;
  bool gradient_last;  // backward only, like the next fields
  Operand dvotes;      // [B, I, J, D], contiguous, written
  Operand dlogits;     // [B, I, J], written
};

// Shared memory of a block, in bytes: its votes, and behind them the sums [rows, J, D] of a pass or, in the gradient
// pass, V and ds [2 terms, J, D] of the iterations that have gradients. terms: how many these are; 0 in the forward.
template <class Tr>
CAPSFAST_HOST_DEVICE int votes_bytes(const Inputs& in, const Cut& cut) {
  return cut.capsules * static_cast<int>(in.J * in.D) * static_cast<int>(sizeof(typename Tr::Type));
}
template <class Tr>
CAPSFAST_HOST_DEVICE int64_t shared_bytes(const Inputs& in, const Cut& cut, int64_t terms) {
  const int64_t rows = cut.threads / 32 * rows_of_warp<Tr>(in);
  return votes_bytes<Tr>(in, cut) + 4 * in.J * in.D * (rows > 2 * terms ? rows : 2 * terms);
}

// The lane with output capsule (j + ahead) mod J of the same row. ahead <= J.
template <class Tr>
CAPSFAST_DEVICE int lane_ahead(const ThreadCoord<Tr>& at, int ahead) {
  const int to = gpu::thread() % 32 + ahead * at.step;
  return to < at.end ? to : to - at.segment;
}

// The maximum and the sum over the output capsules of a row, in all its lanes.
template <class Tr>
CAPSFAST_DEVICE float row_max(const ThreadCoord<Tr>& at, int J, float x) {
  for (int span = 1; span < J; span *= 2) x = std::fmax(x, gpu::shuffle(x, lane_ahead(at, span)));
  return x;
}
// `run` is the sum over 1, 2, 4, ... output capsules from j on. The sum over all J adds the runs whose lengths are
// binary digits of J.
template <class Tr>
CAPSFAST_DEVICE float row_sum(const ThreadCoord<Tr>& at, int J, float x) {
  float run = x, sum = J % 2 != 0 ? x : 0.0f;
  for (int span = 2; span <= J; span *= 2) {
    run += gpu::shuffle(run, lane_ahead(at, span / 2));
    if ((J & span) != 0) sum += gpu::shuffle(run, lane_ahead(at, J % span));
  }
  return sum;
}

template <class Tr>
CAPSFAST_DEVICE float dot(const ThreadCoord<Tr>& at, const typename Tr::Elements& x, const typename Tr::Elements& y) {
  float sum[2] = {0.0f, 0.0f};  // two chains of additions, to hide their latency
#pragma unroll
  for (int n = 0; n < Tr::elements; ++n) sum[n % 2] += x[n] * y[n];
  return lane_sum(sum[0] + sum[1], at.lanes);
}

// The coupling coefficient c of a vote and db = c (dc - sum_j c dc), where dc = votes . ds + dcoupling.
struct Coupled {
  float c, db;
};

template <class Tr, bool kBackward>
CAPSFAST_DEVICE Coupled couple(const Inputs& in, const ThreadCoord<Tr>& at, const Operand& dcoupling,
                               const typename Tr::Elements& votes, const typename Tr::Elements& V,
                               const typename Tr::Elements& ds, int64_t b, int64_t i) {
  const int J = static_cast<int>(in.J);
  const bool valid = in.mask.at(b, i) && in.out_mask.at(b, at.j);
  float x = dot<Tr>(at, votes, V), dc = kBackward ? dot<Tr>(at, votes, ds) : 0.0f;
  in.logits.add_to(&x, b, i, at.j);
  if (kBackward) dcoupling.add_to(&dc, b, i, at.j);
  if (!valid) {
    x = -Extreme<float>::infinity;
    dc = 0.0f;
  }
  const float max = row_max(at, J, std::fmax(x, in.leaky ? 0.0f : Extreme<float>::lowest)), e = exponential(x - max);
  const float scale = inverse(row_sum(at, J, e) + (in.leaky ? exponential(-max) : 0.0f));
  if (!kBackward) return {e * scale, 0.0f};
  return {e * scale, e * scale * (dc - row_sum(at, J, e * dc) * scale)};
}

// Calls f(row, mine) for the rows of this thread, the same number of times in all lanes of a warp. A lane without a row
// (`mine` is false) gets another valid row. It must not read the votes of that row: the warp of the row may be ahead.
template <class Tr, class F>
CAPSFAST_DEVICE void for_rows(const ThreadCoord<Tr>& at, int count, const F& f) {
  for (int first = at.first; first < count; first += at.rows) {
    const int row = first + at.row - at.first;
    f(row < count ? row : count - 1, at.mine && row < count);
  }
}

// One pass over a block's votes: sum_i c votes in the forward, sum_i db votes in the backward, to a partial sum [J, D].
template <class Tr, bool kBackward>
CAPSFAST_DEVICE void accumulate(const AccumulateArgs<float>& pass, const ResidentVotes<Tr>& resident, int64_t b,
                                int64_t begin, int sums_at, const Global<float>& to) {
  const Inputs& in = pass.in;
  const ThreadCoord<Tr>& at = resident.at;
  const int vectors = static_cast<int>(in.J * in.D);
  typename Tr::Elements V, ds, sum = {};
  read_vector(in, at, pass.scoring.V, b, V);
  if (kBackward) read_vector(in, at, pass.scoring.ds, b, ds);
  for_rows(at, resident.count, [&](int row, bool mine) {
    typename Tr::Elements votes;
    resident.read(row, mine, votes);
    float factor = 1.0f;
    if (!pass.unweighted) {
      const Coupled coupled = couple<Tr, kBackward>(in, at, pass.scoring.dcoupling, votes, V, ds, b, begin + row);
      factor = kBackward ? coupled.db : coupled.c;
      if (!kBackward && mine && at.leads()) pass.coupling.put(coupled.c, b, begin + row, at.j);
    }
    if (!mine) return;
#pragma unroll
    for (int n = 0; n < Tr::elements; ++n) sum[n] += factor * votes[n];
  });

  // The sums of all rows of the block, in their order.
  const Shared<float> sums = gpu::shared<float>(sums_at, at.rows * vectors);
#pragma unroll
  for (int n = 0; n < Tr::elements && at.mine; n += 4)
    sums.write(
        at.row * vectors + at.j * static_cast<int>(in.D) + at.d + n, Four{sum[n], sum[n + 1], sum[n + 2], sum[n + 3]});
  gpu::barrier();
  for (int n = 4 * gpu::thread(); n < vectors; n += 4 * gpu::threads()) {
    Four all = {};
#pragma unroll 4
    for (int row = 0; row < at.rows; ++row) {
      const Four x = sums.template vector<Four>(row * vectors + n);
#pragma unroll
      for (int k = 0; k < 4; ++k) all.value[k] += x.value[k];
    }
    to.template as<Four>()[n / 4] = all;
  }
}

// dvotes = sum_t c_t ds_t + db_t V_t in place of the votes, and dlogits = sum_t db_t.
template <class Tr>
CAPSFAST_DEVICE void make_gradients(const RoutingArgs<true>& a, const ResidentVotes<Tr>& resident, int64_t b,
                                    int64_t begin) {
  const BackwardSteps<float>& steps = a.steps;
  const Inputs& in = steps.in;
  const ThreadCoord<Tr>& at = resident.at;
  const int first = static_cast<int>(steps.first), terms = static_cast<int>(steps.iterations) - first,
            vectors = static_cast<int>(in.J * in.D);
  const StagedVectors<Tr> staged{gpu::shared<float>(votes_bytes<Tr>(in, a.cut), 2 * terms * vectors), vectors};
  for (int n = 0; n < terms; ++n) {
    const Scoring<float> with = steps.scoring(first + n);
    staged.stage(2 * n, with.V, b);
    staged.stage(2 * n + 1, with.ds, b);
  }
  gpu::barrier();
  for_rows(at, resident.count, [&](int row, bool mine) {
    const int64_t i = begin + row;
    typename Tr::Elements votes, dvotes = {};
    float dlogits = 0.0f;
    resident.read(row, mine, votes);
    for (int n = 0; n < terms; ++n) {
      typename Tr::Elements V, ds;
      staged.read(2 * n, at, V);
      staged.read(2 * n + 1, at, ds);
      const Operand dcoupling = n + 1 == terms ? steps.dcoupling : Operand{};
      const Coupled coupled = couple<Tr, true>(in, at, dcoupling, votes, V, ds, b, i);
      const float db = a.gradient_last ? 0.0f : coupled.db;
      dlogits += coupled.db;
#pragma unroll
      for (int d = 0; d < Tr::elements; ++d) dvotes[d] += coupled.c * ds[d] + db * V[d];
    }
    if (!mine) return;
    // A masked input capsule has no gradient, whatever ds holds.
    if (!in.mask.at(b, i)) {
#pragma unroll
      for (int n = 0; n < Tr::elements; ++n) dvotes[n] = 0.0f;
    }
    resident.write(row, dvotes);
    if (at.leads()) a.dlogits.put(dlogits, b, i, at.j);
  });
  if (a.dvotes.data) resident.copy_out(a.dvotes, b, begin);
}

template <class Tr, bool kBackward>
CAPSFAST_KERNEL(512, 1)
routing_kernel(CAPSFAST_IN_PLACE RoutingArgs<kBackward> a) {
  const Inputs& in = a.steps.in;
  const int64_t unit = gpu::block_x(), b = unit / gpu::cluster_size();
  const Work& work = a.steps.parts.work;
  const int64_t begin = work.begin(unit) - b * in.I, end = work.begin(unit + 1) - b * in.I;
  const ThreadCoord<Tr> at(in);
  const ResidentVotes<Tr> resident(in, at, static_cast<int>(end - begin));
  const int warps = gpu::threads() / 32;
  const Share share{
      b * in.J + gpu::cluster_rank() * warps + gpu::thread() / 32, (b + 1) * in.J, gpu::cluster_size() * warps};
  resident.copy(a.cut, b, begin);
  for (int64_t n = kBackward ? -1 : 0; n < a.steps.passes(); ++n) {
    if (n >= 0) {
      const int64_t vectors = in.J * in.D;
      accumulate<Tr, kBackward>(a.steps.pass(n), resident, b, begin, votes_bytes<Tr>(in, a.cut),
                                a.steps.parts.sum_rows.from(work.segment(unit, b) * vectors, vectors));
      gpu::cluster_barrier();
    }
    a.steps.after(n, share);
    gpu::cluster_barrier();
  }
  if constexpr (kBackward) {
    if (a.dvotes.data || a.dlogits.data) make_gradients(a, resident, b, begin);
  }
}

struct Kernels {
  gpu::Kernel<RoutingArgs<false>> forward;
  gpu::Kernel<RoutingArgs<true>> backward;
  int64_t (*shared_bytes)(const Inputs&, const Cut&, int64_t terms);
  int (*rows_of_warp)(const Inputs&);
};

// A lane has eight components if D is 8, else 16. Each type has a file ../instantiations/<type>.cu.
template <class E>
Kernels kernels_for(int64_t D) {
  using Few = Traits<E, 8>;
  using Many = Traits<E, 16>;
  if (D == 8) return {routing_kernel<Few, false>, routing_kernel<Few, true>, shared_bytes<Few>, rows_of_warp<Few>};
  return {routing_kernel<Many, false>, routing_kernel<Many, true>, shared_bytes<Many>, rows_of_warp<Many>};
}

extern template Kernels kernels_for<float>(int64_t);
extern template Kernels kernels_for<BFloat16>(int64_t);
extern template Kernels kernels_for<Float16>(int64_t);

}  // namespace capsfast::cuda::votes
