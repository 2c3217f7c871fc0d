// The implementation of csrc/cuda/device.h that runs on the host and checks every access.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>

#include "../../csrc/cuda/limits.h"
#include "../../csrc/math/half.h"
#include "block.h"

#define CAPSFAST_DEVICE inline
#define CAPSFAST_CALLED inline
#define CAPSFAST_IN_PLACE
#define CAPSFAST_KERNEL(threads, blocks) inline void

namespace capsfast::gpu {

using emulator::Block;
using emulator::fault;
using emulator::Machine;
using emulator::Together;
using Grid = emulator::Dim;

template <class T>
class Shared;
class Arrival;

inline int thread() { return Block::current().thread(); }
inline int reread_thread_idx() { return thread(); }
inline int threads() { return Block::current().threads(); }
inline int64_t block_x() { return Block::current().place().index.x; }
inline int64_t block_y() { return Block::current().place().index.y; }
inline int64_t block_z() { return Block::current().place().index.z; }
inline int64_t blocks_x() { return Block::current().place().grid.x; }
inline int64_t blocks_y() { return Block::current().place().grid.y; }
inline int64_t blocks_z() { return Block::current().place().grid.z; }
constexpr bool kTensorCores = true;
inline void barrier(int line = __builtin_LINE()) { Block::current().barrier(line); }
inline void warp_barrier(int line = __builtin_LINE()) { Block::current().warp_barrier(line); }
inline void named_barrier(int id, int count, int line = __builtin_LINE()) {
  Block::current().named_barrier(id, count, line);
}
inline void grid_barrier(int line = __builtin_LINE()) { Block::current().grid_barrier(line); }
inline int cluster_size() { return Block::current().place().cluster; }
inline int cluster_rank() { return Block::current().place().rank; }
inline void cluster_barrier(int line = __builtin_LINE()) { Block::current().cluster_barrier(line); }

template <class T>
T shuffle_xor(T value, int mask, int line = __builtin_LINE()) {
  static_assert(sizeof(T) <= emulator::kSlot);
  if (mask < 0 || mask >= emulator::kWarp) fault("shuffle_xor with mask " + std::to_string(mask));
  const unsigned char* slots = Block::current().exchange(&value, sizeof(T), line);
  std::memcpy(&value, slots + static_cast<size_t>((thread() % emulator::kWarp) ^ mask) * emulator::kSlot, sizeof(T));
  return value;
}

inline bool any(bool value, int line = __builtin_LINE()) {
  const unsigned char* slots = Block::current().exchange(&value, sizeof(value), line);
  bool any = false;
  for (size_t lane = 0; lane < emulator::kWarp; ++lane) any = any || slots[lane * emulator::kSlot] != 0;
  return any;
}

inline float reciprocal(float x) { return 1.0f / x; }
inline float exp2(float x) { return std::exp2(x); }

// The number without the bits that TF32 does not have.
inline float truncated(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  bits &= 0xFFFFE000u;
  std::memcpy(&x, &bits, 4);
  return x;
}

// The nearest TF32 number (10 bits of mantissa), ties away from zero, as cvt.rna.tf32.f32 rounds.
inline float to_tf32_or_number(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  bits += 0x1000u;
  std::memcpy(&x, &bits, 4);
  return truncated(x);
}
inline float to_tf32(float x) { return std::isfinite(x) ? to_tf32_or_number(x) : x; }

// The sum as the adders of tensor cores form it, with the largest error that was found on any: bits of a term below the
// 24 bits of the largest term are dropped, and so are bits of the sum that a float does not hold.
inline float truncated_sum(const double (&terms)[5]) {
  double largest = 0, plain = 0;
  for (const double term : terms) {
    largest = std::max(largest, std::fabs(term));
    plain += term;
  }
  if (!std::isfinite(plain) || largest == 0) return static_cast<float>(plain);
  const double scale = std::ldexp(1.0, 23 - std::ilogb(largest));
  int64_t kept = 0;
  for (const double term : terms) kept += static_cast<int64_t>(term * scale);
  const double sum = static_cast<double>(kept) / scale;
  const float nearest = static_cast<float>(sum);
  return std::fabs(nearest) > std::fabs(sum) ? std::nextafterf(nearest, 0.0f) : nearest;
}

// c [16, 8] += a [16, 8] b [8, 8]. Each lane has four elements of c, and gives its elements of a and b to the others.
// a_of(lanes, row, k) and b_of(lanes, k, column) find an element in what the lanes gave.
template <class Operands, class FindA, class FindB>
void mma(float (&c)[4], const Operands& given, const FindA& a_of, const FindB& b_of, int line) {
  Machine::current().check_tensor_cores();
  static_assert(sizeof(Operands) <= emulator::kSlot);
  Block& block = Block::current();
  const unsigned char* slots = block.exchange(&given, sizeof(given), line);
  const auto lanes = [&](int lane) {
    Operands operands;
    std::memcpy(&operands, slots + static_cast<size_t>(lane) * emulator::kSlot, sizeof(operands));
    return operands;
  };
  const int lane = block.thread() % emulator::kWarp, group = lane / 4, quad = lane % 4;
  double left[2][8], right[8][2];  // the two rows of a and the two columns of b that this lane multiplies
  for (int k = 0; k < 8; ++k) {
    for (int m = 0; m < 2; ++m) {
      left[m][k] = a_of(lanes, group + m * 8, k);
      right[k][m] = b_of(lanes, k, quad * 2 + m);
    }
  }
  for (int n = 0; n < 4; ++n) {
    for (int k0 = 0; k0 < 8; k0 += 4) {
      double terms[5] = {c[n]};
      for (int k = 0; k < 4; ++k) terms[k + 1] = left[n / 2][k0 + k] * right[k0 + k][n % 2];
      c[n] = truncated_sum(terms);
    }
  }
}

// Drops bits of a and b that TF32 does not have, as tensor cores do.
inline void mma_tf32(float (&c)[4], const float (&a)[4], const float (&b)[2], int line = __builtin_LINE()) {
  struct Operands {
    float a[4], b[2];
  };
  mma(
      c, Operands{{a[0], a[1], a[2], a[3]}, {b[0], b[1]}},
      [](const auto& lanes, int row, int k) { return truncated(lanes(row % 8 * 4 + k % 4).a[row / 8 + k / 4 * 2]); },
      [](const auto& lanes, int k, int column) { return truncated(lanes(column * 4 + k % 4).b[k / 4]); }, line);
}

inline void mma_tf32_from_zero(float (&c)[4], const float (&a)[4], const float (&b)[2], int line = __builtin_LINE()) {
  c[0] = c[1] = c[2] = c[3] = 0.0f;
  mma_tf32(c, a, b, line);
}

// The same for 16-bit numbers, two in a register: to_float converts one.
template <class ToFloat>
void mma_16_bits(float (&c)[4], const uint32_t (&a)[2], uint32_t b, const ToFloat& to_float, int line) {
  struct Operands {
    uint32_t a[2], b;
  };
  const auto half = [&](uint32_t two, int k) { return to_float(static_cast<uint16_t>(k % 2 == 0 ? two : two >> 16)); };
  mma(
      c, Operands{{a[0], a[1]}, b},
      [&](const auto& lanes, int row, int k) { return half(lanes(row % 8 * 4 + k / 2).a[row / 8], k); },
      [&](const auto& lanes, int k, int column) { return half(lanes(column * 4 + k / 2).b, k); }, line);
}
inline void mma_bf16(float (&c)[4], const uint32_t (&a)[2], uint32_t b, int line = __builtin_LINE()) {
  mma_16_bits(c, a, b, bf16_to_float, line);
}
inline void mma_f16(float (&c)[4], const uint32_t (&a)[2], uint32_t b, int line = __builtin_LINE()) {
  mma_16_bits(c, a, b, half_to_float, line);
}
inline void mma_bf16_from_zero(float (&c)[4], const uint32_t (&a)[2], uint32_t b, int line = __builtin_LINE()) {
  c[0] = c[1] = c[2] = c[3] = 0.0f;
  mma_bf16(c, a, b, line);
}
inline void mma_f16_from_zero(float (&c)[4], const uint32_t (&a)[2], uint32_t b, int line = __builtin_LINE()) {
  c[0] = c[1] = c[2] = c[3] = 0.0f;
  mma_f16(c, a, b, line);
}

// `count` elements in device memory.
template <class T>
class Global {
 public:
  Global() = default;
  Global(T* data, int64_t count) : data_(data), count_(data == nullptr ? 0 : count) {}
  T& operator[](int64_t n) const {
    check(n, 1);
    aligned(n, alignof(T));
    return data_[n];
  }
  template <class Vector>
  Vector vector(int64_t n) const {
    check(n, static_cast<int64_t>(sizeof(Vector) / sizeof(T)));
    aligned(n, sizeof(Vector));
    Vector value;
    std::memcpy(&value, data_ + n, sizeof(Vector));
    return value;
  }
  template <class Vector>
  Vector vector_once(int64_t n) const {
    return vector<Vector>(n);
  }
  explicit operator bool() const { return data_ != nullptr; }
  bool aligned(size_t bytes) const { return reinterpret_cast<uintptr_t>(data_) % bytes == 0; }
  // The same memory as elements of another type, as many as its bytes hold.
  template <class U>
  Global<U> as() const {
    return {reinterpret_cast<U*>(data_), count_ * static_cast<int64_t>(sizeof(T)) / static_cast<int64_t>(sizeof(U))};
  }
  Global from(int64_t offset, int64_t count) const {
    if (data_ == nullptr) return {};
    if (offset < 0 || count < 0 || offset + count > count_) fault("a part that reaches beyond its memory");
    return {data_ + offset, count};
  }
  operator Global<const T>() const { return {data_, count_}; }
  Global reread() const { return *this; }

 private:
  template <class U>
  friend void copy_ahead(Shared<U>, int, Global<const U>, int64_t);
  friend class Arrival;
  void check(int64_t n, int64_t size) const {
    if (n < 0 || n + size > count_)
      fault("index " + std::to_string(n) + " of " + std::to_string(count_) + " elements in memory");
    Block::accesses(data_ + n, static_cast<size_t>(size) * sizeof(T));
  }
  void aligned(int64_t n, size_t bytes) const {
    if (reinterpret_cast<uintptr_t>(data_ + n) % bytes != 0) fault("an access to memory that is not aligned");
  }
  T* data_ = nullptr;
  int64_t count_ = 0;
};

// Stands for an element of shared memory, to tell reads from writes.
template <class T>
class Element {
 public:
  explicit Element(T* where) : where_(where) {}
  Element(const Element&) = default;
  operator T() const {
    Block::current().reads(where_, sizeof(T));
    return *where_;
  }
  T operator=(T value) const {
    Block::current().writes(where_, sizeof(T));
    return *where_ = value;
  }
  T operator=(const Element& other) const { return *this = static_cast<T>(other); }
  T operator+=(T value) const { return *this = static_cast<T>(*this) + value; }
  T operator*=(T value) const { return *this = static_cast<T>(*this) * value; }

 private:
  T* where_;
};

template <class T>
class Shared {
 public:
  Shared(T* data, int count) : data_(data), count_(count) {}
  Element<T> operator[](int n) const {
    check(n, 1);
    return Element<T>(data_ + n);
  }
  template <class Vector>
  Vector vector(int n) const {
    check(n, static_cast<int>(sizeof(Vector) / sizeof(T)));
    if (reinterpret_cast<uintptr_t>(data_ + n) % sizeof(Vector) != 0) fault("a vector access that is not aligned");
    Block::current().reads(data_ + n, sizeof(Vector));
    Vector value;
    std::memcpy(&value, data_ + n, sizeof(Vector));
    return value;
  }
  template <class Vector>
  void write(int n, const Vector& value) const {
    check(n, static_cast<int>(sizeof(Vector) / sizeof(T)));
    if (reinterpret_cast<uintptr_t>(data_ + n) % sizeof(Vector) != 0) fault("a vector access that is not aligned");
    Block::current().writes(data_ + n, sizeof(Vector));
    std::memcpy(data_ + n, &value, sizeof(Vector));
  }
  // Element n of the same memory in block `rank` of the cluster.
  T read_from(int rank, int n) const {
    check(n, 1);
    T value;
    Block::current().read_from(rank, data_ + n, sizeof(T), &value);
    return value;
  }

 private:
  template <class U>
  friend void copy_ahead(Shared<U>, int, Global<const U>, int64_t);
  friend class Arrival;
  void check(int n, int size) const {
    if (n < 0 || n + size > count_)
      fault("index " + std::to_string(n) + " of " + std::to_string(count_) + " elements in shared memory");
  }
  T* data_;
  int count_;
};

// `count` elements of the block's shared memory from byte `offset` on.
template <class T>
Shared<T> shared(int offset, int count) {
  return {reinterpret_cast<T*>(
              Block::current().shared(static_cast<size_t>(offset), static_cast<size_t>(count) * sizeof(T), alignof(T))),
          count};
}

template <class T>
void copy_ahead(Shared<T> to, int at, Global<const T> from, int64_t n) {
  constexpr int kCount = 16 / static_cast<int>(sizeof(T));
  Machine::current().check_tensor_cores();
  to.check(at, kCount);
  from.check(n, kCount);
  Block::current().copy_ahead(
      reinterpret_cast<unsigned char*>(to.data_ + at), reinterpret_cast<const unsigned char*>(from.data_ + n));
}
inline void copies_wait() { Block::current().copies_wait(); }
inline void copies_commit() { Block::current().copies_commit(); }
inline void copies_wait_but_last() { Block::current().copies_wait(1); }

inline bool has_bulk_copies() { return emulator::Machine::current().clusters; }
class Arrival {
 public:
  explicit Arrival(int offset) : at_(static_cast<size_t>(offset)) {}
  void begin() const { Block::current().arrival_begin(at_); }
  void end() const { Block::current().arrival_end(at_); }
  void expect(int bytes) const { Block::current().arrival_expect(at_, static_cast<size_t>(bytes)); }
  void copy(Shared<unsigned char> to, Global<const unsigned char> from, int64_t n, int bytes) const {
    to.check(0, bytes);
    from.check(n, bytes);
    Block::current().arrival_copy(at_, to.data_, from.data_ + n, static_cast<size_t>(bytes));
  }
  void wait(bool odd) const { Block::current().arrival_wait(at_, odd); }
  static void release_writes() { Block::current().release_writes(); }

 private:
  size_t at_;
};

inline void wait_for_launch_before() { Block::current().wait_for_launch_before(); }
inline void let_next_launch_start() {}

using Stream = void*;

inline void set_zero(void* memory, int64_t bytes, Stream) {
  Machine::current().call.behind_launch = false;
  std::memset(memory, 0, static_cast<size_t>(bytes));
}

// Launches a kernel that may ask for as much shared memory as it does.
template <class Args>
void launch_allowed(Kernel<Args> kernel, Grid grid, int threads, int shared_bytes, const Args& args,
                    Together together) {
  // The type of the arguments, from "... [with Args = capsfast::cuda::AccumulateArgs<true>]", without <...>.
  std::string name = __PRETTY_FUNCTION__;
  name = name.substr(name.find("Args = ") + 7);
  emulator::run_launch(
      reinterpret_cast<const void*>(kernel), grid, threads, static_cast<size_t>(shared_bytes), together,
      [&] { kernel(args); }, name.substr(0, name.find_first_of("<;]")));
}

template <class Args>
void launch(Kernel<Args> kernel, Grid grid, int threads, int shared_bytes, Stream, const Args& args,
            Together together = {}) {
  if (shared_bytes > 0) limits().of(kernel);  // sets how much the kernel may ask for
  launch_allowed(kernel, grid, threads, shared_bytes, args, together);
}

template <class Args>
[[nodiscard]] bool try_launch(Kernel<Args> kernel, Grid grid, int threads, int shared_bytes, Stream stream,
                              const Args& args, Together together) {
  if (together.grid && Machine::current().crowded) return false;
  launch(kernel, grid, threads, shared_bytes, stream, args, together);
  return true;
}

inline int Driver::device() { return Machine::current().number; }
inline Driver::Known Driver::known(const void*) {
  const Machine& machine = Machine::asked();
  return {static_cast<int>(machine.shared_bytes - machine.fixed_shared_bytes), static_cast<int>(machine.architecture)};
}
inline void Driver::allow_shared(const void* kernel, int bytes) { Machine::asked().allow_shared(kernel, bytes); }
inline void Driver::prefer_shared(const void*, int) { ++Machine::current().questions; }
inline int64_t Driver::max_active_blocks(const void* kernel, int threads, int shared_bytes) {
  return Machine::asked().max_active_blocks(kernel, threads, shared_bytes);
}
inline int64_t Driver::max_active_clusters(const void* kernel, int size, int threads, int shared_bytes) {
  return Machine::asked().max_active_clusters(kernel, size, threads, shared_bytes);
}

}  // namespace capsfast::gpu
