// The instruction sets of the machine (variants.h).

#pragma once

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "attention.h"
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
// Null where the compiler does not know the matrix unit: build.py then leaves its kernels out.
extern const Multiplier kMatmulAmx __attribute__((weak));
extern const Multiplier kMatmulAmxInt8 __attribute__((weak));
__attribute__((weak)) bool amx_available();
__attribute__((weak)) bool amx_int8_available();
__attribute__((weak)) void attend_amx(const Attention&, const Tile&, const Tile* after, float* scratch);

// Returns whether the machine has the matrix unit and AVX512-BF16, which its kernels need too. A virtual machine may have only one
// of them.
inline bool has_amx() { return amx_available && has_avx512() && __builtin_cpu_supports("avx512bf16") && amx_available(); }
inline bool has_amx_int8() { return amx_int8_available && has_amx() && amx_int8_available(); }
#endif
#endif

}  // namespace jaxserve
