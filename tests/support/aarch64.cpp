// Runs the kernels of the lanes layout without torch: the passes of a routing, against plain loops in double. Prints a
// line for each case; the exit status says whether all are right. test_aarch64.py compiles it for AArch64.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <vector>

#include "cpu/isa.h"
#include "ops/cpu/memory.h"
#include "ops/cpu/passes.h"
#include "ops/cpu/plan.h"
#include "ops/cpu/scratch.h"

namespace capsfast::portable {
template <class T>
const Kernels<T>& table(bool tiles);
}  // namespace capsfast::portable

namespace {

using namespace capsfast;
using Numbers = std::vector<double>;
constexpr int64_t kIterations = 3;

struct Sizes {
  int64_t B, I, J, D, K;
};

Numbers drawn(int64_t count, double scale) {
  static uint32_t state = 1;
  Numbers numbers(static_cast<size_t>(count));
  for (double& number : numbers) {
    state = state * 1664525 + 1013904223;
    // As float, so that both types have the same inputs.
    number = static_cast<float>(scale * (state / 4294967296.0 - 0.5));
  }
  return numbers;
}

double dot(const double* a, const double* b, int64_t size) {
  double total = 0;
  for (int64_t n = 0; n < size; ++n) total += a[n] * b[n];
  return total;
}

// V and ds are [iterations][B][J][D]; V of the first iteration is not used.
struct Definition {
  Sizes n;
  Numbers u, weight, V, ds;
  Numbers unweighted, forward, backward, du, dweight;  // the sums of the last iteration

  explicit Definition(const Sizes& sizes)
      : n(sizes),
        u(drawn(n.B * n.I * n.K, 1)),
        weight(drawn(n.I * n.J * n.D * n.K, 1)),
        V(drawn(kIterations * n.B * n.J * n.D, 1)),
        ds(drawn(kIterations * n.B * n.J * n.D, 1)) {
    const int64_t JD = n.J * n.D;
    for (Numbers* sums : {&unweighted, &forward, &backward}) sums->assign(n.B * JD, 0);
    du.assign(u.size(), 0);
    dweight.assign(weight.size(), 0);
    Numbers x(JD), dx(JD), c(n.J), db(n.J);
    for (int64_t b = 0; b < n.B; ++b) {
      for (int64_t i = 0; i < n.I; ++i) {
        const double *pose = &u[(b * n.I + i) * n.K], *rows = &weight[i * JD * n.K];
        for (int64_t row = 0; row < JD; ++row) x[row] = dot(rows + row * n.K, pose, n.K);
        std::fill(dx.begin(), dx.end(), 0);
        for (int64_t t = 0; t < kIterations; ++t) {
          const double *V_t = &V[(t * n.B + b) * JD], *ds_t = &ds[(t * n.B + b) * JD];
          double norm = 0, mean = 0;
          for (int64_t j = 0; j < n.J; ++j) norm += c[j] = t == 0 ? 1 : std::exp(dot(&x[j * n.D], V_t + j * n.D, n.D));
          for (int64_t j = 0; j < n.J; ++j) mean += (c[j] /= norm) * (db[j] = dot(&x[j * n.D], ds_t + j * n.D, n.D));
          for (int64_t row = 0; row < JD; ++row) {
            const double coupling = c[row / n.D], dl = t == 0 ? 0 : coupling * (db[row / n.D] - mean);
            dx[row] += coupling * ds_t[row] + dl * V_t[row];
            if (t + 1 < kIterations) continue;
            unweighted[b * JD + row] += x[row];
            forward[b * JD + row] += coupling * x[row];
            backward[b * JD + row] += dl * x[row];
          }
        }
        for (int64_t row = 0; row < JD; ++row) {
          for (int64_t k = 0; k < n.K; ++k) {
            du[(b * n.I + i) * n.K + k] += rows[row * n.K + k] * dx[row];
            dweight[(i * JD + row) * n.K + k] += pose[k] * dx[row];
          }
        }
      }
    }
  }
};

template <class T>
class Kernel {
 public:
  Kernel(const Kernels<T>& table, const Definition& definition)
      : table_(table),
        is_(definition),
        n(definition.n),
        u_(is_.u.begin(), is_.u.end()),
        weight_(is_.weight.begin(), is_.weight.end()) {
    constexpr Storage storage = sizeof(T) == 4 ? Storage::f32 : Storage::f64;
    p.B = n.B;
    p.I = n.I;
    p.J = n.J;
    p.D = n.D;
    p.K = n.K;
    p.iterations = kIterations;
    p.tiled = true;
    p.dweight = storage;
    p.u = View{u_.data(), storage, {n.I * n.K, n.K, 1}};
    p.weight = View{weight_.data(), storage, {n.J * n.D * n.K, n.D * n.K, n.K, 1}};
    plan = make_plan(p, table_.L, 1, sizeof(T));
  }

  // The largest error, relative to the largest number of its kind.
  double error() {
    const Buffer<T> V = in_lanes(is_.V), ds = in_lanes(is_.ds);
    const int64_t pitch = plan.tiles * n.J * n.D * plan.L, last = (kIterations - 1) * pitch;
    double most = 0;
    for (const Numbers* wanted : {&is_.unweighted, &is_.forward, &is_.backward}) {
      const Sums<T> sums(pitch);
      sums.clear();
      AccumulatePass<T> pass;
      pass.problem = &p;
      pass.plan = &plan;
      pass.first = sums.sum();
      pass.unweighted = wanted == &is_.unweighted;
      if (!pass.unweighted) pass.score.linear = V.get() + last;
      if (wanted == &is_.backward) pass.gradient.linear = ds.get() + last;
      const Buffer<T> scratch(LanesAccumulateScratch<T>(p, plan, nullptr).size);
      table_.lanes_accumulate(pass, {0, plan.tiles, 0, n.I}, scratch.get());
      most = std::max(most, difference(*wanted, [&](int64_t m) { return sums.total(lane_of(m)); }));
    }
    Buffer<T> du(n.B * n.I * n.K), dweight(n.I * n.J * n.D * n.K);
    GradientPass<T> pass;
    pass.problem = &p;
    pass.plan = &plan;
    pass.score.linear = V.get();
    pass.gradient.linear = ds.get();
    pass.du = p.u;
    pass.du.data = du.get();
    pass.dweight = p.weight;
    pass.dweight.data = dweight.get();
    const Buffer<T> scratch(LanesGradientScratch<T>(p, plan, kIterations, nullptr).size);
    table_.lanes_gradient(pass, {0, plan.tiles, 0, n.I}, scratch.get());
    most = std::max(most, difference(is_.du, [&](int64_t m) { return du.get()[m]; }));
    return std::max(most, difference(is_.dweight, [&](int64_t m) { return dweight.get()[m]; }));
  }

 private:
  // Where element m of [B][J][D] stands in [tiles][J D][L].
  int64_t lane_of(int64_t m) const {
    const int64_t JD = n.J * n.D, b = m / JD, L = plan.L;
    return (b / L * JD + m % JD) * L + b % L;
  }

  Buffer<T> in_lanes(const Numbers& numbers) const {
    const int64_t pitch = plan.tiles * n.J * n.D * plan.L, size = n.B * n.J * n.D;
    Buffer<T> lanes(kIterations * pitch);
    std::fill_n(lanes.get(), kIterations * pitch, T(0));
    for (int64_t m = 0; m < kIterations * size; ++m)
      lanes.get()[m / size * pitch + lane_of(m % size)] = static_cast<T>(numbers[m]);
    return lanes;
  }

  template <class F>
  static double difference(const Numbers& wanted, const F& found) {
    double largest = 0, most = 0;
    for (size_t m = 0; m < wanted.size(); ++m) {
      const double off = std::abs(wanted[m] - double(found(static_cast<int64_t>(m))));
      largest = std::max(largest, std::abs(wanted[m]));
      most = off <= most ? most : std::isnan(off) ? std::numeric_limits<double>::infinity() : off;
    }
    return most / largest;
  }

  const Kernels<T>& table_;
  const Definition& is_;
  const Sizes n;
  std::vector<T> u_, weight_;
  Problem p;
  Plan plan;
};

template <class T>
bool is_right(const Definition& definition, double bound) {
  bool right = true;
  for (const Kernels<T>* table : {&portable::table<T>(false), &portable::table<T>(true)}) {
    const Sizes& n = definition.n;
    const double error = Kernel<T>(*table, definition).error();
    std::printf("B=%d I=%d J=%d D=%d K=%d, %d bits, %d lanes: error %.1e\n", int(n.B), int(n.I), int(n.J), int(n.D),
                int(n.K), int(8 * sizeof(T)), int(table->L), error);
    right = right && error <= bound;
  }
  return right;
}

}  // namespace

int main() {
  bool right = true;
  // All and some rows of a block, all and some lanes; K that the kernels have as a constant, and others; J whose votes
  // are held, and whose votes are not.
  for (const Sizes& sizes : {Sizes{16, 9, 10, 16, 8}, Sizes{19, 5, 3, 5, 4}, Sizes{37, 3, 2, 16, 11},
                             Sizes{5, 4, 7, 6, 16}, Sizes{17, 2, 200, 16, 3}}) {
    const Definition definition(sizes);
    right = is_right<float>(definition, 2e-6) && right;
    right = is_right<double>(definition, 5e-15) && right;
  }
  return right ? 0 : 1;
}
