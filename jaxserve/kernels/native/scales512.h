// The scales and zeros of a quantised weight on AVX-512. Only for files that are compiled once per instruction set (vectors.h).

#pragma once

#include <immintrin.h>

#include <cstdint>

namespace jaxserve {
namespace {

// Widens `count` scales or zeros from `index` on to float32. Up to 15 more are written.
inline void widen_all(const void* numbers, bool wide, int64_t index, int64_t count, float* to) {
  for (; count > 0; index += 16, to += 16, count -= 16) {
    const __mmask16 mask = static_cast<__mmask16>(count >= 16 ? 0xffff : (1 << count) - 1);
    if (wide) {
      _mm512_storeu_ps(to, _mm512_maskz_loadu_ps(mask, static_cast<const float*>(numbers) + index));
    } else {
      const __m256i narrow = _mm256_maskz_loadu_epi16(mask, static_cast<const uint16_t*>(numbers) + index);
      _mm512_storeu_si512(to, _mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
    }
  }
}

}  // namespace
}  // namespace jaxserve
