#include "isa.h"

#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace capsfast {

namespace portable {
template <class T>
const Kernels<T>& table();
template <class T>
const Kernels<T>& tile_table();
}  // namespace portable
#if CAPSFAST_X86
namespace avx2 {
template <class T>
const Kernels<T>& table();
template <class T>
const Kernels<T>& tile_table();
}  // namespace avx2
namespace avx512 {
template <class T>
const Kernels<T>& table();
template <class T>
const Kernels<T>& tile_table();
}  // namespace avx512
#endif

static Isa widest() {
#if CAPSFAST_X86
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    return Isa::avx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return Isa::avx2;
#endif
  return Isa::portable;
}

const char* isa_name(Isa which) { return which == Isa::avx512 ? "avx512" : which == Isa::avx2 ? "avx2" : "portable"; }

Isa isa() {
  static const Isa chosen = [] {
    const Isa most = widest();
    const char* asked = std::getenv("CAPSFAST_ISA");
    if (asked == nullptr) return most;
    for (const Isa which : {Isa::portable, Isa::avx2, Isa::avx512}) {
      if (std::strcmp(asked, isa_name(which)) == 0 && which <= most) return which;
    }
    return most;
  }();
  return chosen;
}

template <class T>
const Kernels<T>& kernels(Isa which) {
#if CAPSFAST_X86
  if (which == Isa::avx512) return avx512::table<T>();
  if (which == Isa::avx2) return avx2::table<T>();
#endif
  (void)which;
  return portable::table<T>();
}

template <class T>
const Kernels<T>& tile_kernels(Isa which) {
#if CAPSFAST_X86
  if (which == Isa::avx512) return avx512::tile_table<T>();
  if (which == Isa::avx2) return avx2::tile_table<T>();
#endif
  (void)which;
  return portable::tile_table<T>();
}

template const Kernels<float>& kernels<float>(Isa);
template const Kernels<double>& kernels<double>(Isa);
template const Kernels<float>& tile_kernels<float>(Isa);
template const Kernels<double>& tile_kernels<double>(Isa);

}  // namespace capsfast
