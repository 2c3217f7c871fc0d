// How the rows family cuts a call, with the reason beside each number, and launches it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../../../cuda/context.h"
#include "kernels.h"

namespace capsfast::cuda::rows {

struct Size {
  // Most strips of a block in an accumulating pass: a weight is read once for all of them.
  static constexpr int strips = 8;
  // Most partial sums of dweight, each as large as the weight, if there are chunks of input capsules for all blocks.
  static constexpr int parts = 4;
  // Input capsules of a warp between two barriers, if all warps share the input capsules.
  static constexpr int chunk = 4;
};

// How the accumulating passes of a forward or of a backward are launched.
struct AccumulatePlan {
  Shape shape;
  Work work;
  int cluster;
  bool together;  // the device runs all blocks at the same time
};

struct GradientPlan {
  Shape shape;
  int64_t parts, splits;  // of the samples and of the input capsules
};

class Launcher {
 public:
  Launcher(const Problem& problem, const Inputs& inputs, bool backward, const gpu::Context& context)
      : p(problem),
        in(inputs),
        on(context),
        kernels(choose(problem)),
        accumulating_(backward ? gpu::AnyKernel(std::get<1>(kernels.accumulate)) : std::get<0>(kernels.accumulate)),
        shared_bytes_(
            std::min(gpu::limits().of(accumulating_).shared_bytes, gpu::limits().of(kernels.gradient).shared_bytes)),
        plan_(plan_accumulate()) {}

  VectorOrder order() const { return {p.J, p.D, kernels.tiles}; }
  const AccumulatePlan& plan() const { return plan_; }
  const Work& work() const { return plan_.work; }
  bool together() const { return plan_.together && on.cooperative; }

  // Runs passes [begin, end) of `steps`; see AccumulateArgs. Returns false, without a launch, if `together` and the
  // device refuses.
  template <bool kBackward, class Steps>
  bool accumulate(const Steps& steps, int64_t begin, int64_t end, bool together) const {
    const AccumulateArgs<kBackward> args{steps, plan_.shape, together, static_cast<int>(begin), static_cast<int>(end)};
    const auto kernel = std::get<kBackward>(kernels.accumulate);
    const int bytes = kernels.accumulate_bytes(in, plan_.shape);
    gpu::limits().prefer_shared(kernel, bytes);
    return gpu::try_launch(kernel, {plan_.work.units * plan_.cluster, 1, 1}, plan_.shape.threads(), bytes, on.stream,
                           args, {plan_.cluster, together});
  }

  GradientPlan plan_gradient() const {
    GradientPlan plan{};
    const auto bytes = [&](const Shape& shape) { return kernels.gradient_bytes(in, shape); };
    plan.shape = shape_for(kMostGradientStrips, false, bytes);
    const int64_t blocks = gpu::limits().max_active(kernels.gradient, 0, plan.shape.threads(), bytes(plan.shape));
    const int64_t groups = divide_up(p.B, plan.shape.samples()), chunks = divide_up(p.I, plan.shape.chunk);
    const int64_t units = std::max<int64_t>(blocks * on.multiprocessors, 1);
    // Takes the parts with the fewest rounds of a block; a round is a chunk for a group of samples. More parts of
    // dweight must save a sixteenth of the rounds, because parts are written, read and added up.
    const int64_t most = std::min<int64_t>({groups, chunks < units ? units : Size::parts, units});
    int64_t fewest = INT64_MAX;
    for (int64_t parts = 1; parts <= most; ++parts) {
      const int64_t splits = std::min<int64_t>({chunks, units / parts, 65535});
      const int64_t rounds = divide_up(groups, parts) * divide_up(chunks, splits);
      if (parts > 1 && 16 * rounds > 15 * fewest) continue;
      fewest = rounds;
      plan.parts = parts;
      plan.splits = splits;
    }
    return plan;
  }

  void gradient(const cuda::GradientArgs<float>& with, const GradientPlan& by) const {
    GradientArgs args{with, 0, by.shape, order().size(p.B), static_cast<float>(p.J), 1.0f};
    args.unscale = (kernels.exact ? 1.0f : kOfSingle) / args.scale;
    const int bytes = kernels.gradient_bytes(in, by.shape);
    gpu::limits().prefer_shared(kernels.gradient, bytes);
    gpu::launch(kernels.gradient, {by.parts, by.splits, 1}, by.shape.threads(), bytes, on.stream, args);
  }

 private:
  // How a block cuts its work: the largest shape that fits shared memory. most: strips at most. deep: a warp may have
  // several input capsules of a chunk. bytes: memory that a shape needs.
  template <class Bytes>
  Shape shape_for(int most, bool deep, const Bytes& bytes) const {
    const int64_t strips = divide_up(p.B, kSamples), size = element_bytes(p.u.storage);
    const auto whole = [&](int64_t elements) { return elements * size % 16 == 0; };
    const auto starts = [](const void* data, int64_t bytes) { return reinterpret_cast<uintptr_t>(data) % bytes == 0; };
    Shape shape{};
    shape.stages = 2;
    shape.weight_in_pieces = whole(p.K) && whole(p.weight.stride[0]) && starts(p.weight.data, 16);
    const int64_t* u = p.u.stride;
    const int64_t loaded = kernels.loaded_poses;
    shape.poses_in_pieces =
        u[2] == 1 && p.K % loaded == 0 && u[0] % loaded == 0 && u[1] % loaded == 0 && starts(p.u.data, loaded * size) &&
        (p.B * u[0] + p.I * u[1] + p.K) * size <= UINT32_MAX;  // Poses has offsets of 32 bits
    for (int warps = kMostWarps; warps > 0; warps /= 2) {
      for (int wide = std::min(most, warps); wide > 0; wide /= 2) {
        // Strips beyond the batch cost as much as others, so at most an eighth of the strips may lie there.
        if (wide > 1 && 8 * wide * divide_up(strips, wide) > 9 * strips) continue;
        shape.strips_log = log_of(wide);
        shape.streams = warps / wide;
        shape.chunk = deep && shape.streams == 1 ? Size::chunk : shape.streams;
        const int needed = bytes(shape);
        if (needed > shared_bytes_) continue;
        // Use a third stage if it costs nothing: the join of the sums takes its memory anyway.
        Shape deeper = shape;
        deeper.stages = 3;
        return deep && bytes(deeper) <= needed ? deeper : shape;
      }
    }
    return shape;
  }

  AccumulatePlan plan_accumulate() const {
    AccumulatePlan plan{};
    const auto bytes = [&](const Shape& shape) { return kernels.accumulate_bytes(in, shape); };
    plan.shape = shape_for(Size::strips, true, bytes);
    const int64_t groups = divide_up(p.B, plan.shape.samples()), pairs = groups * p.I;
    const auto most = [&](int cluster) {
      const int threads = plan.shape.threads();
      return gpu::limits().max_active(accumulating_, cluster > 1 ? cluster : 0, threads, bytes(plan.shape)) *
             (cluster > 1 ? 1 : on.multiprocessors);
    };
    // Blocks of a cluster share the input capsules of a unit, so there must be enough input capsules.
    const bool enough = pairs >= kMostCluster * std::max(2, plan.shape.streams) * on.multiprocessors;
    plan.cluster = on.clusters && enough ? kMostCluster : 1;
    int64_t units = most(plan.cluster);
    // An instance of a partitioned GPU may be too small for a cluster, and PTX of an older architecture has no
    // clusters.
    if (plan.cluster > 1 && units * plan.cluster * 8 < on.multiprocessors * 7) {
      plan.cluster = 1;
      units = most(1);
    }
    plan.together = units > 0;
    plan.work = {p.I, plan.shape.samples(), groups, std::clamp<int64_t>(units, 1, pairs)};
    return plan;
  }

  const Problem& p;
  const Inputs& in;
  const gpu::Context& on;
  const Kernels kernels;
  const gpu::AnyKernel accumulating_;
  const int shared_bytes_;  // that a block may ask for
  const AccumulatePlan plan_;
};

}  // namespace capsfast::cuda::rows
