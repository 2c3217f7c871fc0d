// The host implementation of csrc/cuda/device.h. Every access is checked.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>

#include "block.h"

#define CAPSFAST_DEVICE inline
#define CAPSFAST_KERNEL(threads, blocks) inline void

namespace capsfast::gpu {

using emulator::Block;
using emulator::Fault;
using Grid = emulator::Dim;

inline int thread() { return Block::current().thread(); }
inline int threads() { return Block::current().threads(); }
inline int64_t block_x() { return Block::current().index().x; }
inline int64_t block_y() { return Block::current().index().y; }
inline int64_t block_z() { return Block::current().index().z; }
inline int64_t blocks_x() { return Block::current().grid().x; }
inline int64_t blocks_y() { return Block::current().grid().y; }
inline void barrier(int line = __builtin_LINE()) { Block::current().barrier(line); }
inline void warp_barrier(int line = __builtin_LINE()) { Block::current().warp_barrier(line); }

template <class T>
T shuffle_xor(T value, int mask, int line = __builtin_LINE()) {
  if (mask < 0 || mask >= emulator::kWarp) throw Fault("shuffle_xor with mask " + std::to_string(mask));
  const unsigned char* slots = Block::current().exchange(&value, sizeof(T), line);
  std::memcpy(&value, slots + static_cast<size_t>((thread() % emulator::kWarp) ^ mask) * emulator::kSlot, sizeof(T));
  return value;
}

template <class T>
T shuffle(T value, int lane, int line = __builtin_LINE()) {
  if (lane < 0 || lane >= emulator::kWarp) throw Fault("shuffle from lane " + std::to_string(lane));
  const unsigned char* slots = Block::current().exchange(&value, sizeof(T), line);
  std::memcpy(&value, slots + static_cast<size_t>(lane) * emulator::kSlot, sizeof(T));
  return value;
}

// Memory of the device: a pointer and how many elements are there.
template <class T>
class Global {
 public:
  Global() = default;
  Global(T* data, int64_t count) : data_(data), count_(data == nullptr ? 0 : count) {}
  T& operator[](int64_t n) const {
    check(n, 1);
    return data_[n];
  }
  template <class Vector>
  Vector vector(int64_t n) const {
    check(n, static_cast<int64_t>(sizeof(Vector) / sizeof(T)));
    if (reinterpret_cast<uintptr_t>(data_ + n) % sizeof(Vector) != 0) throw Fault("a vector access that is not aligned");
    Vector value;
    std::memcpy(&value, data_ + n, sizeof(Vector));
    return value;
  }
  explicit operator bool() const { return data_ != nullptr; }
  // The same memory as elements of another type, as many as its bytes hold.
  template <class U>
  Global<U> as() const {
    return {reinterpret_cast<U*>(data_), count_ * static_cast<int64_t>(sizeof(T)) / static_cast<int64_t>(sizeof(U))};
  }
  Global from(int64_t offset, int64_t count) const {
    if (data_ == nullptr) return {};
    if (offset < 0 || count < 0 || offset + count > count_) throw Fault("a part that reaches beyond its memory");
    return {data_ + offset, count};
  }
  operator Global<const T>() const { return {data_, count_}; }

 private:
  void check(int64_t n, int64_t size) const {
    if (n < 0 || n + size > count_) throw Fault("index " + std::to_string(n) + " of " + std::to_string(count_) + " elements in memory");
  }
  T* data_ = nullptr;
  int64_t count_ = 0;
};

// An element of shared memory: knows reads from writes.
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

struct alignas(8) Pair {
  float first, second;
};

template <class T>
class Shared {
 public:
  Shared(T* data, int count) : data_(data), count_(count) {}
  Element<T> operator[](int n) const {
    if (n < 0 || n >= count_) throw Fault("index " + std::to_string(n) + " of " + std::to_string(count_) + " elements in shared memory");
    return Element<T>(data_ + n);
  }
  Pair pair(int n) const {
    if (reinterpret_cast<uintptr_t>(data_ + n) % sizeof(Pair) != 0) throw Fault("a pair that is not aligned");
    return {(*this)[n], (*this)[n + 1]};
  }

 private:
  T* data_;
  int count_;
};

// `count` elements of the block's shared memory from byte `offset` on.
template <class T>
Shared<T> shared(int offset, int count) {
  return {reinterpret_cast<T*>(Block::current().shared(static_cast<size_t>(offset), static_cast<size_t>(count) * sizeof(T), alignof(T))), count};
}

struct Stream {};

template <class Args>
void launch(void (*kernel)(Args), Grid grid, int threads, int shared_bytes, Stream, const Args& args) {
  // "... [with Args = capsfast::cuda::TileArgs]"
  std::string name = __PRETTY_FUNCTION__;
  name = name.substr(name.find("Args = ") + 7);
  Block::launch(grid, threads, static_cast<size_t>(shared_bytes), [&] { kernel(args); }, name.substr(0, name.find_first_of("<;]")));
}

}  // namespace capsfast::gpu

#include "mma_host.h"
