#include "isa.h"

#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace capsfast {

namespace portable {
template <class T>
const Kernels<T>& table(bool tiles);
}
#if CAPSFAST_X86
namespace avx2 {
template <class T>
const Kernels<T>& table(bool tiles);
}
namespace avx512 {
template <class T>
const Kernels<T>& table(bool tiles);
}
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
const Kernels<T>& kernels(Isa which, bool tiles) {
#if CAPSFAST_X86
  if (which == Isa::avx512) return avx512::table<T>(tiles);
  if (which == Isa::avx2) return avx2::table<T>(tiles);
#endif
  (void)which;
  return portable::table<T>(tiles);
}

template const Kernels<float>& kernels<float>(Isa, bool);
template const Kernels<double>& kernels<double>(Isa, bool);

}  // namespace capsfast
