// Registers the ops through the LibTorch stable ABI. A pybind11 module has what is not a tensor op: build information,
// and how the kernels cut a call.

#include <torch/csrc/stable/library.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "cpu/isa.h"
#include "cpu/parallel.h"
#include "ops/cpu/engine.h"
#include "ops/cpu/plan.h"
#include "ops/cuda/engine.h"
#include "ops/dynamic_routing.h"
#include "ops/routing_pass.h"
#include "plans/serve.h"
#include "python.h"

#if CAPSFAST_CUDA
#include "capsfast_sources.h"  // setup.py writes it
#endif

// Defined when the library is loaded, not by Python, so that a process without Python finds the ops.
static constexpr const char* kSchemas[] = {
#include "../capsfast/ops/schemas.inc"
};

STABLE_TORCH_LIBRARY_FRAGMENT(capsfast, m) {
  for (const char* schema : kSchemas) m.def(schema);
}

STABLE_TORCH_LIBRARY_IMPL(capsfast, CPU, m) {
  capsfast::register_dynamic_routing<capsfast::CpuEngine>(m);
  capsfast::register_routing_pass<capsfast::CpuEngine>(m);
  capsfast::register_dynamic_routing<capsfast::FactoredEngine>(m, "factored_routing");
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
#if defined(__clang__)
  info["compiler"] = std::string("clang ") + __clang_version__;
#else
  info["compiler"] = std::string("g++ ") + __VERSION__;
#endif
  info["torch_target"] = CAPSFAST_TORCH_TARGET;
#if CAPSFAST_CUDA
  info["cuda"] = CAPSFAST_CUDA_VERSION;                      // version of the toolkit
  info["cuda_architectures"] = CAPSFAST_CUDA_ARCHITECTURES;  // such as "8.0 9.0+PTX"
  info["cuda_sources"] = CAPSFAST_CUDA_SOURCES;              // see capsfast/bench/ran.py
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
  const int64_t threads = region_threads();
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

py::dict launch_plan(int64_t B, int64_t I, int64_t J, int64_t D, int64_t K, bool votes_given, int64_t itemsize,
                     bool shared_weight, int64_t threads, bool moments) {
  Problem p;
  p.B = B, p.I = I, p.J = J, p.D = D, p.K = votes_given ? 1 : K;
  p.votes_given = votes_given;
  p.shared_weight = shared_weight;
  p.dweight = itemsize == 8 ? Storage::f64 : itemsize == 4 ? Storage::f32 : Storage::bf16;
  p.weight = View{nullptr, p.dweight, {shared_weight ? 0 : J * D * K, D * K, K, 1}};
  p.votes = View{nullptr, p.dweight, {I * J * D, J * D, D, 1}};
  p.iterations = moments ? 1 : 3;
  p.moments = moments;
  if (threads == 0) threads = num_threads();
  const CallPlan call = itemsize == 8 ? plan_of_call<double>(p, threads) : plan_of_call<float>(p, threads);
  const Plan& plan = call.plan;
  py::dict d;
  d["small_batch"] = call.small_batch;
  d["parts"] = call.parts;
  d["layout"] = call.lane == Lane::capsule ? "capsules" : plan.lanes ? "lanes" : "rows";
  d["lanes"] = plan.L;
  d["tiles"] = plan.tiles;
  d["out_tile"] = plan.out_tile;
  d["splits"] = plan.splits;
  d["weight_in_place"] = plan.lanes && plan.weight_in_place;
  return d;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Compiled kernels of capsfast: build information and launch plans.";
  m.def("build_info", &build_info, "Compiler, the torch ABI it was built for, instruction sets built and chosen.");
  m.def("peak_flops", &peak_flops, "Measured float32 multiply-adds on registers, as FLOP per second of all threads.");
  m.def(
      "launch_plan", &launch_plan, py::arg("B"), py::arg("I"), py::arg("J"), py::arg("D"), py::arg("K") = 1,
      py::arg("votes_given") = false, py::arg("itemsize") = 4, py::arg("shared_weight") = false, py::arg("threads") = 0,
      py::arg("moments") = false,
      "How the CPU kernels cut three iterations of a routing or, with moments, a routing_pass: layout, tiles, splits.");
  plans::define(m);
}
