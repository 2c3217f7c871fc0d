#include "plan.h"

#include <algorithm>
#include <numeric>

namespace capsfast {

namespace {

// The bytes of a core's caches that a plan counts on. Current x86-64 servers have more (at least 32 KiB L1, 512 KiB
// L2), but other data passes through the caches.
constexpr int64_t kL1 = 24 * 1024;
constexpr int64_t kL2 = 256 * 1024;
// Bytes of scores of a chunk that is swept twice. Scores come from L3 at worst. A larger chunk reads V and s less
// often.
constexpr int64_t kScores = 1024 * 1024;

// Most bytes of a slice's votes, which should stay in the cache for all iterations; and most bytes of the dlogits of
// all tasks together.
constexpr int64_t kSliceBytes = 512 * 1024;
constexpr int64_t kSliceLogits = 16 * 1024 * 1024;

// Bytes of the arrays of output capsules that a thread has in a pass over a part of the batch: at most kPassArrays
// arrays with J D numbers a sample.
constexpr int64_t kPartBytes = 2 * 1024 * 1024;
constexpr int64_t kPassArrays = 10;

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Tasks of a pass for every thread: a thread that other work holds up leaves its tasks to the others.
constexpr int64_t kTasks = 4;
// The fewest multiply-adds for each number of a partial sum. Then clearing and adding up the sum is about a hundredth
// of the work.
constexpr int64_t kPerSum = 4096;
// The fewest multiply-adds for each number of the partial sums of a gradient pass. With fewer, clearing and adding up
// these sums takes longer than a separate pass for them.
constexpr int64_t kPerGradientSum = 512;

// Chooses groups x splits tasks, at most `threads`, so that the largest task is as small as possible. Splits along the
// input capsules cost partial sums, so among equals the fewest splits win.
void cut(int64_t tiles, int64_t chunks, int64_t threads, int64_t* groups, int64_t* splits) {
  *groups = *splits = 1;
  int64_t best = -1;
  for (int64_t g = std::min(tiles, threads); g >= 1; --g) {
    const int64_t s = std::max<int64_t>(1, std::min(chunks, threads / g));
    const int64_t largest = divide_up(tiles, g) * divide_up(chunks, s);
    if (best < 0 || largest < best) {
      best = largest;
      *groups = g;
      *splits = s;
    }
  }
}

// Whether all samples of a small batch must keep their votes at the same time, because dW can be written only once: a
// dW that is a sum over input capsules, or has another type than the sums, is not added up in place.
bool votes_kept_at_once(const Problem& p, int64_t size) {
  return p.shared_weight || p.weight.storage != (size == 4 ? Storage::f32 : Storage::f64);
}

// Whether the sums of a gradient pass take a pass of their own. A gradient pass is cut along the input capsules, so it
// has more partial sums: high and low of two moments.
bool are_sums_apart(const Problem& p, int64_t size, int64_t threads, const Plan& plan) {
  const int64_t more = plan.gradient_splits - plan.splits, bytes = 4 * p.B * p.J * p.D * size;
  return p.moments && (more * kPerGradientSum > p.I * p.K || more * bytes > threads * kPartBytes);
}

// A tile in the lanes layout costs the same with few samples as with L samples. A small batch makes its votes once and
// routes its samples one by one. It costs as much as a tile if it would fill 11/16 of the lanes.
int64_t smallest_lanes_batch(int64_t lanes) { return std::max<int64_t>(2, (lanes * 11 + 15) / 16); }

// A small batch keeps at most kLasting bytes of votes at a time, but always the votes of one sample (1 / K of the size
// of the weight). If the kept votes would take more than kKeptVotes bytes, tiles serve the call; they keep no votes.
constexpr int64_t kKeptVotes = 128 * 1024 * 1024;

int64_t blocks_of(const Problem& p, int64_t lanes) { return divide_up(p.I, lanes); }

double sample_votes(const Problem& p, int64_t lanes, int64_t size) {
  return double(blocks_of(p, lanes) * lanes) * double(p.J) * double(p.D) * double(size);
}

bool is_small_batch(const Problem& p, int64_t lanes, int64_t size) {
  const double kept = double(samples_kept(p, lanes, size)) * sample_votes(p, lanes, size);
  // Lanes without an input capsule cost as much as others.
  const bool few = p.B * blocks_of(p, lanes) * lanes < smallest_lanes_batch(lanes) * p.I;
  return p.lane == Lane::any && few && kept <= double(kKeptVotes);
}

// Cuts each of `count` parts into kTasks, up to `most` parts in all.
int64_t finer(int64_t count, int64_t most) { return std::max(count, std::min(kTasks * count, most)); }

void plan_lanes(const Problem& p, int64_t size, int64_t threads, Plan* plan) {
  const int64_t L = plan->L, row = p.weight_size() * size, vote = p.D * L * size;
  plan->tiles = divide_up(p.B, L);

  // The votes, V and s of the output capsules of a tile should stay in L1 or close to it.
  plan->out_tile = p.J * vote <= 2 * kL1 ? p.J : std::max<int64_t>(1, kL1 / 2 / vote);
  const bool held = plan->out_tile >= p.J;
  plan->chunk = std::clamp<int64_t>(kL2 / std::max<int64_t>(row, 1), 1, 32);
  if (!held) plan->chunk = std::clamp<int64_t>(kScores / (2 * p.J * L * size), 1, 32);
  // Votes that are positions of a tensor are copied to the lanes of a tile, a chunk at a time.
  if (p.votes_in_lanes()) plan->chunk = std::clamp<int64_t>(kL2 / 2 / (p.J * vote), 1, plan->chunk);
  const int64_t chunks = divide_up(p.I, plan->chunk), cheap = std::min(chunks, p.I * p.K / kPerSum);
  if (threads > 1 && cheap >= kTasks * threads) {
    // A long weight comes from memory: a task then reads its part once for all samples.
    plan->splits = kTasks * threads;
  } else {
    cut(plan->tiles, chunks, threads, &plan->tile_groups, &plan->splits);
    // With few tiles, cut finer along the input capsules: each task then reads only its part of the weight. With many
    // tiles a pass takes long anyway, and its partial sums are large.
    if (threads > 1 && plan->tiles < kTasks * threads) plan->splits = finer(plan->splits, cheap);
  }

  // The gradient pass reads V and ds of every iteration for the output capsules of a tile. For dW the rows of a tile
  // must be a multiple of L, so the output capsules of a tile are a multiple of `whole`.
  const int64_t terms = 2 * p.iterations;
  const int64_t whole = p.votes_in_lanes() ? 1 : L / std::gcd(p.R(), L);
  plan->gradient_out_tile = std::max<int64_t>(1, kL1 / (terms * vote * whole)) * whole;
  plan->gradient_out_tile = std::min(plan->gradient_out_tile, p.J);
  // If only one task writes a row of dW, the task adds up the row in place, and has more room for scores.
  const Storage number = size == 4 ? Storage::f32 : Storage::f64;
  plan->weight_in_place = !p.shared_weight && p.dweight == number && p.J * p.R() % L == 0 && p.I >= threads;
  const int64_t scores = plan->weight_in_place ? 2 * kScores : kScores;
  plan->gradient_chunk = std::clamp<int64_t>(scores / (terms * p.J * L * size), 1, 8);
  // A routing_pass, and a pass over positions, keep the votes of a chunk.
  if (p.moments || p.votes_in_lanes())
    plan->gradient_chunk = std::clamp<int64_t>(kL2 / (p.J * vote), 1, plan->gradient_chunk);
  plan->gradient_chunk = std::min(plan->gradient_chunk, divide_up(p.I, threads));
  const int64_t gradient_chunks = divide_up(p.I, plan->gradient_chunk);
  plan->gradient_splits = std::min(gradient_chunks, threads);
  plan->gradient_groups = std::max<int64_t>(1, std::min(plan->tiles, threads / plan->gradient_splits));
  plan->sums_apart = are_sums_apart(p, size, threads, *plan);
  // For one tile of samples such short tasks were measured to cost more than they gain.
  if (threads > 1 && plan->tiles > 1 && !p.shared_weight) {
    const bool sums = p.moments && !plan->sums_apart;
    plan->gradient_splits = finer(plan->gradient_splits, sums ? std::min(cheap, gradient_chunks) : gradient_chunks);
  }
  plan->weight_in_place = plan->weight_in_place && plan->gradient_groups == 1;
}

// A chunk is scored and then added up, so it should stay in L2. In every pass a thread has the input capsules whose
// votes it has made. Tasks are short, so there are only as many as threads, unless there are very many input capsules.
void plan_capsules(const Problem& p, int64_t size, int64_t threads, Plan* plan) {
  constexpr int64_t kLong = 1024;  // blocks
  const int64_t votes = p.J * p.D * plan->L * size;
  plan->gradient_chunk = std::clamp<int64_t>(kL2 / 2 / votes, 1, 16);
  // Adding a chunk to the sums takes as long as two input capsules.
  plan->chunk = std::max<int64_t>(4, plan->gradient_chunk);
  plan->tiles = p.B;
  plan->out_tile = plan->gradient_out_tile = p.J;
  plan->splits = std::min(threads, plan->capsules);
  if (threads > 1) plan->splits = finer(plan->splits, plan->capsules / kLong / threads * threads);
  plan->gradient_splits = plan->splits;
}

void plan_rows(const Problem& p, int64_t lanes, int64_t size, int64_t threads, Plan* plan) {
  plan->L = lanes;
  while (!p.keys() && plan->L > std::max<int64_t>(2, lanes / 4) && p.D < plan->L) plan->L /= 2;
  plan->tiles = p.B;
  plan->chunk = p.keys() ? 256 : 64;  // products of matrices are fast, so adding a chunk to the sums counts more
  cut(p.B, divide_up(p.I, 16), threads, &plan->tile_groups, &plan->splits);
  if (threads > 1) plan->tile_groups = finer(plan->tile_groups, p.B);
  // The gradient pass writes gradients of input capsules, so it needs no partial sums if it is cut along the input
  // capsules.
  plan->gradient_splits = std::clamp<int64_t>(divide_up(p.I, 16), 1, threads);
  plan->gradient_groups = std::clamp<int64_t>(threads / plan->gradient_splits, 1, std::max<int64_t>(1, p.B));
  plan->sums_apart = are_sums_apart(p, size, threads, *plan);
  if (threads > 1 && (!p.moments || plan->sums_apart))
    plan->gradient_splits = finer(plan->gradient_splits, divide_up(p.I, 16));
}

}  // namespace

Slices make_slices(const Problem& p, int64_t lanes, int64_t threads, int64_t size, bool shared_logits_gradient) {
  Slices slices;
  const int64_t bytes = std::max<int64_t>(1, p.I * p.votes_size() * size);
  if (p.positions > 0) {
    // Whole tiles, but few enough to give every thread a slice. With few input capsules the arrays of output capsules
    // of a slice count too: V and s of every iteration, and sums.
    const int64_t tiles = divide_up(p.positions, lanes), outputs = 2 * p.iterations + 4;
    const int64_t fit = std::max<int64_t>(1, kSliceBytes / ((bytes + outputs * p.J * p.D * size) * lanes));
    slices.samples = lanes * std::min(fit, std::max<int64_t>(1, tiles * p.B / threads));
    const int64_t pieces = p.B * divide_up(p.positions, slices.samples);
    slices.tasks = std::min(threads, pieces);
    return slices;
  }
  if (p.B < threads || p.I == 0) return slices;
  // Each task needs its own sum of dlogits [I, J], in double.
  if (shared_logits_gradient && threads * p.I * p.J * 8 > kSliceLogits) return slices;
  slices.samples = std::clamp<int64_t>(kSliceBytes / bytes, 1, divide_up(p.B, threads));
  // Not more tasks than threads: so each thread reads the votes in the order of memory.
  slices.tasks = threads;
  return slices;
}

Parts make_parts(const Problem& p, int64_t lanes, int64_t threads, int64_t size) {
  Parts parts;
  parts.samples = p.B;
  if (!p.moments || p.votes_given || p.empty()) return parts;
  parts.round = threads * lanes;
  parts.rounds = divide_up(p.B, lanes) / threads;
  // With fewer tiles a part would be split along the input capsules.
  const int64_t fewest = std::max(kTasks, kPartBytes / (kPassArrays * p.J * p.D * lanes * size));
  parts.count = std::max<int64_t>(1, parts.rounds / fewest);
  parts.saved = kPassArrays * p.J * p.D * (p.B - divide_up(p.B, parts.count));
  return parts;
}

int64_t samples_kept(const Problem& p, int64_t lanes, int64_t size) {
  if (votes_kept_at_once(p, size)) return p.B;
  const double fit = double(kLasting) / std::max(1.0, sample_votes(p, lanes, size));
  return fit >= double(p.B) ? std::max<int64_t>(1, p.B) : std::max<int64_t>(1, static_cast<int64_t>(fit));
}

int64_t samples_in_tiles(const Problem& p, int64_t lanes, int64_t size) {
  if (p.votes_given || p.empty()) return p.B;
  if (is_small_batch(p, lanes, size)) return 0;
  if (votes_kept_at_once(p, size)) return p.B;
  Problem rest = p;
  rest.B = p.B % lanes;
  return rest.B > 0 && is_small_batch(rest, lanes, size) ? p.B - rest.B : p.B;
}

Plan make_plan(const Problem& p, int64_t lanes, int64_t threads, int64_t size) {
  Plan plan;
  plan.L = lanes;
  plan.capsules = p.capsule_lanes() ? blocks_of(p, lanes) : p.I;
  // Without votes there is nothing to tile. With D = 0 there is only a coupling, which follows from the logits.
  const bool nothing = p.B == 0 || p.I == 0 || p.J == 0 || p.D == 0;
  plan.lanes = (!p.votes_given || p.votes_in_lanes()) && !p.capsule_lanes() && !nothing;
  if (p.capsule_lanes()) {
    plan_capsules(p, size, threads, &plan);
  } else if (plan.lanes) {
    plan_lanes(p, size, threads, &plan);
  } else {
    plan_rows(p, lanes, size, threads, &plan);
  }
  return plan;
}

}  // namespace capsfast
