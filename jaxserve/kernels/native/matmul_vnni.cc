// Products of a few rows of bfloat16 at the speed of memory, on AVX512-VNNI and AVX512-BF16.
//
// The structure is that of few.h. bfloat16 numbers are multiplied in pairs. For codes x is rounded to integers (integers.h), and 16
// lanes of 32 bits sum the products. At the end of a segment, of at most 128 inputs, the lanes are converted to float32 and scaled.
//
// If all bytes of a vector belong to one segment, codes are multiplied as bytes, 64 by one instruction. Otherwise they are widened
// to words of 16 bits first, and multiplied 32 by one instruction. Codes are unsigned here. The first lane starts from a value that
// corrects for their offset (`Base`).

#include "matmul.h"

#if defined(__x86_64__)

#include <immintrin.h>

#include "few.h"
#include "integers512.h"
#include "scales512.h"

namespace jaxserve {
namespace {

// The range of sizes of rows of the weight that are read one after another (more than kShortBytes, at most kHalfPage). Within a page
// of memory the hardware foresees a single stream best (Zen 4: 29 GB/s instead of 25). Shorter rows, which small models have, lie in
// the cache, and the processor would wait for the sums of each row.
constexpr int64_t kShortBytes = 1024, kHalfPage = 2048;

// Returns whether codes are multiplied as bytes in segments of `steps` steps: 8 bits in whole vectors, 4 bits in whole units.
constexpr bool in_bytes(int bits, int64_t steps) { return bits == 8 ? steps >= 2 : bits == 4 && steps == 4; }

// Returns the bytes of a segment's integers.
constexpr int64_t integers_bytes(int bits, int64_t steps) { return steps * kStep * (in_bytes(bits, steps) ? 1 : 2); }
int64_t row_bytes(const Weight& w) { return RowLayout(w, integers_bytes(w.bits, Segments(w).steps)).row_bytes(); }

size_t packed_bytes(const Matmul& m) {
  return m.w.bits == 16 ? 0 : static_cast<size_t>(m.rows * row_bytes(m.w));
}

Base pack_segment(const uint16_t* x, int64_t inputs, int64_t steps, int bits, uint8_t* to) {
  __m512i words[4];
  const Base base = in_words(x, inputs, steps, bits, words);
  if (in_bytes(bits, steps)) {
    store_bytes(words, steps, bits, to);
  } else {
    for (int64_t i = 0; i < steps; ++i) _mm512_storeu_si512(to + i * 64, words[i]);
  }
  return base;
}

void pack(const Matmul& m, int64_t row, void* packed) {
  if (m.w.bits == 16) return;  // x needs no packing
  const int64_t steps = Segments(m.w).steps, of_segment = integers_bytes(m.w.bits, steps);
  const RowLayout layout(m.w, of_segment);
  for (const int64_t end = row + kPackRows < m.rows ? row + kPackRows : m.rows; row < end; ++row) {
    const uint16_t* x = static_cast<const uint16_t*>(m.x) + row * m.w.inner;
    layout.write(static_cast<uint8_t*>(packed) + row * layout.row_bytes(), of_segment, [&](int64_t s, uint8_t* to) {
      const int64_t first = s * steps * kStep;
      return pack_segment(x + first, m.w.inner - first, steps, m.w.bits, to);
    });
  }
}

// Returns the sums of the lanes of four vectors.
inline __m128 sums_of(const Floats (&x)[kOuts]) {
  const __m512 a = _mm512_add_ps(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1]));
  const __m512 b = _mm512_add_ps(_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3]));
  const __m512 c = _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
  const __m256 d = _mm256_add_ps(_mm512_castps512_ps256(c), _mm512_extractf32x8_ps(c, 1));
  return _mm_add_ps(_mm256_castps256_ps128(d), _mm256_extractf128_ps(d, 1));
}

inline void write(const Matmul& m, int64_t row, int64_t out, __m128 sums) {
  const int64_t left = m.w.out - out, at = row * m.w.out + out;
  const __mmask8 mask = static_cast<__mmask8>(left >= kOuts ? 15 : (1 << left) - 1);
  if (m.y_bfloat16) {
    const __m128i rounded = reinterpret_cast<__m128i>(_mm_cvtneps_pbh(sums));
    _mm_mask_storeu_epi16(static_cast<uint16_t*>(m.y) + at, mask, rounded);
  } else {
    _mm_mask_storeu_ps(static_cast<float*>(m.y) + at, mask, sums);
  }
}

// Loads 32 bfloat16 numbers, or without `Whole` the first `left` of them and zeros.
template <bool Whole>
inline __m512bh load(const uint8_t* from, int64_t left) {
  const __m512i x = Whole ? _mm512_loadu_si512(from) : _mm512_maskz_loadu_epi16((1u << left) - 1, from);
  return reinterpret_cast<__m512bh>(x);
}

// sums[R, kOuts] += a step of x * a step of the weight, both `at` bytes from the beginning of the rows.
template <int R, bool Whole>
inline void step(const Quad& w, const uint8_t* x, int64_t row_bytes, int64_t at, int64_t left, __m512 (&sums)[R][kOuts]) {
  __m512bh weights[kOuts];
  for (int o = 0; o < kOuts; ++o) {
    w.prefetch(kOuts * at + 64 * o);
    weights[o] = load<Whole>(w.data[o] + at, left);
  }
  for (int r = 0; r < R; ++r) {
    const __m512bh numbers = load<Whole>(x + r * row_bytes + at, left);
    for (int o = 0; o < kOuts; ++o) sums[r][o] = _mm512_dpbf16_ps(sums[r][o], weights[o], numbers);
  }
}

// sums[kOuts] += x * kOuts rows of the weight, one row after another. The order of additions is the same as with `step`. A row's
// additions depend on each other, but the processor begins the next row meanwhile.
inline void rows_in_turn(const Quad& w, const uint8_t* x, int64_t row_bytes, int64_t inner, __m512 (&sums)[kOuts]) {
  for (int o = 0; o < kOuts; ++o) {
    int64_t at = 0, left = inner;
    for (; left >= kStep; at += 2 * kStep, left -= kStep) {
      w.prefetch(o * row_bytes + at);
      sums[o] = _mm512_dpbf16_ps(sums[o], load<true>(w.data[o] + at, left), load<true>(x + at, left));
    }
    if (left) sums[o] = _mm512_dpbf16_ps(sums[o], load<false>(w.data[o] + at, left), load<false>(x + at, left));
  }
}

// Computes y[R, outs] for a bfloat16 weight.
template <int R>
void numbers(const Matmul& m, const uint8_t*, int64_t row, const Part& part, void*) {
  const uint8_t* x = static_cast<const uint8_t*>(m.x) + row * m.w.row_bytes;
  for (int64_t out = part.out; out < part.out + part.outs; out += kOuts) {
    const Quad w = part.quad(m.w, out);
    __m512 sums[R][kOuts] = {};
    if (R == 1 && m.w.row_bytes > kShortBytes && m.w.row_bytes <= kHalfPage) {
      rows_in_turn(w, x, m.w.row_bytes, m.w.inner, sums[0]);
    } else {
      int64_t at = 0, left = m.w.inner;
      for (; left >= kStep; at += 2 * kStep, left -= kStep) step<R, true>(w, x, m.w.row_bytes, at, left, sums);
      if (left) step<R, false>(w, x, m.w.row_bytes, at, left, sums);
    }
    for (int r = 0; r < R; ++r) write(m, row + r, out, sums_of(sums[r]));
  }
}

// Unpacks the codes of a segment of L steps, each step to 32 words. `left` is the number of inputs from the segment's first one on.
// Without `Whole` they may end within the segment.
template <int Bits, int L, bool Whole>
inline void unpack(const uint8_t* row, int64_t segment, int64_t left, __m512i (&words)[L]) {
  if constexpr (Bits == 8) {
    const uint8_t* from = row + segment * L * kStep;
    for (int i = 0; i < L; ++i, from += kStep, left -= kStep) {
      const __mmask32 mask = Whole || left >= kStep ? ~0u : left > 0 ? (1u << left) - 1 : 0;
      words[i] = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(mask, from));
    }
  } else {
    constexpr int64_t unit = Bits == 4 ? 4 : 8;  // steps of a packed unit
    const int64_t step = segment * L, within = step % unit;
    const uint8_t* from = row + step / unit * unit * kStep * Bits / 8;
    constexpr int width = Bits == 4 ? 4 : 2;
    __m512i codes = _mm512_loadu_si512(from);
    if constexpr (L < unit) codes = _mm512_srl_epi16(codes, _mm_cvtsi64_si128(within * width));
    const __m512i low = _mm512_set1_epi16((1 << width) - 1), high = _mm512_set1_epi16(4);
    for (int i = 0; i < L; ++i) {
      words[i] = _mm512_and_si512(_mm512_srli_epi16(codes, static_cast<unsigned>(i * width)), low);
      if constexpr (Bits == 3) {
        uint32_t mask;
        __builtin_memcpy(&mask, from + 64 + 4 * (within + i), 4);
        words[i] = _mm512_mask_add_epi16(words[i], mask, words[i], high);
      }
    }
  }
}

// Unpacks the codes of a segment of L steps to bytes, if `in_bytes`.
template <int Bits, int L, bool Whole>
inline void unpack_bytes(const uint8_t* row, int64_t segment, int64_t left, __m512i (&bytes)[L / 2]) {
  const uint8_t* from = row + segment * L * kStep * Bits / 8;
  if constexpr (Bits == 4) {
    const __m512i codes = _mm512_loadu_si512(from), mask = _mm512_set1_epi8(15);
    bytes[0] = _mm512_and_si512(codes, mask);
    bytes[1] = _mm512_and_si512(_mm512_srli_epi16(codes, 4), mask);
  } else {
    for (int i = 0; i < L / 2; ++i, left -= 64) {
      const __mmask64 mask = Whole || left >= 64 ? ~uint64_t{0} : left > 0 ? (uint64_t{1} << left) - 1 : 0;
      bytes[i] = _mm512_maskz_loadu_epi8(mask, from + 64 * i);
    }
  }
}

// Returns a vector with `start` in the first lane and zeros in the others.
inline __m512i start_of(int32_t start) { return _mm512_zextsi128_si512(_mm_cvtsi32_si128(start)); }

// Returns `sum` plus the products of a segment's codes with the packed integers of x.
template <int Vectors>
inline __m512i multiply_bytes(const __m512i (&bytes)[Vectors], const uint8_t* integers, __m512i sum) {
  for (int i = 0; i < Vectors; ++i) sum = _mm512_dpbusd_epi32(sum, bytes[i], _mm512_loadu_si512(integers + i * 64));
  return sum;
}

template <int Vectors>
inline __m512i multiply_words(const __m512i (&words)[Vectors], const uint8_t* integers, __m512i sum) {
  for (int i = 0; i < Vectors; ++i) sum = _mm512_dpwssd_epi32(sum, words[i], _mm512_loadu_si512(integers + i * 64));
  return sum;
}

// sums[R] += segment s of R rows of x * the same segment of a row of codes. `left` inputs remain from the segment's first one on.
template <int R, int Bits, int L, bool Zeros, bool Whole>
__attribute__((always_inline)) inline void segment(const uint8_t* row, int64_t s, int64_t left, const SegmentOperands& x,
                                                   Floats (&sums)[R]) {
  constexpr bool kInBytes = in_bytes(Bits, L);
  __m512i codes[kInBytes ? L / 2 : L];
  if constexpr (kInBytes) {
    unpack_bytes<Bits, L, Whole>(row, s, left, codes);
  } else {
    unpack<Bits, L, Whole>(row, s, left, codes);
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    const uint8_t* integers = x.of_row(x.integers, r);
    const __m512i start = start_of(*x.of_row(x.starts, r));
    __m512i lanes;
    if constexpr (kInBytes) {
      lanes = multiply_bytes(codes, integers, start);
    } else {
      lanes = multiply_words(codes, integers, start);
    }
    __m512 values = _mm512_cvtepi32_ps(lanes);
    if constexpr (Zeros) {  // zeros add to the offset of the codes
      const __m512 sum = _mm512_zextps128_ps512(_mm_set_ss(*x.of_row(x.sums, r)));
      values = _mm512_fnmadd_ps(sum, _mm512_set1_ps(x.zero), values);
    }
    sums[r] = _mm512_fmadd_ps(values, _mm512_set1_ps(x.factors[r * kLanes]), sums[r]);
  }
}

struct Vnni {
  static constexpr auto in_bytes = jaxserve::in_bytes;
  static constexpr auto integers_bytes = jaxserve::integers_bytes;
  static constexpr auto row_bytes = jaxserve::row_bytes;
  static constexpr auto widen_all = jaxserve::widen_all;
  static constexpr auto sums_of = jaxserve::sums_of;
  static constexpr auto write = jaxserve::write;
  template <int R>
  static constexpr Product numbers = jaxserve::numbers<R>;
  template <int R, int Bits, int L, bool Zeros, bool Whole>
  static constexpr auto segment = jaxserve::segment<R, Bits, L, Zeros, Whole>;
};

using Here = Few<Vnni>;

}  // namespace

extern const Multiplier kMatmulVnni = {packed_bytes, pack, Here::block, Here::scratch_bytes, Here::multiply};

}  // namespace jaxserve

#endif
