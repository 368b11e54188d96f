// What kernels compute, in which variants, and which of these may serve: those that the machine can run, unless their check there
// (check.h) has left them out. Custom calls choose among these at run time. They and the checks alone include this file: they are
// compiled for any machine.

#pragma once

#include <atomic>
#include <cstdint>

#include "machine.h"

namespace jaxserve {

// What a kernel computes, with the precisions of its operands.
enum Work : int {
  kProduct,                     // eight, of which product_of returns one
  kAttention = kProduct + 8,    // four, of which attention_of returns one
  kDecoding = kAttention + 4,   // attention of decode rows in bfloat16
  kRowFunctions,
  kDrawing,
  kRating,
  kRounding,
  kReleasing,                   // giving pages back to the operating system
  kWorks,
};

// The instruction sets, and methods, that kernels are made for; fastest first for most work.
enum Variant : int { kAmxInt8, kAmx, kVnni, kAvx512Bf16, kAvx512, kAvx2Few, kAvx2, kPortable, kVariants };
constexpr const char* kVariantNames[kVariants] = {"amxint8", "amx", "vnni", "avx512bf16", "avx512", "avx2few", "avx2", "portable"};

// Returns the work of products of rows in bfloat16 or float32 with a weight of 16, 8, 4 or 3 bits.
inline Work product_of(bool bfloat16, int bits) {
  const int by_bits = bits == 16 ? 0 : bits == 8 ? 1 : bits == 4 ? 2 : 3;
  return static_cast<Work>(kProduct + by_bits + (bfloat16 ? 0 : 4));
}

// Returns the work of attention of queries in bfloat16 or float32 over pages of the same precision, or of codes.
inline Work attention_of(bool bfloat16, bool int8) { return static_cast<Work>(kAttention + (bfloat16 ? 0 : 1) + (int8 ? 2 : 0)); }

// Bits of the variants that are left out, by work.
inline std::atomic<uint32_t> left_out[kWorks] = {};

inline void leave_out(Work work, Variant variant) { left_out[work].fetch_or(1u << variant, std::memory_order_relaxed); }

// Returns whether the machine can run the variant.
inline bool has([[maybe_unused]] Work work, Variant variant) {
  switch (variant) {
    case kPortable: return true;
#if defined(__x86_64__)
    case kAvx2Few:
    case kAvx2: return has_avx2();
    case kAvx512: return has_avx512();
    case kAvx512Bf16: return has_avx512() && __builtin_cpu_supports("avx512bf16");
    case kVnni: return has_avx512() && __builtin_cpu_supports("avx512vnni") && (work >= kAttention || __builtin_cpu_supports("avx512bf16"));
#if defined(__linux__)
    case kAmx: {
      static const bool amx = has_amx();  // once, because cpuid is slow in a virtual machine
      return amx;
    }
    case kAmxInt8: {
      static const bool amx_int8 = has_amx_int8();
      return amx_int8;
    }
#endif
#endif
    default: return false;
  }
}

// Returns whether the variant may serve.
inline bool may(Work work, Variant variant) {
  return has(work, variant) && (left_out[work].load(std::memory_order_relaxed) >> variant & 1) == 0;
}

inline const RowFunctions& row_functions() {
#if defined(__x86_64__)
  if (may(kRowFunctions, kAvx512)) return kRowsAvx512;
  if (may(kRowFunctions, kAvx2)) return kRowsAvx2;
#endif
  return kRowsBaseline;
}

}  // namespace jaxserve
