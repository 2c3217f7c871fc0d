// Registers the ops through the LibTorch stable ABI. A pybind11 module has what is not a tensor op: build information
// and launch plans.

// Python's own declarations, but weak: the library then loads into a process that has the ops and no Python.
#define PyAPI_FUNC(type) __attribute__((weak, visibility("default"))) type
#define PyAPI_DATA(type) extern __attribute__((weak, visibility("default"))) type
#include <pybind11/pybind11.h>
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "cpu/isa.h"
#include "cpu/parallel.h"
#include "ops/cpu/context.h"
#include "ops/cpu/engine.h"
#include "ops/cpu/plan.h"
#include "ops/cpu/scratch.h"
#include "ops/cuda/engine.h"
#include "ops/dynamic_routing.h"
#include "ops/routing_pass.h"
#include "ops/factored_routing.h"

namespace {

// Defined when the library is loaded, not by Python, so that a process without Python finds the ops.
constexpr const char* kSchemas[] = {
#include "../capsfast/ops/schemas.inc"
};

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(capsfast, m) {
  for (const char* schema : kSchemas) m.def(schema);
}

STABLE_TORCH_LIBRARY_IMPL(capsfast, CPU, m) {
  capsfast::register_dynamic_routing<capsfast::CpuEngine>(m);
  capsfast::register_routing_pass<capsfast::CpuEngine>(m);
  capsfast::register_factored_routing(m);
}

#if CAPSFAST_CUDA
STABLE_TORCH_LIBRARY_IMPL(capsfast, CUDA, m) {
  capsfast::register_dynamic_routing<capsfast::cuda::Engine>(m);
  capsfast::register_routing_pass<capsfast::cuda::Engine>(m);
}
#endif

namespace {

namespace py = pybind11;
using namespace capsfast;

py::dict build_info() {
  py::dict info;
  info["version"] = CAPSFAST_VERSION;
  py::list schemas;
  for (const char* schema : kSchemas) schemas.append(schema);
  info["schemas"] = py::tuple(schemas);
  info["built_beside_torch"] = CAPSFAST_BUILD_TORCH;
#if defined(__x86_64__)
  info["architecture"] = "x86_64";
#elif defined(__aarch64__)
  info["architecture"] = "aarch64";
#else
  info["architecture"] = "other";
#endif
#if defined(__clang__)
  info["compiler"] = std::string("clang ") + __clang_version__;
#else
  info["compiler"] = std::string("g++ ") + __VERSION__;
#endif
  info["torch_target"] = CAPSFAST_TORCH_TARGET;
#if CAPSFAST_CUDA
  info["cuda"] = CAPSFAST_CUDA_VERSION;                      // version of the toolkit
  info["cuda_architectures"] = CAPSFAST_CUDA_ARCHITECTURES;  // such as "8.0 9.0+PTX"
#else
  info["cuda"] = "";
  info["cuda_architectures"] = "";
#endif
  py::list available;
  for (const Isa which : {Isa::portable, Isa::avx2, Isa::avx512}) {
    if (CAPSFAST_X86 || which == Isa::portable) available.append(isa_name(which));
  }
  info["instruction_sets"] = available;
  info["instruction_set"] = isa_name(isa());
  return info;
}

// FLOP per second of float32 multiply-adds on registers, all threads at once. No kernel can be faster.
double peak_flops() {
  const Kernels<float>& table = kernels<float>(isa());
  constexpr int64_t kRounds = 4'000'000;
  const int64_t threads = num_threads();
  std::vector<float> results(static_cast<size_t>(threads));  // kept, or the loops would be optimised away
  const auto run = [&] {
    torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) results[static_cast<size_t>(n)] = table.multiply_adds(kRounds);
    });
  };
  run();
  const auto start = std::chrono::steady_clock::now();
  run();
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return 2.0 * 12 * double(table.L) * double(kRounds) * double(threads) / seconds;
}

// How p is routed if sums are formed in T. `positions`: of the first slice, if votes have positions.
template <class T>
py::dict plan_of(Problem p, int64_t positions, int64_t threads, bool gather_rows) {
  constexpr int64_t size = sizeof(T);
  const int64_t registers = kernels<T>(isa()).L, tile = kernels<T>(isa(), true).L;
  if (positions > 0) {
    p.positions = positions;
    p.B = std::min(make_slices(p, tile, threads, size, false).samples, positions);
    p.positions = -1;
    p.votes_given = p.side_by_side = true;
    p.K = 1;
  }
  // The samples that fill whole tiles; the rest is a small batch.
  const int64_t filled = samples_in_tiles(p, registers, size);
  Problem rest = p;
  rest.B = filled > 0 ? p.B - filled : 0;
  p.B -= rest.B;
  p.tiled = filled > 0;
  const Kernels<T>& table = driver::kernels_for<T>(p, threads);
  const Plan whole = make_plan(p, table.L, threads, size);
  // A small batch makes its votes first; a second problem, with these votes given, routes them.
  Problem routed = p;
  if (whole.small_batch) {
    routed.votes_given = routed.side_by_side = routed.capsule_lanes = true;
    routed.K = 1;
  }
  const Slices slices =
      p.votes_given && !p.side_by_side ? make_slices(routed, table.L, threads, size, false) : Slices{};
  // If the batch is cut into slices, each task routes whole slices alone: a few samples, planned for one thread.
  const int64_t tasks = std::max<int64_t>(1, slices.tasks), members = slices.tasks > 0 ? 1 : threads;
  if (slices.tasks > 0) routed.B = slices.samples;
  Plan plan = make_plan(routed, table.L, members, size);
  plan.gather_rows = gather_rows && plan.lanes;
  // Each thread has its own scratch memory, and its own arrays for a slice.
  const int64_t accumulate = driver::accumulate_scratch<T>(routed, plan),
                gradient = driver::gradient_scratch<T>(routed, plan, p.iterations),
                vectors = driver::Layout(routed, plan).vectors(), sums = 2 * plan.splits * vectors;
  const Problem& small = whole.small_batch ? p : rest;
  const int64_t blocks = (p.I + registers - 1) / registers * registers,
                kept = std::min(small.B, samples_kept(small, registers, size)) * blocks * p.J * p.D;
  const int64_t votes_kept = whole.small_batch || rest.B > 0 ? kept : 0;
  const auto bytes = [&](int64_t scratch, int64_t arrays) {
    return size * (std::min(tasks, threads) * (members * scratch + arrays) + votes_kept);
  };
  const auto flops = [&](double (*count)(const Problem&, const Plan&)) {
    return count(p, whole) + (rest.B == 0 ? 0 : count(rest, make_plan(rest, registers, threads, size)));
  };
  py::dict d;
  d["layout"] = whole.small_batch ? "capsules" : plan.lanes ? "lanes" : "rows";
  d["votes_kept"] = whole.small_batch;
  d["small_batch"] = whole.small_batch ? p.B : rest.B;
  d["instruction_set"] = isa_name(table.L < registers ? Isa::avx2 : isa());
  d["lanes"] = plan.L;
  d["tiles"] = plan.tiles;
  d["pass_parts"] = whole.small_batch ? 1 : make_parts(p, tile, threads, size).count;
  d["out_tile"] = plan.out_tile;
  d["tasks"] = tasks * plan.tile_groups * plan.splits;
  d["splits"] = plan.splits;
  d["weight_in_place"] = plan.lanes && plan.weight_in_place;
  d["forward_scratch_bytes"] = bytes(accumulate, vectors + sums);
  d["backward_scratch_bytes"] = bytes(std::max(accumulate, gradient), 2 * p.iterations * vectors + sums);
  d["forward_flops"] = flops(forward_flops);
  d["backward_flops"] = flops(backward_flops);
  return d;
}

// The plan the CPU kernels choose for a shape, without logits and with contiguous storage.
py::dict launch_plan(int64_t B, int64_t I, int64_t J, int64_t D, int64_t K, int64_t num_iterations, bool votes_given,
                     int64_t itemsize, bool shared_weight, int64_t threads, int64_t positions) {
  Problem p;
  p.B = B, p.I = I, p.J = J, p.D = D, p.K = votes_given ? 1 : K;
  p.iterations = num_iterations;
  p.votes_given = votes_given;
  p.shared_weight = shared_weight;
  p.dweight = itemsize == 8 ? Storage::f64 : itemsize == 4 ? Storage::f32 : Storage::bf16;
  p.weight.stride[0] = shared_weight ? 0 : J * D * K;
  const int64_t used = threads > 0 ? threads : num_threads();
  py::dict d =
      itemsize == 8 ? plan_of<double>(p, positions, used, false) : plan_of<float>(p, positions, used, itemsize < 4);
  const double votes = double(B) * double(I) * double(J) * double(D),
               made = double(B) * double(I) * double(K) + (shared_weight ? 1 : double(I)) * double(J * D * K);
  d["bytes"] = double(itemsize) * ((votes_given ? votes : made) + double(B) * double(J) * double(D));
  return d;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Compiled kernels of capsfast: build information and launch plans.";
  m.def("build_info", &build_info, "Compiler, the torch ABI it was built for, instruction sets built and chosen.");
  m.def("peak_flops", &peak_flops, "Measured float32 multiply-adds on registers, as FLOP per second of all threads.");
  m.def("launch_plan", &launch_plan, py::arg("B"), py::arg("I"), py::arg("J"), py::arg("D"), py::arg("K") = 1,
        py::arg("num_iterations") = 3, py::arg("votes_given") = false, py::arg("itemsize") = 4,
        py::arg("shared_weight") = false, py::arg("threads") = 0, py::arg("positions") = 0,
        "How the CPU kernels cut a call: layout, tiles, tasks, scratch bytes, FLOPs, bytes that must move.");
}
