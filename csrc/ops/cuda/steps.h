// The sequence of passes and updates of a forward and of a backward. The host launches a kernel for each pass or
// update; the rows kernels run all of them in one launch. pass(n) has the arguments of accumulating pass n, 0 <= n <
// passes(). If updates(n), after(n) is the update after pass n, for all output capsules. n starts at `begin`, which is
// -1 if an update comes before pass 0. If a separate sweep computes the normaliser of pass n, the normaliser has number
// row_norm(n).
#pragma once

#include "../../math/host_device.h"
#include "update.h"

namespace capsfast::cuda {

template <class T>
struct ForwardSteps {
  static constexpr bool routing = true, backward = false;
  static constexpr int64_t begin = 0;
  Inputs in;
  BiasedSquashing squash;
  int64_t iterations;
  Operand coupling, v;  // written: [B, I, J], [B, J, D]
  VectorOrder order;    // of V
  Global<T> V;          // [B, J, D], the sum of the outputs so far, or the last output
  Global<T> s;          // [r, B, J, D]
  Global<T> norm;       // [2, r, B, J], softmax over the input capsules
  Parts<T> parts;

  // The softmax over the input capsules knows its normaliser only after a pass. So one more pass writes the last
  // coupling.
  CAPSFAST_HOST_DEVICE int64_t passes() const { return iterations + (coupling.data && in.softmax_in); }

  CAPSFAST_HOST_DEVICE AccumulateArgs<T> pass(int64_t t) const {
    const int64_t last = iterations - 1;
    const bool closing = t > last;  // the pass that writes the coupling, and scores as the last iteration did
    AccumulateArgs<T> args{};
    args.in = in;
    if ((closing ? last : t) > 0) args.scoring.V = V;
    if (t == (in.softmax_in ? iterations : last)) args.coupling = coupling;
    if (closing) {
      args.to.work = parts.work;
      args.norm = {norm_of(0, last), norm_of(1, last), {}};
      return args;
    }
    args.unweighted = t == 0 && !in.logits.data && !args.coupling.data && !(in.softmax_in && in.mask.data);
    args.to = parts;
    if (args.unweighted) args.to.max = {};
    return args;
  }
  CAPSFAST_HOST_DEVICE int64_t row_norm(int64_t) const { return 0; }

  CAPSFAST_HOST_DEVICE bool updates(int64_t t) const { return t < iterations; }
  CAPSFAST_DEVICE void after(int64_t t) const {
    if (updates(t)) for_outputs(in, [&](const UpdateCoord& at) { make_output(t, at); });
  }

 private:
  // Computes s_t, its normaliser, and V of the next iteration. The last iteration computes v instead and keeps V,
  // because the pass that writes the coupling needs the V that the last iteration scored with.
  CAPSFAST_DEVICE void make_output(int64_t t, const UpdateCoord& at) const {
    const bool last = t + 1 == iterations, unweighted = pass(t).unweighted;
    const bool valid = in.out_mask.at(at.b, at.j), follows = in.softmax_in && !unweighted;
    const Global<T> s_t = s.from((t * in.B * in.J + at.row) * in.D, in.D);
    const ColumnNorm<T> column = norm_of_sums<T>(in, parts, at, valid, unweighted, follows);
    if (at.slice == 0 && at.lane == 0 && in.softmax_in) {
      norm_of(0, t)[at.row] = column.max;
      norm_of(1, t)[at.row] = column.scale;
    }
    T n = T(0);
    for_sums<T>(in, in.D, parts, at, follows, column.max, [&](int64_t d, double sum) {
      const T x = static_cast<T>(in.softmax_in || unweighted ? sum * static_cast<double>(column.scale) : sum);
      s_t[d] = x;
      const T biased = squash.biased(x, at.j, d);
      n += biased * biased;
    });
    const T f = squash.factor(last, lane_sum(n, UpdateCoord::kLanes));
    at.for_components(in.D, [&](int64_t d) {
      const T out = valid ? f * squash.biased(static_cast<T>(s_t[d]), at.j, d) : T(0);
      if (last) {
        v.template write<T>(at.row * in.D + d, out);
      } else {
        T& to = V[order.at(at.b, at.j, d)];
        to = t == 0 || !squash.accumulate ? out : to + out;
      }
    });
  }

  CAPSFAST_HOST_DEVICE Global<T> norm_of(int64_t which, int64_t t) const {
    return norm.from((which * iterations + t) * in.B * in.J, in.B * in.J);
  }
};

template <class T>
struct BackwardSteps {
  static constexpr bool routing = true, backward = true;
  static constexpr int64_t begin = -1;
  Inputs in;
  BiasedSquashing squash;
  int64_t start, iterations;    // iterations [start, iterations) have gradients
  Operand dv;                   // [B, J, D]
  Operand coupling, dcoupling;  // [B, I, J]
  Global<const T> s;            // [r, B, J, D], without bias
  VectorOrder order;            // of V and ds
  Global<T> V, ds;              // [r, B, J, D]; iteration t scored with V of iteration t
  Global<T> G;                  // [B, J, D], the gradient of v so far
  Normaliser<T> columns;        // [r, B, J], softmax over the input capsules
  Global<T> mean;               // [r, B, J], the memory of columns.mean, which the updates write
  Parts<T> parts;

  CAPSFAST_HOST_DEVICE Scoring<T> scoring(int64_t t) const {
    Scoring<T> with;
    const int64_t size = order.size(in.B);
    if (t > 0) with.V = V.from(t * size, size);
    with.ds = ds.from(t * size, size);
    if (t + 1 == iterations) with.dcoupling = dcoupling;
    return with;
  }

  // One pass for each iteration from the last down to the second, or none for gradient="last".
  CAPSFAST_HOST_DEVICE int64_t passes() const { return iterations - 1 - start; }
  CAPSFAST_HOST_DEVICE int64_t iteration_of(int64_t n) const { return iterations - 1 - n; }

  CAPSFAST_HOST_DEVICE AccumulateArgs<T> pass(int64_t n) const {
    const int64_t t = iteration_of(n);
    AccumulateArgs<T> args{};
    args.in = in;
    args.scoring = scoring(t);
    args.to = parts;
    if (in.softmax_in) args.norm = columns.of(t, in.B * in.J);
    return args;
  }
  CAPSFAST_HOST_DEVICE int64_t row_norm(int64_t n) const { return iteration_of(n); }

  CAPSFAST_HOST_DEVICE bool updates(int64_t) const { return true; }
  // Differentiates the squash of the iteration before iteration_of(n).
  CAPSFAST_DEVICE void after(int64_t n) const {
    const int64_t t = iteration_of(n) - 1;
    for_outputs(in, [&](const UpdateCoord& at) {
      if (n < 0) restore(at);
      differentiate(t, at);
    });
  }

 private:
  // s of an output capsule in iteration t.
  CAPSFAST_DEVICE Global<const T> saved(int64_t t, const UpdateCoord& at) const {
    return s.from((t * in.B * in.J + at.row) * in.D, in.D);
  }
  CAPSFAST_DEVICE int64_t element(int64_t t, const UpdateCoord& at, int64_t d) const {
    return t * order.size(in.B) + order.at(at.b, at.j, d);
  }

  // Computes V from the saved s.
  CAPSFAST_DEVICE void restore(const UpdateCoord& at) const {
    const bool valid = in.out_mask.at(at.b, at.j);
    at.for_components(in.D, [&](int64_t d) { V[element(0, at, d)] = T(0); });
    for (int64_t t = 0; t + 1 < iterations; ++t) {
      const Global<const T> s_t = saved(t, at);
      T n = T(0);
      at.for_components(in.D, [&](int64_t d) {
        const T x = squash.biased(static_cast<T>(s_t[d]), at.j, d);
        n += x * x;
      });
      const T f = squash.factor(false, lane_sum(n, UpdateCoord::kLanes));
      at.for_components(in.D, [&](int64_t d) {
        const T v = valid ? f * squash.biased(static_cast<T>(s_t[d]), at.j, d) : T(0);
        V[element(t + 1, at, d)] = squash.accumulate ? V[element(t, at, d)] + v : v;
      });
    }
  }

  // Computes ds_t from the gradient of v_t. In the last iteration this gradient is dv. In other iterations it is the
  // sum of all passes so far, because v_t is part of V of all later iterations; if V does not accumulate, it is the
  // pass of iteration t + 1 alone.
  CAPSFAST_DEVICE void differentiate(int64_t t, const UpdateCoord& at) const {
    const bool last = t + 1 == iterations, valid = in.out_mask.at(at.b, at.j);
    const Global<const T> s_t = saved(t, at);
    const Global<T> g_t = G.from(at.row * in.D, in.D);
    T n = T(0), s_dv = T(0);
    const auto add = [&](int64_t d, T g) {
      g_t[d] = g;
      const T x = squash.biased(static_cast<T>(s_t[d]), at.j, d);
      n += x * x;
      s_dv += x * g;
    };
    if (last) {
      at.for_components(in.D, [&](int64_t d) { add(d, dv.template read<T>(dv.at(at.b, at.j, d))); });
    } else {
      for_sums<T>(in, in.D, parts, at, false, T(0), [&](int64_t d, double sum) {
        const bool alone = t + 2 == iterations || !squash.accumulate;
        add(d, static_cast<T>(alone ? sum : static_cast<double>(g_t[d]) + sum));
      });
    }
    n = lane_sum(n, UpdateCoord::kLanes);
    s_dv = lane_sum(s_dv, UpdateCoord::kLanes);
    const T f = squash.factor(last, n), slope = squash.slope(last, n, s_dv);
    T agreement = T(0);
    at.for_components(in.D, [&](int64_t d) {
      const T x = s_t[d];
      const T ds_t = valid ? f * g_t[d] + slope * squash.biased(x, at.j, d) : T(0);
      ds[element(t, at, d)] = ds_t;
      agreement += ds_t * x;
    });
    if (!in.softmax_in) return;
    // sum_i c dc = ds . s, because dc = votes . ds and s = sum_i c votes. dcoupling adds its own term to dc.
    agreement =
        lane_sum(last ? add_coupling<T>(in, at, coupling, dcoupling, agreement) : agreement, UpdateCoord::kLanes);
    // Votes for a masked output capsule, and so s, may be NaN.
    if (at.slice == 0 && at.lane == 0) mean[t * in.B * in.J + at.row] = valid ? agreement : T(0);
  }
};

// The arguments of a launch with a single update.
template <class Steps>
struct UpdateArgs {
  Steps steps;
  int64_t n;
};

template <class Steps>
CAPSFAST_KERNEL(kThreads, 4)
update_kernel(UpdateArgs<Steps> a) {
  a.steps.after(a.n);
}

}  // namespace capsfast::cuda
