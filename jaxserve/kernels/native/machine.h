// The capabilities of the machine. Only the custom calls use this: they are compiled for any machine and choose at run time.

#pragma once

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "matmul.h"
#include "rows.h"

namespace jaxserve {

#if defined(__x86_64__)
inline bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

// Whether 512 bits take two passes through the units that compute: Zen 4, of AMD's family 25.
inline bool halves_avx512() {
  unsigned eax = 0, ebx, ecx, edx;
  __get_cpuid(1, &eax, &ebx, &ecx, &edx);
  return (eax >> 8 & 15) + (eax >> 20 & 255) == 25;
}

inline bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

#if defined(__linux__)
// The matrix unit and what is computed around it; a virtual machine may show one without the other.
inline bool has_amx() { return has_avx512() && __builtin_cpu_supports("avx512bf16") && amx_available(); }
#endif
#endif

inline const RowFunctions& row_functions() {
#if defined(__x86_64__)
  if (has_avx512()) return kRowsAvx512;
  if (has_avx2()) return kRowsAvx2;
#endif
  return kRowsBaseline;
}

}  // namespace jaxserve
