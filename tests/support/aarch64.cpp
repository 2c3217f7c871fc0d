// Runs the kernels of the lanes layout without torch: the passes of a routing. Reads B, I, J, D, K and r as int64, then u,
// weight, V and ds as double, V and ds of every iteration. Writes the numbers of every pass as double, for float and
// double with few lanes and with many. test_aarch64.py compiles it for AArch64 and knows the right numbers.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "cpu/isa.h"
#include "ops/cpu/memory.h"
#include "ops/cpu/kernels.h"
#include "ops/cpu/plan.h"
#include "ops/cpu/scratch.h"

namespace capsfast::portable {
template <class T>
const Kernels<T>& table(bool tiles);
}  // namespace capsfast::portable

namespace {

using namespace capsfast;
using Numbers = std::vector<double>;

struct Given {
  int64_t B, I, J, D, K, iterations;
  Numbers u, weight, V, ds;  // V and ds are [iterations][B][J][D]
};

template <class T>
class Kernel {
 public:
  Kernel(const Kernels<T>& table, const Given& given)
      : table_(table), n(given), u_(n.u.begin(), n.u.end()), weight_(n.weight.begin(), n.weight.end()) {
    constexpr Storage storage = sizeof(T) == 4 ? Storage::f32 : Storage::f64;
    p.B = n.B;
    p.I = n.I;
    p.J = n.J;
    p.D = n.D;
    p.K = n.K;
    p.iterations = n.iterations;
    p.lane = Lane::sample;
    p.dweight = storage;
    p.u = View{u_.data(), storage, {n.I * n.K, n.K, 1}};
    p.weight = View{weight_.data(), storage, {n.J * n.D * n.K, n.D * n.K, n.K, 1}};
    plan = make_plan(p, table_.L, 1, sizeof(T));
  }

  // The sums of the last iteration: of votes, weighted, and for the gradient of V; then du and dweight.
  void run() {
    const Buffer<T> V = in_lanes(n.V), ds = in_lanes(n.ds);
    const int64_t pitch = plan.tiles * n.J * n.D * plan.L, last = (n.iterations - 1) * pitch;
    for (int way = 0; way < 3; ++way) {
      const Sums<T> sums(pitch);
      sums.clear();
      AccumulatePass<T> pass;
      pass.problem = &p;
      pass.plan = &plan;
      pass.first = sums.sum();
      pass.unweighted = way == 0;
      if (!pass.unweighted) pass.score.linear = V.get() + last;
      if (way == 2) pass.gradient.linear = ds.get() + last;
      const Buffer<T> scratch(LanesAccumulateScratch<T>(p, plan, nullptr).size);
      table_.lanes_accumulate(pass, {0, plan.tiles, 0, n.I}, scratch.get());
      for (int64_t m = 0; m < n.B * n.J * n.D; ++m) write(sums.total(lane_of(m)));
    }
    const int64_t poses = n.B * n.I * n.K, weights = n.I * n.J * n.D * n.K;
    Buffer<T> du(poses), dweight(weights);
    GradientPass<T> pass;
    pass.problem = &p;
    pass.plan = &plan;
    pass.score.linear = V.get();
    pass.gradient.linear = ds.get();
    pass.du = p.u;
    pass.du.data = du.get();
    pass.dweight = p.weight;
    pass.dweight.data = dweight.get();
    const Buffer<T> scratch(LanesGradientScratch<T>(p, plan, n.iterations, nullptr).size);
    table_.lanes_gradient(pass, {0, plan.tiles, 0, n.I}, scratch.get());
    for (int64_t m = 0; m < poses; ++m) write(du.get()[m]);
    for (int64_t m = 0; m < weights; ++m) write(dweight.get()[m]);
  }

 private:
  static void write(double number) { std::fwrite(&number, sizeof(number), 1, stdout); }

  // Where element m of [B][J][D] stands in [tiles][J D][L].
  int64_t lane_of(int64_t m) const {
    const int64_t JD = n.J * n.D, b = m / JD, L = plan.L;
    return (b / L * JD + m % JD) * L + b % L;
  }

  Buffer<T> in_lanes(const Numbers& numbers) const {
    const int64_t pitch = plan.tiles * n.J * n.D * plan.L, size = n.B * n.J * n.D;
    Buffer<T> lanes(n.iterations * pitch);
    std::fill_n(lanes.get(), n.iterations * pitch, T(0));
    for (int64_t m = 0; m < n.iterations * size; ++m)
      lanes.get()[m / size * pitch + lane_of(m % size)] = static_cast<T>(numbers[m]);
    return lanes;
  }

  const Kernels<T>& table_;
  const Given& n;
  std::vector<T> u_, weight_;
  Problem p;
  Plan plan;
};

Numbers read(int64_t count) {
  Numbers numbers(static_cast<size_t>(count));
  if (std::fread(numbers.data(), sizeof(double), numbers.size(), stdin) != numbers.size()) std::abort();
  return numbers;
}

}  // namespace

int main() {
  int64_t sizes[6];
  if (std::fread(sizes, sizeof(int64_t), 6, stdin) != 6) return 1;
  Given given{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], {}, {}, {}, {}};
  const int64_t rows = given.I * given.J * given.D, steps = given.iterations * given.B * given.J * given.D;
  given.u = read(given.B * given.I * given.K);
  given.weight = read(rows * given.K);
  given.V = read(steps);
  given.ds = read(steps);
  for (const bool tiles : {false, true}) {
    Kernel<float>(portable::table<float>(tiles), given).run();
    Kernel<double>(portable::table<double>(tiles), given).run();
  }
}
