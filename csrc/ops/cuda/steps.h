// The sequence of passes and steps of a forward and of a backward. The host uses it to launch a kernel for each, and
// the rows kernels to run all of them in one launch. pass(n) has the arguments of accumulating pass n, 0 <= n <
// passes(). after(n) is what all threads of the grid do after pass n. In the backward after(-1) comes before the first
// pass.
#pragma once

#include "../../math/host_device.h"
#include "update.h"

namespace capsfast::cuda {

template <class T>
struct ForwardSteps {
  Inputs in;
  Squashing squash;
  int64_t iterations;
  Operand coupling, v;  // written: [B, I, J], [B, J, D]
  VectorOrder order;    // of V
  Global<T> V;          // [B, J, D], the sum of the outputs so far
  Global<T> s;          // [r, B, J, D]
  Global<T> norm;       // [2, r, B, J], softmax over the input capsules
  Parts<T> parts;

  // With the softmax over the input capsules the normaliser is known only after a pass. So writing the last coupling
  // takes one more pass.
  CAPSFAST_HOST_DEVICE int64_t passes() const { return iterations + (coupling.data && in.softmax_in); }

  CAPSFAST_HOST_DEVICE AccumulateArgs<T> pass(int64_t t) const {
    if (t == iterations) return coupling_pass();
    AccumulateArgs<T> args{};
    args.in = in;
    if (t > 0) args.scoring.V = V;
    if (t + 1 == iterations && !in.softmax_in) args.coupling = coupling;
    args.unweighted = t == 0 && !in.logits.data && !args.coupling.data && !(in.softmax_in && in.mask.data);
    args.sum = parts.sum;
    args.sum_rows = parts.sum_rows;
    if (in.softmax_in && !args.unweighted) {
      args.max = parts.max;
      args.total = parts.total;
    }
    return args;
  }

  // The step that computes s_t, v_t and V_t from the sums of pass t.
  CAPSFAST_HOST_DEVICE OutputArgs<T> output(int64_t t) const {
    OutputArgs<T> args{};
    args.in = in;
    args.squash = squash.of(t + 1 == iterations);
    args.parts = parts;
    args.unweighted = pass(t).unweighted;
    args.first = t == 0;
    args.s = s.from(t * vectors(), vectors());
    args.order = order;
    if (in.softmax_in) {
      args.max = norm_of(0, t);
      args.scale = norm_of(1, t);
    }
    // The last iteration leaves V as it is: nobody needs its V_t, and the coupling pass needs the V it scored with.
    if (t + 1 < iterations) {
      args.V = V;
    } else {
      args.v = v;
    }
    return args;
  }

  CAPSFAST_DEVICE void after(int64_t t) const {
    if (t < iterations) make_outputs(output(t));
  }

 private:
  CAPSFAST_HOST_DEVICE AccumulateArgs<T> coupling_pass() const {
    const int64_t last = iterations - 1;
    AccumulateArgs<T> args{};
    args.in = in;
    if (last > 0) args.scoring.V = V;
    args.norm = {norm_of(0, last), norm_of(1, last), {}};
    args.coupling = coupling;
    return args;
  }
  CAPSFAST_HOST_DEVICE int64_t vectors() const { return in.B * in.J * in.D; }
  CAPSFAST_HOST_DEVICE Global<T> norm_of(int64_t which, int64_t t) const {
    return norm.from((which * iterations + t) * in.B * in.J, in.B * in.J);
  }
};

template <class T>
struct BackwardSteps {
  Inputs in;
  Squashing squash;
  int64_t first, iterations;    // iterations [first, iterations) have gradients
  Operand dv;                   // [B, J, D]
  Operand coupling, dcoupling;  // [B, I, J]
  Global<const T> s;            // [r, B, J, D]
  VectorOrder order;            // of V and ds
  Global<T> V, ds;              // [r, B, J, D]
  Global<T> G;                  // [B, J, D], the gradient of v so far
  Normaliser<T> columns;        // [r, B, J], softmax over the input capsules
  Global<T> mean;               // [r, B, J], the memory of columns.mean, which the steps write
  Parts<T> parts;

  CAPSFAST_HOST_DEVICE RestoreArgs<T> restore() const { return {in, squash, iterations, order, s, V}; }

  CAPSFAST_HOST_DEVICE Scoring<T> scoring(int64_t t) const {
    Scoring<T> with;
    const int64_t size = order.size(in.B);
    if (t > 0) with.V = V.from(t * size, size);
    with.ds = ds.from(t * size, size);
    if (t + 1 == iterations) with.dcoupling = dcoupling;
    return with;
  }

  // One for each iteration from the last down to the second, or none for gradient="last".
  CAPSFAST_HOST_DEVICE int64_t passes() const { return iterations - 1 - first; }
  CAPSFAST_HOST_DEVICE int64_t iteration_of(int64_t n) const { return iterations - 1 - n; }

  CAPSFAST_HOST_DEVICE AccumulateArgs<T> pass(int64_t n) const {
    const int64_t t = iteration_of(n);
    AccumulateArgs<T> args{};
    args.in = in;
    args.scoring = scoring(t);
    args.sum = parts.sum;
    args.sum_rows = parts.sum_rows;
    const int64_t count = in.B * in.J;
    if (in.softmax_in)
      args.norm = {columns.max.from(t * count, count), columns.scale.from(t * count, count),
                   columns.mean.from(t * count, count)};
    return args;
  }

  // The step that computes ds_t: from dv in the last iteration, else from the sums of all passes so far, down to that
  // of iteration t + 1.
  CAPSFAST_HOST_DEVICE DifferentiateArgs<T> differentiate(int64_t t) const {
    DifferentiateArgs<T> args{};
    args.in = in;
    args.squash = squash.of(t + 1 == iterations);
    if (t + 1 == iterations) {
      args.dv = dv;
      args.coupling = coupling;
      args.dcoupling = dcoupling;
    }
    args.parts = parts;
    args.first = t + 2 == iterations;
    args.G = G;
    args.s = s.from(t * vectors(), vectors());
    args.order = order;
    args.ds = ds.from(t * order.size(in.B), order.size(in.B));
    if (in.softmax_in) args.mean = mean.from(t * in.B * in.J, in.B * in.J);
    return args;
  }

  CAPSFAST_DEVICE void after(int64_t n) const {
    if (n < 0) cuda::restore(restore());
    cuda::differentiate(differentiate(iteration_of(n) - 1));
  }

 private:
  CAPSFAST_HOST_DEVICE int64_t vectors() const { return in.B * in.J * in.D; }
};

}  // namespace capsfast::cuda
