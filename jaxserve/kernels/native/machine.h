// What the machine has. For the custom calls alone, which are compiled for any machine and choose at run time.

#pragma once

#include "matmul.h"
#include "rows.h"

namespace jaxserve {

#if defined(__x86_64__)
inline bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
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
