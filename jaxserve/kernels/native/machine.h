// The instruction sets of the machine. Only the custom calls include this file: they are compiled for any machine, and choose
// kernels at run time.

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

// Returns whether the processor computes 512 bits in two passes of 256 bits: Zen 4, of AMD's family 25.
inline bool halves_avx512() {
  unsigned eax = 0, ebx, ecx, edx;
  __get_cpuid(1, &eax, &ebx, &ecx, &edx);
  return (eax >> 8 & 15) + (eax >> 20 & 255) == 25;
}

inline bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

#if defined(__linux__)
// Returns whether the machine has the matrix unit and AVX512-BF16, which its kernels need too. A virtual machine may have only one
// of them.
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
