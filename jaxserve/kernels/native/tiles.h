// Unpacking of a weight to bfloat16 tiles for the matrix unit, with AVX512-BF16. Only matmul_amx.cc includes this file.
//
// A block is 32 rows of the weight (outputs) by several steps of 32 inputs. A step is stored as two tiles of 16 x 32 values.
// A code u becomes scale * (u - 2**(b-1) - zero), rounded to bfloat16 exactly as by QArray.dequantize(bfloat16). For 4 and 3 bits
// each group has a table of all possible values, in which the codes are looked up.

#pragma once

#include <immintrin.h>

#include "groups.h"
#include "outputs.h"

namespace jaxserve {
namespace {

constexpr int64_t kPairStep = kPair * kStep;  // values of a step of a block

// Returns the table of a group: the values of 16 levels in bfloat16, twice.
inline __m512i table(__m512 levels, const Groups& group) {
  if (group.w.zeros) levels = _mm512_sub_ps(levels, _mm512_set1_ps(group.zero()));
  const __m256bh values = _mm512_cvtneps_pbh(_mm512_mul_ps(levels, _mm512_set1_ps(group.scale())));
  return _mm512_broadcast_i64x4(reinterpret_cast<__m256i>(values));
}

// Writes `steps` steps of a row of bfloat16 numbers, kPairStep values apart, with zeros after the last of `values` inputs.
inline void row16(const uint8_t* data, int64_t values, int64_t steps, uint16_t* to) {
  for (; steps > 0; --steps, values -= kStep, data += 2 * kStep, to += kPairStep) {
    const __mmask32 mask = values >= kStep ? ~0u : (1u << values) - 1;
    _mm512_store_si512(to, _mm512_maskz_loadu_epi16(mask, data));
  }
}

// A row of 8-bit codes. In each of these structs `start` begins a group, `step` unpacks one step, and `quad` unpacks four steps.
struct EightBits {
  const uint8_t* data;
  __m512 scale, offset;

  void start(const Groups& group) {
    scale = _mm512_set1_ps(group.scale());
    offset = _mm512_set1_ps(-group.scale() * (128 + group.zero()));
  }

  __m512 sixteen(const uint8_t* codes) const {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes)), scale, offset);
  }

  void step(int64_t step, uint16_t* to) const {
    const uint8_t* codes = data + step * kStep;
    _mm512_store_si512(to, bits_of(_mm512_cvtne2ps_pbh(sixteen(codes + kStep / 2), sixteen(codes))));
  }

  void quad(int64_t first, uint16_t* to) const {
    for (int64_t i = 0; i < 4; ++i) step(first + i, to + i * kPairStep);
  }
};

// A row of 4-bit codes.
struct FourBits {
  const uint8_t* data;
  __m512i values;  // the table, twice, so that the fifth bit of a lane does not matter to the look-up

  void start(const Groups& group) {
    values = table(_mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7), group);
  }

  __m512i words(int64_t step) const { return _mm512_loadu_si512(data + step / 4 * 64); }

  void put(__m512i index, uint16_t* to) const { _mm512_store_si512(to, _mm512_permutexvar_epi16(index, values)); }

  void step(int64_t step, uint16_t* to) const {
    put(_mm512_srl_epi16(words(step), _mm_cvtsi64_si128(step % 4 * 4)), to);
  }

  void quad(int64_t first, uint16_t* to) const {
    const __m512i index = words(first);
    put(index, to);
    put(_mm512_srli_epi16(index, 4), to + kPairStep);
    put(_mm512_srli_epi16(index, 8), to + 2 * kPairStep);
    put(_mm512_srli_epi16(index, 12), to + 3 * kPairStep);
  }
};

// A row of 3-bit codes.
struct ThreeBits {
  const uint8_t* data;
  __m512i low, high;  // tables for codes without and with their highest bit

  void start(const Groups& group) {
    const __m512 levels = _mm512_setr_ps(-4, -3, -2, -1, -4, -3, -2, -1, -4, -3, -2, -1, -4, -3, -2, -1);
    low = table(levels, group);
    high = table(_mm512_add_ps(levels, _mm512_set1_ps(4)), group);
  }

  const uint8_t* unit(int64_t step) const { return data + step / 8 * 96; }

  __m512i words(int64_t step) const {
    return _mm512_srl_epi16(_mm512_loadu_si512(unit(step)), _mm_cvtsi64_si128(step % 8 * 2));
  }

  void put(__m512i index, int64_t step, uint16_t* to) const {
    const __mmask32 mask = _cvtu32_mask32(reinterpret_cast<const uint32_t*>(unit(step) + 64)[step % 8]);
    const __m512i value = _mm512_permutexvar_epi16(index, low);
    _mm512_store_si512(to, _mm512_mask_permutexvar_epi16(value, mask, index, high));
  }

  void step(int64_t step, uint16_t* to) const { put(words(step), step, to); }

  void quad(int64_t first, uint16_t* to) const {
    const __m512i index = words(first);
    put(index, first, to);
    put(_mm512_srli_epi16(index, 2), first + 1, to + kPairStep);
    put(_mm512_srli_epi16(index, 4), first + 2, to + 2 * kPairStep);
    put(_mm512_srli_epi16(index, 6), first + 3, to + 3 * kPairStep);
  }
};

// Writes `steps` steps of a row of codes, kPairStep values apart. It unpacks four steps at once where a group allows it, and rounds
// `steps` up to a multiple of four, so that the data must be padded as far.
template <typename Codes>
inline void row(Codes codes, Groups group, int64_t steps, uint16_t* to) {
  const int64_t all = (steps + 3) / 4 * 4;
  for (int64_t step = 0; step < all;) {
    codes.start(group);
    const int64_t some = min(group.left, all - step), end = step + some;
    for (; step % 4 && step < end; ++step) codes.step(step, to + step * kPairStep);
    for (; step + 4 <= end; step += 4) codes.quad(step, to + step * kPairStep);
    for (; step < end; ++step) codes.step(step, to + step * kPairStep);
    group.advance(some);
  }
}

// Writes `steps` steps of a row of 8-bit codes, whose data is not padded to a multiple of four steps: it ends after `values` codes.
inline void row8(const uint8_t* data, const Groups& group, int64_t values, int64_t steps, uint16_t* to) {
  const int64_t whole = min(values / (4 * kStep) * 4, steps);
  if (whole) row(EightBits{data, {}, {}}, group, whole, to);
  if (whole == steps) return;
  alignas(64) uint8_t rest[4 * kStep] = {};
  for (int64_t i = whole * kStep; i < values; ++i) rest[i - whole * kStep] = data[i];
  Groups at = group;
  for (int64_t left = whole; left > 0;) {
    const int64_t some = min(left, at.left);
    at.advance(some);
    left -= some;
  }
  row(EightBits{rest, {}, {}}, at, steps - whole, to + whole * kPairStep);
}

// Returns the bytes of a row's data before `step`, which is a multiple of kUnitSteps.
inline int64_t offset_of(const Weight& w, int64_t step) { return step * kStep * w.bits / 8; }

// Writes steps [step, step + steps) of rows [out, out + kPair), and prefetches the rows' data `ahead` bytes further on. Rows beyond
// the last one repeat it, and inputs beyond the last one get finite values.
inline void unpack(const Weight& w, int64_t out, int64_t step, int64_t steps, int64_t ahead, uint16_t* block) {
  const int64_t values = w.inner - step * kStep, bytes = offset_of(w, steps);
  const Groups first = Groups::at(w, step);
  for (int64_t r = 0; r < kPair; ++r) {
    const int64_t row_index = min(out + r, w.out - 1);
    const uint8_t* data = w.data + row_index * w.row_bytes + offset_of(w, step);
    uint16_t* to = block + r * kStep;
    for (int64_t i = 0; i < bytes; i += 64) _mm_prefetch(reinterpret_cast<const char*>(data + ahead + i), _MM_HINT_T0);
    const Groups group = first.of_row(row_index);
    if (w.bits == 16) {
      row16(data, values, steps, to);
    } else if (w.bits == 8) {
      row8(data, group, values, steps, to);
    } else if (w.bits == 4) {
      row(FourBits{data, {}}, group, steps, to);
    } else {
      row(ThreeBits{data, {}, {}}, group, steps, to);
    }
  }
}

}  // namespace
}  // namespace jaxserve
