// Rounding of x to integers (integers.h) on AVX-512. Only for files that are compiled once per instruction set (vectors.h).

#pragma once

#include <immintrin.h>

#include "integers.h"
#include "matmul.h"

namespace jaxserve {
namespace {

// Writes the integers of a segment of at most 4 steps to `words`, and returns their Base. Only the first `inputs` numbers exist;
// zeros stand for the others.
inline Base in_words(const uint16_t* x, int64_t inputs, int64_t steps, int bits, __m512i (&words)[4]) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  __m512 even[4], odd[4], largest = _mm512_setzero_ps(), poison = _mm512_setzero_ps();
  for (int64_t i = 0; i < steps; ++i, inputs -= kStep) {
    const __mmask32 mask = inputs >= kStep ? ~0u : inputs > 0 ? (1u << inputs) - 1 : 0;
    const __m512i pairs = _mm512_maskz_loadu_epi16(mask, x + i * kStep);
    even[i] = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
    odd[i] = _mm512_castsi512_ps(_mm512_and_si512(pairs, upper));
    largest = _mm512_max_ps(largest, _mm512_max_ps(_mm512_abs_ps(even[i]), _mm512_abs_ps(odd[i])));
    poison = _mm512_fmadd_ps(_mm512_add_ps(even[i], odd[i]), _mm512_setzero_ps(), poison);  // NaN or infinity times 0 is NaN
  }
  const Rounding rounding(_mm512_reduce_max_ps(largest), _mm512_reduce_add_ps(poison));
  const __m512 factor = _mm512_set1_ps(rounding.factor);
  __m512i sum = _mm512_setzero_si512();
  for (int64_t i = 0; i < steps; ++i) {
    const __m512i first = _mm512_cvtps_epi32(_mm512_mul_ps(even[i], factor));
    const __m512i second = _mm512_cvtps_epi32(_mm512_mul_ps(odd[i], factor));
    words[i] = _mm512_mask_blend_epi16(0xaaaaaaaa, first, _mm512_slli_epi32(second, 16));
    sum = _mm512_add_epi32(sum, _mm512_add_epi32(first, second));
  }
  return {bits, rounding.scale, _mm512_reduce_add_epi32(sum)};
}

// Stores words as bytes in the order of the unpacked codes. For codes of 8 bits that is the order of the inputs. For fewer bits
// each number of the segment's first half is followed by the number at the same place in the second half.
inline void store_bytes(const __m512i (&words)[4], int64_t steps, int bits, uint8_t* to) {
  if (bits == 8) {
    for (int64_t i = 0; i < steps; ++i) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i * 32), _mm512_cvtepi16_epi8(words[i]));
    }
  } else if (steps == 1) {
    const __m256i first = _mm512_castsi512_si256(words[0]), second = _mm512_extracti64x4_epi64(words[0], 1);
    const __m256i lower = _mm256_and_si256(first, _mm256_set1_epi16(255));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_or_si256(lower, _mm256_slli_epi16(second, 8)));
  } else {
    for (int64_t i = 0; i < steps / 2; ++i) {
      const __m512i lower = _mm512_and_si512(words[i], _mm512_set1_epi16(255));
      _mm512_storeu_si512(to + i * 64, _mm512_or_si512(lower, _mm512_slli_epi16(words[i + steps / 2], 8)));
    }
  }
}

}  // namespace
}  // namespace jaxserve
