// Copies strided tensors of any dtype to contiguous T, and back.
#pragma once

#include "../../cpu/kernel.h"
#include "../../math/half.h"
#include "../problem.h"

namespace capsfast::CAPSFAST_TARGET {

template <class T>
CAPSFAST_INLINE T read(const View& view, int64_t offset) {
  switch (view.storage) {
    case Storage::f32:
      return static_cast<T>(static_cast<const float*>(view.data)[offset]);
    case Storage::f64:
      return static_cast<T>(static_cast<const double*>(view.data)[offset]);
    case Storage::bf16:
      return static_cast<T>(bf16_to_float(static_cast<const uint16_t*>(view.data)[offset]));
    default:
      return static_cast<T>(half_to_float(static_cast<const uint16_t*>(view.data)[offset]));
  }
}

template <class T>
CAPSFAST_INLINE void write(const View& view, int64_t offset, T x) {
  switch (view.storage) {
    case Storage::f32:
      static_cast<float*>(view.data)[offset] = static_cast<float>(x);
      break;
    case Storage::f64:
      static_cast<double*>(view.data)[offset] = static_cast<double>(x);
      break;
    case Storage::bf16:
      static_cast<uint16_t*>(view.data)[offset] = float_to_bf16(static_cast<float>(x));
      break;
    default:
      static_cast<uint16_t*>(view.data)[offset] = float_to_half(static_cast<float>(x));
  }
}

template <class T>
inline constexpr Storage kStorage = sizeof(T) == 4 ? Storage::f32 : Storage::f64;

// Copies the box [n[0]][n[1]][n[2]] of `view` that begins at element `offset`, with strides s, to contiguous `out`.
// Adjacent rows are copied as one.
template <class T>
void gather(const View& view, int64_t offset, const int64_t (&n)[3], const int64_t (&s)[3], T* out) {
  if (s[2] == 1 && s[1] == n[2] && n[1] > 1) return gather<T>(view, offset, {1, n[0], n[1] * n[2]}, {0, s[0], 1}, out);
  for (int64_t a = 0; a < n[0]; ++a) {
    for (int64_t b = 0; b < n[1]; ++b) {
      const int64_t from = offset + a * s[0] + b * s[1];
      if (view.storage == kStorage<T> && s[2] == 1) {
        __builtin_memcpy(out, static_cast<const T*>(view.data) + from, static_cast<size_t>(n[2]) * sizeof(T));
      } else if (view.storage == Storage::bf16 && s[2] == 1) {
        const uint16_t* source = static_cast<const uint16_t*>(view.data) + from;
        for (int64_t c = 0; c < n[2]; ++c) out[c] = static_cast<T>(bf16_to_float(source[c]));
      } else if (view.storage == Storage::f16 && s[2] == 1) {
        const uint16_t* source = static_cast<const uint16_t*>(view.data) + from;
        for (int64_t c = 0; c < n[2]; ++c) out[c] = static_cast<T>(half_to_float(source[c]));
      } else if (view.storage == kStorage<T>) {
        const T* source = static_cast<const T*>(view.data) + from;
        for (int64_t c = 0; c < n[2]; ++c) out[c] = source[c * s[2]];
      } else {
        for (int64_t c = 0; c < n[2]; ++c) out[c] = read<T>(view, from + c * s[2]);
      }
      out += n[2];
    }
  }
}

// The opposite of gather().
template <class T>
void scatter(const View& view, int64_t offset, const int64_t (&n)[3], const int64_t (&s)[3], const T* in) {
  if (s[2] == 1 && s[1] == n[2] && n[1] > 1) return scatter<T>(view, offset, {1, n[0], n[1] * n[2]}, {0, s[0], 1}, in);
  for (int64_t a = 0; a < n[0]; ++a) {
    for (int64_t b = 0; b < n[1]; ++b) {
      const int64_t to = offset + a * s[0] + b * s[1];
      if (view.storage == kStorage<T> && s[2] == 1) {
        __builtin_memcpy(static_cast<T*>(view.data) + to, in, static_cast<size_t>(n[2]) * sizeof(T));
      } else if (view.storage == Storage::bf16 && s[2] == 1) {
        uint16_t* target = static_cast<uint16_t*>(view.data) + to;
        for (int64_t c = 0; c < n[2]; ++c) target[c] = float_to_bf16(static_cast<float>(in[c]));
      } else if (view.storage == Storage::f16 && s[2] == 1) {
        uint16_t* target = static_cast<uint16_t*>(view.data) + to;
        for (int64_t c = 0; c < n[2]; ++c) target[c] = float_to_half(static_cast<float>(in[c]));
      } else if (view.storage == kStorage<T>) {
        T* const target = static_cast<T*>(view.data) + to;
        for (int64_t c = 0; c < n[2]; ++c) target[c * s[2]] = in[c];
      } else {
        for (int64_t c = 0; c < n[2]; ++c) write<T>(view, to + c * s[2], in[c]);
      }
      in += n[2];
    }
  }
}

// Whether a box of gather() is contiguous and of type T, so that it can be used in place.
template <class T>
bool is_run(const View& view, const int64_t (&n)[3], const int64_t (&s)[3]) {
  return view.storage == kStorage<T> && (n[2] == 1 || s[2] == 1) && (n[1] == 1 || s[1] == n[2]) &&
         (n[0] == 1 || s[0] == n[1] * n[2]);
}

}  // namespace capsfast::CAPSFAST_TARGET
