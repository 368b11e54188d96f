// The left operand x of the product in panels (panels.h): bfloat16 numbers, or integers with scales (integers.h) for codes.

#pragma once

#include "groups.h"
#include "integers.h"
#if LANES == 16
#include "integers512.h"
#endif
#include "matmul.h"
#include "panels.h"

namespace jaxserve {
namespace {

inline uint32_t pair_at(const uint16_t* from) {
  uint32_t pair;
  __builtin_memcpy(&pair, from, 4);
  return pair;
}

// The layout of packed x: elements [slices, rows, elements], and for codes also the scales [segments, rows] and the starts
// [segments, rows] of `Base`. Slices come first, because all rows of a slice are used together.
struct Packed {
  Segments segments;
  int64_t rows, slices, elements;

  explicit Packed(const Matmul& m)
      : segments(m.w), rows(m.rows), slices(ceil_div(m.w.inner, inputs_of(m.w.bits))), elements(elements_of(m.w.bits)) {}

  int64_t at(int64_t slice, int64_t row) const { return (slice * rows + row) * elements; }
  const float* scales(const int32_t* x) const { return reinterpret_cast<const float*>(x + at(slices, 0)); }
  const int32_t* starts(const int32_t* x) const { return x + at(slices, 0) + segments.number * rows; }
};

size_t packed_bytes(const Matmul& m) {
  const Packed layout(m);
  return static_cast<size_t>(layout.at(layout.slices, 0) + (m.w.bits == 16 ? 0 : layout.segments.number * layout.rows * 2)) * 4;
}

// Memory for numbers of x that are padded with zeros from `count` to `size`.
struct Filled {
  alignas(32) uint16_t numbers[4 * kStep];

  const uint16_t* fill(const uint16_t* x, int64_t count, int64_t size) {
    if (count >= size) return x;
    for (int64_t i = 0; i < size; ++i) numbers[i] = i < count ? x[i] : 0;
    return numbers;
  }
};

// Writes a segment as integers, in the order of the unpacked codes, and returns their Base. For codes of 8 bits four bytes are four
// neighbouring inputs. For fewer bits they are a pair of the segment's first half and the pair at the same place in the second
// half, alternating. As words (AVX2, 8 bits) each 32 inputs are the even ones, then the odd ones.
#if LANES == 16
Base pack_segment(const uint16_t* x, int64_t inputs, int64_t steps, int bits, int32_t* elements) {
  __m512i words[4];
  const Base base = in_words(x, inputs, steps, bits, words);
  store_bytes(words, steps, bits, reinterpret_cast<uint8_t*>(elements));
  return base;
}
#else
inline __m256i load_words(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
inline __m256 even(__m256i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); }
inline __m256 odd(__m256i x) { return _mm256_castsi256_ps(_mm256_blend_epi16(x, _mm256_setzero_si256(), 0x55)); }

inline float largest_of(__m256 x) {
  __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_max_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}

// Returns the low words of a and b, alternating.
inline __m256i low_words(__m256i a, __m256i b) {
  return _mm256_blend_epi16(a, _mm256_slli_epi32(b, 16), 0xaa);
}

Base pack_segment(const uint16_t* x, int64_t inputs, int64_t steps, int bits, int32_t* elements) {
  Filled rest;
  x = rest.fill(x, inputs, steps * kStep);
  constexpr int64_t kMaxVectors = 8;  // of 16 numbers
  const __m256 sign = _mm256_set1_ps(-0.0f);
  __m256 largest = _mm256_setzero_ps(), poison = _mm256_setzero_ps();
  for (int64_t i = 0; i < 2 * steps; ++i) {
    const __m256 a = even(load_words(x + 16 * i)), b = odd(load_words(x + 16 * i));
    largest = _mm256_max_ps(largest, _mm256_max_ps(_mm256_andnot_ps(sign, a), _mm256_andnot_ps(sign, b)));
    poison = _mm256_fmadd_ps(_mm256_add_ps(a, b), _mm256_setzero_ps(), poison);  // NaN or infinity times 0 is NaN
  }
  float poison_sum = 0;
  for (int i = 0; i < 8; ++i) poison_sum += reinterpret_cast<const float*>(&poison)[i];
  const Rounding rounding(largest_of(largest), poison_sum);
  const __m256 factor = _mm256_set1_ps(rounding.factor);
  __m256i first[kMaxVectors], second[kMaxVectors], sum = _mm256_setzero_si256();
  for (int64_t i = 0; i < 2 * steps; ++i) {
    first[i] = _mm256_cvtps_epi32(_mm256_mul_ps(even(load_words(x + 16 * i)), factor));
    second[i] = _mm256_cvtps_epi32(_mm256_mul_ps(odd(load_words(x + 16 * i)), factor));
    sum = _mm256_add_epi32(sum, _mm256_add_epi32(first[i], second[i]));
  }
  auto* to = reinterpret_cast<__m256i*>(elements);
  if (bits == 8) {
    for (int64_t i = 0; i < 2 * steps; i += 2) {
      _mm256_storeu_si256(to++, _mm256_permute4x64_epi64(_mm256_packs_epi32(first[i], first[i + 1]), 0xd8));
      _mm256_storeu_si256(to++, _mm256_permute4x64_epi64(_mm256_packs_epi32(second[i], second[i + 1]), 0xd8));
    }
  } else {
    const __m256i bytes = _mm256_set1_epi16(255);
    for (int64_t i = 0; i < steps; ++i) {
      const __m256i a = low_words(first[i], second[i]), b = low_words(first[i + steps], second[i + steps]);
      _mm256_storeu_si256(to++, _mm256_or_si256(_mm256_and_si256(a, bytes), _mm256_slli_epi16(b, 8)));
    }
  }
  int32_t total = 0;
  for (int i = 0; i < 8; ++i) total += reinterpret_cast<const int32_t*>(&sum)[i];
  return {bits, rounding.scale, total};
}
#endif

void pack(const Matmul& m, int64_t row, void* packed) {
  const Weight& w = m.w;
  const Packed layout(m);
  const int64_t steps = w.bits == 16 ? 1 : layout.segments.steps, size = steps * kStep, inputs = inputs_of(w.bits);
  auto* elements = static_cast<int32_t*>(packed);
  auto* scales = const_cast<float*>(layout.scales(elements));
  auto* starts = const_cast<int32_t*>(layout.starts(elements));
  for (const int64_t end = row + kPackRows < m.rows ? row + kPackRows : m.rows; row < end; ++row) {
    const uint16_t* x = static_cast<const uint16_t*>(m.x) + row * w.inner;
    for (int64_t i = 0; i < layout.slices * inputs; i += size) {
      const int64_t element = i % inputs / in_element(w.bits), segment = i / size * layout.rows + row;
      int32_t* to = elements + layout.at(i / inputs, row);
      if (w.bits == 16) {
        Filled rest;
        const uint16_t* from = rest.fill(x + i, w.inner - i, size);
        for (int j = 0; j < size / 2; ++j) {
          elements_of_pair(pair_at(from + 2 * j), [to, at = i % inputs / 2 + j](int chain, uint32_t numbers) {
            to[chain * kChain + at] = static_cast<int32_t>(numbers);
          });
        }
      } else if (i < w.inner) {
        const Base base = pack_segment(x + i, w.inner - i, steps, w.bits, to + element);
        scales[segment] = base.scale;
        starts[segment] = base.start;
      } else {  // beyond the last segment
        __builtin_memset(to + element, 0, static_cast<size_t>(size) * 4 / in_element(w.bits));
      }
    }
  }
}

}  // namespace
}  // namespace jaxserve
