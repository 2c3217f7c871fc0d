// How the votes family cuts a call, and launches it.
#pragma once

#include <algorithm>

#include "../../../cuda/context.h"
#include "../choose.h"
#include "kernels.h"

namespace capsfast::cuda::votes {

// A call: its kernels and how they are launched. `serves` is false if no cluster holds a sample; then no other member
// may be used.
class Launcher {
 public:
  Launcher(const Problem& problem, const Inputs& inputs, bool backward, const gpu::Context& context)
      : p(problem),
        in(inputs),
        on(context),
        terms(!backward         ? 0
              : p.gradient_last ? 1
                                : p.iterations),
        kernels(kernels_of(problem)) {
    // The device may refuse a cluster: an instance of a partitioned GPU may be too small, and kernels that were
    // compiled for an older architecture have no clusters.
    for (int64_t most = on.clusters() ? kMostBlocks : 1; most > 0; most = cut.cluster / 2) {
      cut = cut_for(most);
      if (cut.cluster < 2 || max_active_clusters(backward) > 0) break;
    }
  }

  bool serves() const { return cut.cluster > 0; }
  Work work() const { return {p.I, 1, p.B, p.B * cut.cluster}; }

  template <bool kBackward>
  void run(RoutingArgs<kBackward> args) const {
    args.cut = cut;
    const auto launch = [&](auto kernel) {
      gpu::launch(kernel, {p.B * cut.cluster, 1, 1}, cut.threads, static_cast<int>(bytes(cut)), on.stream(), args,
                  {cut.cluster, false});
    };
    if constexpr (kBackward) {
      launch(kernels.backward);
    } else {
      launch(kernels.forward);
    }
  }

 private:
  static constexpr int64_t kMostBlocks = 8;  // of a cluster: every device with clusters allows this many
  static constexpr int kThreads = 256;       // of a block, if a multiprocessor runs two, else twice as many

  static Kernels kernels_of(const Problem& p) {
    switch (p.votes.storage) {
      case Storage::bf16:
        return kernels_for<BFloat16>(p.D);
      case Storage::f16:
        return kernels_for<Float16>(p.D);
      default:
        return kernels_for<float>(p.D);
    }
  }

  int64_t bytes(const Cut& of) const { return kernels.shared_bytes(in, of, terms); }

  // The smallest cluster of which a multiprocessor holds two blocks, so that one computes while the other waits for its
  // votes. If there is none, the smallest that fits. Larger if multiprocessors would be idle, as long as a thread has
  // more than one row.
  Cut cut_for(int64_t most) const {
    Cut chosen{};
    for (int64_t cluster = 1; cluster <= std::min(most, p.I); cluster *= 2) {
      const int64_t capsules = divide_up(p.I, cluster);
      if (capsules * p.J * p.D * element_bytes(p.votes.storage) > on.shared_bytes()) continue;
      Cut cut{static_cast<int>(cluster), static_cast<int>(capsules), threads_for(capsules, kThreads), whole_pieces()};
      if (bytes(cut) > on.shared_bytes()) continue;
      const bool twice = 2 * (bytes(cut) + 1024) <= on.shared_bytes_together();
      const bool idle =
          2 * p.B * cluster <= on.multiprocessors() && 32 * capsules > cut.threads * kernels.rows_of_warp(in);
      Cut more = cut;
      more.threads = threads_for(capsules, 2 * kThreads);
      if ((!twice || idle) && bytes(more) <= on.shared_bytes()) cut = more;
      if (chosen.cluster == 0 || twice || idle) chosen = cut;
      if (twice && !idle) break;
    }
    return chosen;
  }

  // Whole warps, as many as have input capsules.
  int threads_for(int64_t capsules, int most) const {
    return static_cast<int>(std::min<int64_t>(32 * divide_up(capsules, kernels.rows_of_warp(in)), most));
  }

  bool whole_pieces() const {
    const int64_t size = element_bytes(p.votes.storage), *stride = p.votes.stride;
    // The stride of an axis of length 1 has no meaning.
    const auto is = [](int64_t length, int64_t at, int64_t wanted) { return length == 1 || at == wanted; };
    const auto whole = [&](int64_t length, int64_t at) { return length == 1 || at * size % 16 == 0; };
    return is(p.D, stride[3], 1) && is(p.J, stride[2], p.D) && whole(p.I, stride[1]) && whole(p.B, stride[0]) &&
           reinterpret_cast<uintptr_t>(p.votes.data) % 16 == 0;
  }

  int64_t max_active_clusters(bool backward) const {
    const int size = static_cast<int>(bytes(cut));
    return backward ? gpu::max_active_clusters(kernels.backward, cut.cluster, cut.threads, size)
                    : gpu::max_active_clusters(kernels.forward, cut.cluster, cut.threads, size);
  }

  const Problem& p;
  const Inputs& in;
  const gpu::Context& on;
  const int64_t terms;  // iterations that have gradients
  const Kernels kernels;
  Cut cut{};
};

}  // namespace capsfast::cuda::votes
