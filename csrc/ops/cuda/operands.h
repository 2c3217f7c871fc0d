// The arguments of a call as kernels take them: tensors with their strides, sizes, options.
#pragma once

#include <cstdint>
#include <limits>

#include "../../cuda/device.h"
#include "../../math/half.h"
#include "../routing.h"

namespace capsfast::cuda {

using gpu::Global;

// 16-bit elements as they are stored. Their sums are formed in float (see WideOf).
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

template <class T>
struct Extreme {
  static constexpr T lowest = std::numeric_limits<T>::lowest(), infinity = std::numeric_limits<T>::infinity();
};

template <class E>
struct WideOf {
  using type = float;
};
template <>
struct WideOf<double> {
  using type = double;
};

CAPSFAST_DEVICE float wide(float x) { return x; }
CAPSFAST_DEVICE double wide(double x) { return x; }
CAPSFAST_DEVICE float wide(BFloat16 x) { return bf16_to_float(x.bits); }
CAPSFAST_DEVICE float wide(Float16 x) { return half_to_float(x.bits); }

// kCount neighbouring elements that are loaded or stored at once.
template <class E, int kCount>
struct alignas(kCount * sizeof(E)) Run {
  E value[kCount];
};

// A tensor whose element type is known only at run time; strides in elements. `data` is null if it is absent.
struct Operand {
  Global<unsigned char> data;
  Storage storage = Storage::f32;
  int64_t stride[4] = {0, 0, 0, 0};

  template <class T>
  CAPSFAST_DEVICE T read(int64_t at) const {
    switch (storage) {
      case Storage::f32:
        return static_cast<T>(data.as<float>()[at]);
      case Storage::f64:
        return static_cast<T>(data.as<double>()[at]);
      case Storage::bf16:
        return static_cast<T>(wide(data.as<BFloat16>()[at]));
      case Storage::f16:
        return static_cast<T>(wide(data.as<Float16>()[at]));
    }
    return T(0);
  }
  template <class T>
  CAPSFAST_DEVICE void write(int64_t at, T value) const {
    switch (storage) {
      case Storage::f32:
        data.as<float>()[at] = static_cast<float>(value);
        return;
      case Storage::f64:
        data.as<double>()[at] = static_cast<double>(value);
        return;
      case Storage::bf16:
        data.as<BFloat16>()[at] = {float_to_bf16(static_cast<float>(value))};
        return;
      case Storage::f16:
        data.as<Float16>()[at] = {float_to_half(static_cast<float>(value))};
        return;
    }
  }
};

// A bool matrix. If `data` is null everything is valid.
struct Mask {
  Global<const uint8_t> data;
  int64_t stride[2] = {0, 0};

  CAPSFAST_DEVICE bool at(int64_t row, int64_t column) const {
    return !data || data[row * stride[0] + column * stride[1]] != 0;
  }
};

// The inputs of a call. `matrix` is the weight [I, J, D, K], whose stride over I is 0 if it is shared, or for
// route_votes the votes [B, I, J, D].
struct Inputs {
  int64_t B, I, J, D, K;
  bool softmax_in, leaky;
  Operand u, matrix;    // u [B, I, K], absent for route_votes
  Operand logits;       // [B, I, J]
  Operand prior;        // [B, J], added to the logits; of a pass alone
  Mask mask, out_mask;  // [B, I], [B, J]
};

}  // namespace capsfast::cuda
