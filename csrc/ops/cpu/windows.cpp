// The ops unfold_windows and fold_windows; capsfast/ops/windows.py has the contract.
//
// A task has one capsule type of a sample, and a few windows or places along the first axis. It works on a block of the
// places that its windows cover, in which the components of a capsule are neighbours: a row of a window is then a run
// of memory. A place is copied to the block, or from it, once, while windows overlap.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <vector>

#include "../../cpu/parallel.h"
#include "../arguments.h"
#include "engine.h"
#include "gather.inl"
#include "memory.h"

namespace capsfast {

namespace {

using driver::kStorage, driver::read, driver::write;

constexpr size_t kAxes = 3;          // an image with fewer axes has axes of size 1 before its last
constexpr int64_t kGrain = 1 << 15;  // a task with fewer numbers is not worth a thread

// Numbers of a block; more could not be counted in 64 bits, or allocated.
constexpr double kMostPlaces = double(int64_t{1} << 50);

struct Range {
  int64_t begin, end;
  int64_t count() const { return end - begin; }
  Range part(int64_t n, int64_t of) const { return {begin + count() * n / of, begin + count() * (n + 1) / of}; }
  Range within(int64_t low, int64_t high) const {
    const int64_t from = std::clamp(begin, low, high);
    return {from, std::clamp(end, from, high)};
  }
};

struct Axis {
  int64_t size = 1, kernel = 1, stride = 1, padding = 0, dilation = 1;
  Range windows{0, 1};  // of the box
  int64_t image_stride = 0;

  int64_t start(int64_t window) const { return window * stride - padding; }
  int64_t span() const { return dilation * (kernel - 1) + 1; }
  // The places that windows cover, of which some may lie in the padding.
  Range covered(const Range& some) const { return {start(some.begin), start(some.end - 1) + span()}; }
  // The windows of the box that cover a place of the range.
  Range covering(const Range& places) const {
    Range some = windows;
    while (some.begin < some.end && start(some.begin) + span() <= places.begin) ++some.begin;
    while (some.begin < some.end && start(some.end - 1) >= places.end) --some.end;
    return some;
  }
};

// The box of windows whose input capsules are [samples][windows][types][area][K].
struct Call {
  View image;  // [B, types, K]; the axes have the strides of the places
  std::array<Axis, kAxes> axes;
  Range samples{0, 0};
  int64_t types = 0, K = 0;

  int64_t windows() const { return axes[0].windows.count() * axes[1].windows.count() * axes[2].windows.count(); }
  int64_t area() const { return axes[0].kernel * axes[1].kernel * axes[2].kernel; }
  int64_t numbers() const { return samples.count() * windows() * types * area() * K; }
};

std::vector<int64_t> taken(Stack& stack, const char* name, size_t count, int64_t least) {
  std::vector<int64_t> values;
  stack >> values;
  bool fits = values.size() == count;
  for (const int64_t value : values) fits = fits && value >= least && value < (int64_t{1} << 31);
  STD_TORCH_CHECK(fits, "capsfast: ", name, " must have ", count, " entries of at least ", least);
  return values;
}

Call call_of(Stack& stack, const Tensor& image) {
  STD_TORCH_CHECK(image.is_cpu() && image.dim() > 3 && image.dim() <= 3 + int64_t{kAxes},
                  "capsfast: the image must be a CPU tensor [B, types, K, *size] with one to three axes of places");
  const size_t count = static_cast<size_t>(image.dim() - 3);
  const auto kernel = taken(stack, "kernel_size", count, 1), stride = taken(stack, "stride", count, 1),
             padding = taken(stack, "padding", count, 0), dilation = taken(stack, "dilation", count, 1),
             box = taken(stack, "box", 2 * (count + 1), 0);
  Call call;
  call.image = View{image.data_ptr(), storage_of(image), {image.stride(0), image.stride(1), image.stride(2)}};
  call.types = image.size(1), call.K = image.size(2);
  call.samples = {box[0], box[1]};
  bool fits = box[0] <= box[1] && box[1] <= image.size(0);
  for (size_t n = 0; n < count; ++n) {
    const int64_t dim = 3 + static_cast<int64_t>(n);
    Axis& axis = call.axes[n + 1 == count ? kAxes - 1 : n];
    axis = {image.size(dim),  kernel[n], stride[n], padding[n], dilation[n], {box[2 * n + 2], box[2 * n + 3]},
            image.stride(dim)};
    fits = fits && axis.windows.begin < axis.windows.end && axis.covered(axis.windows).end <= axis.size + axis.padding;
  }
  STD_TORCH_CHECK(fits, "capsfast: the box must hold windows of the image");
  double places = double(call.K);
  for (const Axis& axis : call.axes) places *= double(axis.covered(axis.windows).count());
  STD_TORCH_CHECK(places < kMostPlaces, "capsfast: the windows cover too many places, with the padding");
  return call;
}

// The places of a task.
struct Block {
  std::array<Range, kAxes> places;
  int64_t K;

  int64_t size() const { return places[0].count() * places[1].count() * places[2].count() * K; }
  int64_t at(int64_t z, int64_t y, int64_t x) const {
    const auto& [over_z, over_y, over_x] = places;
    return (((z - over_z.begin) * over_y.count() + y - over_y.begin) * over_x.count() + x - over_x.begin) * K;
  }
};

// Calls f(offset in the block, offset in the image) for the capsules of the block that lie in the image, and the number
// of capsules side by side.
template <class F>
void for_rows(const Call& call, const Block& block, const F& f) {
  std::array<Range, kAxes> in;
  for (size_t n = 0; n < kAxes; ++n) in[n] = block.places[n].within(0, call.axes[n].size);
  if (in[2].count() == 0) return;
  const auto& [over_z, over_y, over_x] = call.axes;
  for (int64_t z = in[0].begin; z < in[0].end; ++z) {
    for (int64_t y = in[1].begin; y < in[1].end; ++y) {
      const int64_t x = in[2].begin;
      f(block.at(z, y, x), z * over_z.image_stride + y * over_y.image_stride + x * over_x.image_stride, in[2].count());
    }
  }
}

// Calls f(offset in the block, offset in the capsules of a type, numbers) for the runs of the windows along the first
// axis that are `some`. Leaves out what the block does not hold of the first axis. The last window comes first: so a
// place gets its terms in the order of the places of a window, as in torch's functions and in Triton's kernel.
template <class F>
void for_runs(const Call& call, const Block& block, const Range& some, const F& f) {
  const auto& [over_z, over_y, over_x] = call.axes;
  const int64_t run = over_x.dilation == 1 ? over_x.kernel : 1, pitch = call.types * call.area() * call.K;
  for (int64_t z = some.end - 1; z >= some.begin; --z) {
    int64_t window = (z - over_z.windows.begin + 1) * over_y.windows.count() * over_x.windows.count() - 1;
    for (int64_t y = over_y.windows.end - 1; y >= over_y.windows.begin; --y) {
      for (int64_t x = over_x.windows.end - 1; x >= over_x.windows.begin; --x, --window) {
        for (int64_t kz = 0; kz < over_z.kernel; ++kz) {
          const int64_t place_z = over_z.start(z) + kz * over_z.dilation;
          if (place_z < block.places[0].begin || place_z >= block.places[0].end) continue;
          for (int64_t ky = 0; ky < over_y.kernel; ++ky) {
            const int64_t from = block.at(place_z, over_y.start(y) + ky * over_y.dilation, over_x.start(x));
            const int64_t to = window * pitch + (kz * over_y.kernel + ky) * over_x.kernel * call.K;
            for (int64_t kx = 0; kx < over_x.kernel; kx += run)
              f(from + kx * over_x.dilation * call.K, to + kx * call.K, run * call.K);
          }
        }
      }
    }
  }
}

// Calls f(sample, type, part of `range`) for tasks.
template <class F>
void over_tasks(const Call& call, const Range& range, const F& f) {
  const int64_t planes = call.samples.count() * call.types, worth = call.numbers() / kGrain;
  if (planes == 0) return;
  with_team(worth > 1, [&] {
    const int64_t wanted = std::min(4 * num_threads(), worth);
    const int64_t cuts = std::clamp<int64_t>(wanted / planes, 1, std::max<int64_t>(1, range.count()));
    for_tasks(planes * cuts, [&](int64_t task, int64_t) {
      const int64_t plane = task / cuts;
      f(call.samples.begin + plane / call.types, plane % call.types, range.part(task % cuts, cuts));
    });
  });
}

// Where the capsules of a type begin in the first window of a sample.
int64_t capsules_of(const Call& call, int64_t sample, int64_t type) {
  return ((sample - call.samples.begin) * call.windows() * call.types + type) * call.area() * call.K;
}

// T: an unsigned integer of the size of an element, because unfolding only copies.
template <class T>
void unfold(const Call& call, T* capsules) {
  const View& image = call.image;
  over_tasks(call, call.axes[0].windows, [&](int64_t sample, int64_t type, const Range& some) {
    const Block block{{call.axes[0].covered(some), call.axes[1].covered(call.axes[1].windows),
                       call.axes[2].covered(call.axes[2].windows)},
                      call.K};
    const Buffer<T> numbers(block.size());
    std::fill_n(numbers.get(), block.size(), T(0));
    const T* const plane = static_cast<const T*>(image.data) + sample * image.stride[0] + type * image.stride[1];
    for_rows(call, block, [&](int64_t to, int64_t from, int64_t count) {
      for (int64_t k = 0; k < call.K; ++k) {
        const T* const row = plane + from + k * image.stride[2];
        for (int64_t x = 0; x < count; ++x) numbers.get()[to + x * call.K + k] = row[x * call.axes[2].image_stride];
      }
    });
    T* const window = capsules + capsules_of(call, sample, type);
    for_runs(call, block, some, [&](int64_t from, int64_t to, int64_t count) {
      std::memcpy(window + to, numbers.get() + from, static_cast<size_t>(count) * sizeof(T));
    });
  });
}

// T: the type that sums are formed in. `capsules` and image have the same storage.
template <class T>
void fold(const Call& call, const View& capsules) {
  const View& image = call.image;
  const Range places = call.axes[0].covered(call.axes[0].windows).within(0, call.axes[0].size);
  over_tasks(call, places, [&](int64_t sample, int64_t type, const Range& some) {
    const Block block{
        {some, call.axes[1].covered(call.axes[1].windows), call.axes[2].covered(call.axes[2].windows)}, call.K};
    const Buffer<T> sums(block.size());
    std::fill_n(sums.get(), block.size(), T(0));
    const int64_t window = capsules_of(call, sample, type);
    for_runs(call, block, call.axes[0].covering(some), [&](int64_t to, int64_t from, int64_t count) {
      T* const sum = sums.get() + to;
      if (capsules.storage == kStorage<T>) {
        const T* const terms = static_cast<const T*>(capsules.data) + window + from;
        for (int64_t n = 0; n < count; ++n) sum[n] += terms[n];
      } else {
        for (int64_t n = 0; n < count; ++n) sum[n] += read<T>(capsules, window + from + n);
      }
    });
    const int64_t plane = sample * image.stride[0] + type * image.stride[1];
    for_rows(call, block, [&](int64_t from, int64_t to, int64_t count) {
      for (int64_t k = 0; k < call.K; ++k) {
        const int64_t row = plane + to + k * image.stride[2], step = call.axes[2].image_stride;
        const T* const sum = sums.get() + from + k;
        if (image.storage == kStorage<T>) {
          T* const elements = static_cast<T*>(image.data) + row;
          for (int64_t x = 0; x < count; ++x) elements[x * step] += sum[x * call.K];
        } else {
          for (int64_t x = 0; x < count; ++x)
            write<T>(image, row + x * step, read<T>(image, row + x * step) + sum[x * call.K]);
        }
      }
    });
  });
}

void unfold_windows(Stack& stack) {
  Tensor image;
  stack >> image;
  const Call call = call_of(stack, image);
  const Tensor capsules =
      empty(image, {call.samples.count() * call.windows(), call.types * call.area(), call.K}, image.scalar_type());
  switch (size_of(call.image.storage)) {
    case 2:
      unfold(call, static_cast<uint16_t*>(capsules.data_ptr()));
      break;
    case 4:
      unfold(call, static_cast<uint32_t*>(capsules.data_ptr()));
      break;
    default:
      unfold(call, static_cast<uint64_t*>(capsules.data_ptr()));
  }
  stack.give({capsules});
}

void fold_windows(Stack& stack) {
  Tensor image, capsules;
  stack >> image >> capsules;
  const Call call = call_of(stack, image);
  Arguments<CpuEngine>::expect(
      "capsules", capsules, {call.samples.count() * call.windows(), call.types * call.area(), call.K});
  STD_TORCH_CHECK(capsules.scalar_type() == image.scalar_type() && capsules.is_contiguous(),
                  "capsfast: capsules must be contiguous and have the dtype of the image");
  with_type(wide_type(image), [&](auto zero) { fold<decltype(zero)>(call, view_of(capsules)); });
  stack.give({});
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(capsfast, CPU, m) {
  m.impl("unfold_windows", &boxed<unfold_windows>);
  m.impl("fold_windows", &boxed<fold_windows>);
}

}  // namespace capsfast
