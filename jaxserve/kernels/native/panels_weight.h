// The weight of the product in panels (panels.h). A slice of kPanel rows is transposed to columns and unpacked in registers.

#pragma once

#include <utility>

#include "groups.h"
#include "matmul.h"
#include "panels.h"
#if LANES == 16
#include "transpose.h"
#endif

namespace jaxserve {
namespace {

// A slice of kPanel neighbouring rows of the weight: the address of the first row, and the bytes between rows. At the last rows or
// inputs it is a copy, in which the last row is repeated and zeros follow the inputs.
template <int Bits>
struct Slice {
  const uint8_t* first;
  int64_t stride;
  uint8_t copies[kPanel][bytes_of(Bits)];

  Slice(const Weight& w, int64_t out, int64_t slice) : first(w.data + out * w.row_bytes), stride(w.row_bytes) {
    const int64_t at = slice * bytes_of(Bits), left = w.row_bytes - at;
    first += at;
    if (out + kPanel <= w.out && left >= bytes_of(Bits)) return;
    const int64_t bytes = left < bytes_of(Bits) ? left : bytes_of(Bits);
    for (int64_t o = 0; o < kPanel; ++o) {
      const uint8_t* row = w.data + (out + o < w.out ? out + o : w.out - 1) * w.row_bytes + at;
      __builtin_memset(copies[o] + bytes, 0, static_cast<size_t>(bytes_of(Bits) - bytes));
      __builtin_memcpy(copies[o], row, static_cast<size_t>(bytes));
    }
    first = copies[0];
    stride = bytes_of(Bits);
  }
};

// The gradual prefetching of a panel: `width` bytes of each row, in the order of their addresses. Memory takes a limited number of
// requests at once.
class Ahead {
 public:
  Ahead(const uint8_t* first, int64_t stride, int64_t width) : row_(first), stride_(stride), width_(width) {}

  void prefetch(int64_t bytes) {
    for (due_ += bytes; due_ > 0; due_ -= 64) {
      _mm_prefetch(reinterpret_cast<const char*>(row_ + at_), _MM_HINT_T1);
      at_ += 64;
      if (at_ >= width_) at_ = 0, row_ += stride_;
    }
  }

 private:
  const uint8_t* row_;
  int64_t stride_, width_, at_ = 0, due_ = 0;
};

// Reads elements [kLanes rows, Columns] and returns them as columns.
#if LANES == 16
constexpr int kColumns = 16;  // whole cache lines: with some strides a cache holds few lines of all rows at once

template <int Columns = kColumns>
inline void turn(const uint8_t* rows, int64_t stride, Bits (&columns)[Columns]) {
  constexpr __mmask16 mask = (1u << Columns) - 1;
  __m512i x[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) x[i] = _mm512_maskz_loadu_epi32(mask, rows + i * stride);
  transpose(x);
  for (int i = 0; i < Columns; ++i) columns[i] = (Bits)x[i];
}
#else
constexpr int kColumns = 4;

template <int Columns = kColumns>
inline void turn(const uint8_t* rows, int64_t stride, Bits (&columns)[Columns]) {
  for (int first = 0; first < Columns; first += 4, rows += 16) {
    __m256i x[4];
    for (int i = 0; i < 4; ++i) {
      const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows + i * stride));
      const __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows + 4 * stride + i * stride));
      x[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
    }
    const __m256i a = _mm256_unpacklo_epi32(x[0], x[1]), b = _mm256_unpacklo_epi32(x[2], x[3]);
    const __m256i c = _mm256_unpackhi_epi32(x[0], x[1]), d = _mm256_unpackhi_epi32(x[2], x[3]);
    columns[first] = (Bits)_mm256_unpacklo_epi64(a, b);
    columns[first + 1] = (Bits)_mm256_unpackhi_epi64(a, b);
    columns[first + 2] = (Bits)_mm256_unpacklo_epi64(c, d);
    columns[first + 3] = (Bits)_mm256_unpackhi_epi64(c, d);
  }
}
#endif

// Returns the highest bits of a pair of 3-bit codes, from the masks of the pair's step.
inline Bits high_bits(Bits masks, int pair) {
  const Bits bits = masks >> 2 * pair;
  return (bits << 2 & 4u) | (bits << 17 & 0x40000u);
}

// Unpacks codes of 4 or 3 bits of kLanes outputs to fours of bytes: the pairs `first` to `first` + Columns - 1 of every step of a
// slice. A segment has `Steps` steps.
template <int B, int Steps, int Columns>
inline void unpack_codes(const Bits (&x)[Columns], [[maybe_unused]] const Bits* masks, int first, int32_t* panel) {
  constexpr int kSteps = static_cast<int>(inputs_of(B) / kStep), kPairs = 16;
  const auto pair = [&](int step, int j) {
    if constexpr (B == 4) return x[j] >> 4 * step & 0x000f000fu;
    else return (x[j] >> 2 * step & 0x00030003u) | high_bits(masks[step], first + j);
  };
  for (int s = 0; s < kSteps; s += Steps) {
    const auto put = [&](int element, Bits four) { store(panel + (s * kPairs / 2 + element) * kPanel, (Ints)four); };
    if constexpr (Steps == 1) {
      for (int j = 0; j < kPairs / 2; ++j) put(j, pair(s, j) | pair(s, j + kPairs / 2) << 8);
    } else {
      for (int t = 0; t < Steps / 2; ++t) {
        for (int j = 0; j < Columns; ++j) {
          if constexpr (B == 4 && Steps == 4) put(t * kPairs + first + j, x[j] >> 4 * t & 0x0f0f0f0fu);
          else put(t * kPairs + first + j, pair(s + t, j) | pair(s + t + Steps / 2, j) << 8);
        }
      }
    }
  }
}

// Unpacks a slice of kLanes outputs to one half of a panel's buffer, as vectors of elements that are kPanel elements apart. A
// segment has `Steps` steps.
template <int B, int Steps>
void unpack(const uint8_t* rows, int64_t stride, int32_t* panel) {
  constexpr int kAtOnce = B < 8 && Steps == 1 ? 16 : kColumns;
  const auto put = [panel](int64_t element, Bits x) { store(panel + element * kPanel, (Ints)x); };
  Bits masks[8];
  if constexpr (B == 3) turn(rows + 64, stride, masks);
  for (int64_t i = 0; i < bytes_of(B == 3 ? 4 : B) / 4; i += kAtOnce) {
    Bits x[kAtOnce];
    turn(rows + 4 * i, stride, x);
    for (int j = 0; B >= 8 && j < kAtOnce; ++j) {
      const int64_t column = i + j;
      if constexpr (B == 16) {
        elements_of_pair(x[j], [&](int chain, Bits element) { put(chain * kChain + column, element); });
      } else if constexpr (in_bytes(B)) {
        put(column, x[j]);
      } else {  // the even bytes of 32 inputs, then the odd ones
        put(column / 8 * 16 + column % 8, x[j] & 0x00ff00ffu);
        put(column / 8 * 16 + column % 8 + 8, x[j] >> 8 & 0x00ff00ffu);
      }
    }
    if constexpr (B < 8) unpack_codes<B, Steps>(x, masks, static_cast<int>(i), panel);
  }
}

// The scales and zeros of kLanes outputs in a group. Zeros are divided by 2^(bits - 1), because they are multiplied by the start of
// a segment (`Base`).
struct Scales {
  Floats scale, zero;

  Scales() = default;
  Scales(const Weight& w, int64_t out, int64_t group) : scale(read(w, w.scales, w.wide_scales, out, group)) {
    if (w.zeros) zero = read(w, w.zeros, w.wide_zeros, out, group) * (1.0f / static_cast<float>(1 << (w.bits - 1)));
  }

  static Floats read(const Weight& w, const void* numbers, bool wide, int64_t out, int64_t group) {
    const int64_t first = out * w.groups + group;
    if (out + kLanes <= w.out) return gather(numbers, wide, first, w.groups, std::make_integer_sequence<int, LANES>{});
    float values[kLanes];
    for (int64_t o = 0; o < kLanes; ++o) {
      values[o] = read_number(numbers, wide, out + o < w.out ? first + o * w.groups : (w.out - 1) * w.groups + group);
    }
    return load(values);
  }

  template <int... Lanes>
  static Floats gather(const void* numbers, bool wide, int64_t first, int64_t stride, std::integer_sequence<int, Lanes...>) {
    if (wide) return Floats{(static_cast<const float*>(numbers) + first)[Lanes * stride]...};
    return (Floats)(convert<Ints>(Shorts{(static_cast<const int16_t*>(numbers) + first)[Lanes * stride]...}) << 16);
  }

  // Returns `sums` plus the scaled sum of a segment, which started from `start`.
  Floats add(Floats sums, Ints sum, int32_t start, float x_scale, bool zeros) const {
    Floats value = convert<Floats>(sum);
    if (zeros) value += static_cast<float>(start) * zero;
    return value * (scale * x_scale) + sums;
  }
};

}  // namespace
}  // namespace jaxserve
