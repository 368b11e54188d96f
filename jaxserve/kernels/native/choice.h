// The choice of a kernel for a product: by rules that hold for most processors, or as timed on this one (time_matmul.cc). Custom calls
// and the timing alone include this file: they are compiled for any machine.

#pragma once

#include <atomic>
#include <cstdint>
#include <string_view>

#include "groups.h"
#include "matmul.h"
#include "variants.h"

namespace jaxserve {

// The maximum numbers of rows for which the kernels of few.h are fastest: for codes, for bfloat16 numbers, and for codes that are
// multiplied as bytes on AVX512-VNNI.
constexpr int64_t kFewCodes = 4, kFewNumbers = 8, kFewBytes = 8;
constexpr int64_t kLong = 768;    // minimum number of inputs for kFewBytes
constexpr int64_t kShort = 2048;  // inputs with which four rows of the weight and four of x, in bfloat16, fill L1
// The maximum number of rows for integers of the matrix unit in segments of 32 inputs, each of which is scaled on its own.
constexpr int64_t kShortSegments = 64;

// Returns a variant's kernel for rows in bfloat16 or float32, or null if there is none that may serve.
inline const Multiplier* kernel_of(Variant variant, [[maybe_unused]] bool bfloat16, Work work) {
  if (!may(work, variant)) return nullptr;
  switch (variant) {
    case kPortable: return &kMatmulFloatBaseline;
#if defined(__x86_64__)
    case kAvx2: return bfloat16 ? &kMatmulAvx2 : &kMatmulFloatAvx2;
    case kAvx2Few: return bfloat16 ? &kMatmulFewAvx2 : nullptr;
    case kAvx512: return &kMatmulFloatAvx512;
    case kAvx512Bf16: return bfloat16 ? &kMatmulAvx512 : nullptr;
    case kVnni: return bfloat16 ? &kMatmulVnni : nullptr;
#if defined(__linux__)
    case kAmx: return bfloat16 ? &kMatmulAmx : nullptr;
    case kAmxInt8: return bfloat16 && work != product_of(true, 16) ? &kMatmulAmxInt8 : nullptr;
#endif
#endif
    default: return nullptr;
  }
}

// Returns whether the weight has long rows in groups of whole segments of 128 inputs.
inline bool is_wide(const Weight& w) { return (w.groups == 1 || w.group % (4 * kStep) == 0) && w.inner >= kLong; }

// Returns the variant that is fastest by the rules for rows of x and a weight, or kVariants if none may serve.
inline Variant usual(bool bfloat16, [[maybe_unused]] int64_t rows, const Weight& w) {
  const auto there = [&](Variant variant) { return kernel_of(variant, bfloat16, product_of(bfloat16, w.bits)) != nullptr; };
#if defined(__x86_64__)
  const bool codes = w.bits != 16, vnni = there(kVnni);
  const bool bytes = vnni && (w.bits == 8 || w.bits == 4) && is_wide(w);
  const bool few = rows <= (bytes ? kFewBytes : codes ? kFewCodes : kFewNumbers);
  if (!(few && codes)) {
    if (there(kAmxInt8) && (rows <= kShortSegments || Segments(w).steps > 1)) return kAmxInt8;
    if (there(kAmx)) return kAmx;
  }
  const bool panels = there(kAvx512Bf16);
  if (vnni) {
    static const bool halved = halves_avx512();
    const bool from_l1 = halved && !codes && w.inner <= kShort;  // for any number of rows L1 is as fast as the multipliers
    if (few || from_l1 || !panels) return kVnni;
  }
  if (panels) return kAvx512Bf16;
  if (bfloat16 && (codes || !there(kAvx512))) {
    if (there(kAvx2Few) && few) return kAvx2Few;
    if (there(kAvx2)) return kAvx2;
  }
#endif
  // None of these is left, or none is made for these operands: any that may serve is right.
  int variant = 0;
  while (variant < kVariants && !there(static_cast<Variant>(variant))) ++variant;
  return static_cast<Variant>(variant);
}

// The numbers of rows for which kernels are timed. Each stands for those above the one before it, the last for all that follow.
constexpr int64_t kTimedRows[] = {1, 2, 4, 8, 16, 32, 64, 128, 512};
constexpr int64_t kTimedCounts = sizeof(kTimedRows) / sizeof(*kTimedRows);
constexpr int kTimedBits[] = {16, 8, 4, 3};
constexpr int64_t kTimedPrecisions = sizeof(kTimedBits) / sizeof(*kTimedBits);

// Variants that were clearly faster than the usual ones when this machine timed them, plus 1, by precision, width and rows; or 0.
inline std::atomic<int> preferred[kTimedPrecisions][2][kTimedCounts] = {};

inline std::atomic<int>& preference(int bits, bool wide, int64_t rows) {
  int64_t count = 0;
  while (count + 1 < kTimedCounts && kTimedRows[count] < rows) ++count;
  return preferred[product_of(true, bits) - kProduct][wide][count];
}

// Returns the named variant, or kVariants.
inline Variant variant_of(std::string_view name) {
  int variant = 0;
  while (variant < kVariants && name != kVariantNames[variant]) ++variant;
  return static_cast<Variant>(variant);
}

inline bool prefer(std::string_view name, int bits, bool wide, int64_t rows) {
  const Variant variant = variant_of(name);
  if (variant == kVariants || kernel_of(variant, true, product_of(true, bits)) == nullptr) return false;
  preference(bits, wide, rows).store(variant + 1, std::memory_order_relaxed);
  return true;
}

// Returns the named variant, or the fastest one if the name is empty. Returns null if it may not serve for these operands. In each
// variant a row's result does not depend on the other rows. The choice of the variant may depend on the number of rows.
inline const Multiplier* choose(std::string_view name, bool bfloat16, int64_t rows, const Weight& w) {
  const auto kernel = [&](Variant variant) {
    return variant == kVariants ? nullptr : kernel_of(variant, bfloat16, product_of(bfloat16, w.bits));
  };
  if (!name.empty()) return kernel(variant_of(name));
  if (const int timed = bfloat16 ? preference(w.bits, is_wide(w), rows).load(std::memory_order_relaxed) : 0) {
    if (const Multiplier* preferred = kernel(static_cast<Variant>(timed - 1))) return preferred;
  }
  return kernel(usual(bfloat16, rows, w));
}

}  // namespace jaxserve
