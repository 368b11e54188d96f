// What the machine has. For the custom calls alone, which are compiled for any machine and choose at run time.

#pragma once

#include "rows.h"

namespace jaxserve {

#if defined(__x86_64__)
inline bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

inline bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
#endif

inline const RowFunctions& row_functions() {
#if defined(__x86_64__)
  if (has_avx512()) return kRowsAvx512;
  if (has_avx2()) return kRowsAvx2;
#endif
  return kRowsBaseline;
}

}  // namespace jaxserve
