// The outputs of products on the matrix unit. A tile of sums [kTile outputs, kTile rows of x] is transposed when it is written to y.
// Only for matmul_amx.cc and matmul_amx_int8.cc, with AVX512-BF16.

#pragma once

#include <immintrin.h>

#include "matmul.h"
#include "transpose.h"

namespace jaxserve {
namespace {

constexpr int64_t kTile = 16;             // rows of a tile
constexpr int64_t kPair = 2 * kTile;      // outputs that are computed together
constexpr int64_t kSums = kTile * kTile;  // values of a tile of sums

inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }

inline __m512i bits_of(__m512bh x) { return reinterpret_cast<__m512i>(x); }

// Returns two neighbouring sums of 16 rows, rounded to bfloat16, as words.
inline __m512i words_of(const float* sums) {
  alignas(64) static constexpr uint16_t kAlternating[32] = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23,
                                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512bh both = _mm512_cvtne2ps_pbh(_mm512_load_ps(sums + kTile), _mm512_load_ps(sums));
  return _mm512_permutexvar_epi16(_mm512_load_si512(kAlternating), bits_of(both));
}

// Writes the rows [row, row + rows) of y for the outputs [out, out + kPair), from the tiles of sums of the first and of the last
// kTile outputs.
inline void write_outputs(const Matmul& m, const float* first, const float* last, int64_t out, int64_t row, int64_t rows) {
  const int64_t outs = m.w.out - out;
  const __mmask32 mask = outs >= kPair ? ~0u : (1u << outs) - 1;
  __m512i low[kTile], high[kTile];
  if (m.y_bfloat16) {
    uint16_t* y = static_cast<uint16_t*>(m.y) + row * m.w.out + out;
    for (int64_t i = 0; i < kTile / 2; ++i) {
      low[i] = words_of(first + 2 * i * kTile);
      low[kTile / 2 + i] = words_of(last + 2 * i * kTile);
    }
    transpose(low);
    for (int64_t r = 0; r < rows; ++r) _mm512_mask_storeu_epi16(y + r * m.w.out, mask, low[r]);
    return;
  }
  float* y = static_cast<float*>(m.y) + row * m.w.out + out;
  for (int64_t i = 0; i < kTile; ++i) {
    low[i] = _mm512_load_si512(first + i * kTile);
    high[i] = _mm512_load_si512(last + i * kTile);
  }
  transpose(low);
  transpose(high);
  for (int64_t r = 0; r < rows; ++r, y += m.w.out) {
    _mm512_mask_storeu_epi32(y, static_cast<__mmask16>(mask), low[r]);
    _mm512_mask_storeu_epi32(y + kTile, static_cast<__mmask16>(mask >> kTile), high[r]);
  }
}

}  // namespace
}  // namespace jaxserve
