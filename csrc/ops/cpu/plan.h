// How a call is cut into tasks and tiles. Python gets it from capsfast._C.launch_plan().
#pragma once

#include "kernels.h"

namespace capsfast {

// lanes: how many numbers of the sums' type fill a register or, if samples are tiled, a vector of a tile.
// bytes_per_number: the size of such a number. threads: how many threads the call may use.
Plan make_plan(const Problem& p, int64_t lanes, int64_t threads, int64_t bytes_per_number);

// Every iteration reads given votes. If a task runs all iterations of a few samples before the next samples, only the
// first iteration reads from memory and the others read from the cache. The passes over such a slice of the batch are
// planned for one thread.
struct Slices {
  int64_t tasks = 0;    // 0: the batch is not sliced
  int64_t samples = 0;  // of a slice
};

// Votes with positions are always sliced: the positions of a slice lie within one b, and lanes are positions.
Slices make_slices(const Problem& p, int64_t lanes, int64_t threads, int64_t bytes_per_number,
                   bool shared_logits_gradient);

// How many samples, from sample 0 on, go to tiles: all samples; none, if they are a small batch; or as many as fill
// whole tiles, if the rest is faster as a small batch.
int64_t samples_in_tiles(const Problem& p, int64_t lanes, int64_t bytes_per_number);

// How many samples of a small batch keep their votes at a time.
int64_t samples_kept(const Problem& p, int64_t lanes, int64_t bytes_per_number);

// The samples of a pass in the lanes layout, cut into parts that run one after the other. So arrays of output capsules
// with B J D numbers (score, center, sums) take memory for one part only, and stay in the cache.
struct Parts {
  int64_t count = 1;
  // The first sample of a part; begin(count) is the number of samples. Parts are whole tiles.
  int64_t begin(int64_t part) const { return part == count ? samples : rounds * part / count * round; }

  int64_t samples = 0;
  int64_t saved = 0;              // numbers of memory that cutting into parts saves
  int64_t rounds = 0, round = 0;  // a part has whole rounds of `round` samples: a tile for every thread
  int64_t passes = 1;             // gradient passes of a part, which add to the same dW
};

Parts make_parts(const Problem& p, int64_t lanes, int64_t threads, int64_t bytes_per_number);

// How a forward is cut. lane and plan belong to the first part or, for given votes, to the first slice.
struct CallPlan {
  int64_t small_batch;  // samples that do not go to tiles
  int64_t parts;        // of the samples in tiles
  Lane lane;
  Plan plan;
};
template <class T>
CallPlan plan_of_call(const Problem& p, int64_t threads);

}  // namespace capsfast
