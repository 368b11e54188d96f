// Products of a few rows of bfloat16 at the speed of memory, on AVX2.
//
// The structure is that of few.h. bfloat16 numbers are widened to float32, the even and the odd ones separately, which needs no
// shuffles. x is packed in the same order. For codes x is rounded to integers (integers.h), and 8 lanes of 32 bits sum the products.
// At the end of a segment, of at most 128 inputs, the lanes are converted to float32 and scaled.
//
// Codes of 4 bits in segments of whole units are multiplied as bytes: four products fit into 16 bits, and only their sums are
// widened. All other codes are widened to words first. Codes are unsigned here. The first lane starts from a value that corrects
// for their offset (`Base`).

#include "matmul.h"

#if defined(__x86_64__)

#include "few.h"
#include "integers.h"
#include "vectors.h"

namespace jaxserve {
namespace {

constexpr int64_t kVector = 16;  // inputs of a vector of words, or of two of floats

// Returns whether codes are multiplied as bytes in segments of `steps` steps.
constexpr bool in_bytes(int bits, int64_t steps) { return bits == 4 && steps == 4; }

// Returns the bytes of a segment's integers.
constexpr int64_t integers_bytes(int bits, int64_t steps) { return steps * kStep * (in_bytes(bits, steps) ? 1 : 2); }

// Returns the bytes of a packed row. For a bfloat16 weight it has all inputs in float32.
int64_t row_bytes(const Weight& w) {
  if (w.bits == 16) return steps_of(w.inner) * kStep * 4;
  return RowLayout(w, integers_bytes(w.bits, Segments(w).steps)).row_bytes();
}

size_t packed_bytes(const Matmul& m) { return static_cast<size_t>(m.rows * row_bytes(m.w)); }

inline __m256i load_integers(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
inline void store_integers(void* to, Ints x) { __builtin_memcpy(to, &x, sizeof(x)); }

// `Size` elements: the first `left` are copied, and zeros follow.
template <typename T, int64_t Size>
struct Filled {
  alignas(32) T elements[Size] = {};

  Filled(const T* from, int64_t left) {
    __builtin_memcpy(elements, from, static_cast<size_t>(left < Size ? left : Size) * sizeof(T));
  }
};

template <int Steps>
Base pack_segment(const uint16_t* x, int bits, uint8_t* to) {
  constexpr int kVectors = Steps * kStep / kVector;
  Pair pairs[kVectors];
  Floats largest = {}, poison = {};
  const auto include = [&](Floats numbers) {
    const Floats size = (Floats)((Bits)numbers & 0x7fffffffu);
    largest = size > largest ? size : largest;
    poison += numbers * 0.0f;  // NaN or infinity times 0 is NaN
  };
  for (int i = 0; i < kVectors; ++i) {
    pairs[i] = load_pair(x + kVector * i);
    include(pairs[i].first);
    include(pairs[i].second);
  }
  float top = 0;
  for (int i = 0; i < kLanes; ++i) top = largest[i] > top ? largest[i] : top;
  const Rounding rounding(top, jaxserve::sum(poison));
  const auto whole = [&](Floats x) { return (Ints)_mm256_cvtps_epi32((__m256)(x * rounding.factor)); };
  Ints even[kVectors], odd[kVectors], sums = {};
  for (int i = 0; i < kVectors; ++i) {
    even[i] = whole(pairs[i].first);
    odd[i] = whole(pairs[i].second);
    sums += even[i] + odd[i];
  }
  for (int i = 0; i < kVectors; ++i) {
    if (!in_bytes(bits, Steps)) {
      store_integers(to + 32 * i, (even[i] & 0xffff) | odd[i] << 16);
    } else if (i < kVectors / 2) {  // the unpacked bytes i have half i / 2 of the steps i % 2 and i % 2 + 2
      const int a = 2 * (i % 2) + i / 2, b = a + kVectors / 2;
      store_integers(to + 32 * i, (even[a] & 255) | (even[b] & 255) << 8 | (odd[a] & 255) << 16 | odd[b] << 24);
    }
  }
  int32_t total = 0;
  for (int i = 0; i < kLanes; ++i) total += sums[i];
  return {bits, rounding.scale, total};
}

template <int Steps>
void pack_codes(const uint16_t* x, const Weight& w, uint8_t* to) {
  constexpr int64_t kInputs = Steps * kStep;
  const int64_t of_segment = integers_bytes(w.bits, Steps);
  RowLayout(w, of_segment).write(to, of_segment, [&](int64_t s, uint8_t* integers) {
    const int64_t left = w.inner - s * kInputs;
    if (left >= kInputs) return pack_segment<Steps>(x + s * kInputs, w.bits, integers);
    return pack_segment<Steps>(Filled<uint16_t, kInputs>(x + s * kInputs, left).elements, w.bits, integers);
  });
}

void pack_numbers(const uint16_t* x, int64_t inputs, float* to) {
  for (; inputs >= kStep; x += kStep, inputs -= kStep, to += kStep) {
    for (int64_t i = 0; i < kStep; i += kVector) store_pair(to + i, load_pair(x + i));
  }
  if (inputs == 0) return;
  const Filled<uint16_t, kStep> rest(x, inputs);
  for (int64_t i = 0; i < kStep; i += kVector) store_pair(to + i, load_pair(rest.elements + i));
}

void pack(const Matmul& m, int64_t row, void* packed) {
  const int64_t inner = m.w.inner, steps = Segments(m.w).steps;
  for (const int64_t end = row + kPackRows < m.rows ? row + kPackRows : m.rows; row < end; ++row) {
    const uint16_t* x = static_cast<const uint16_t*>(m.x) + row * inner;
    uint8_t* to = static_cast<uint8_t*>(packed) + row * row_bytes(m.w);
    if (m.w.bits == 16) {
      pack_numbers(x, inner, reinterpret_cast<float*>(to));
    } else if (steps == 4) {
      pack_codes<4>(x, m.w, to);
    } else if (steps == 2) {
      pack_codes<2>(x, m.w, to);
    } else {
      pack_codes<1>(x, m.w, to);
    }
  }
}

// Returns the sums of the lanes of four vectors.
inline __m128 sums_of(const Floats (&x)[kOuts]) {
  const auto pairs = [](Floats x, Floats y) {
    return _mm256_add_ps(_mm256_unpacklo_ps((__m256)x, (__m256)y), _mm256_unpackhi_ps((__m256)x, (__m256)y));
  };
  const __m256 a = pairs(x[0], x[1]), b = pairs(x[2], x[3]);
  const __m256 c = _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xee));
  return _mm_add_ps(_mm256_castps256_ps128(c), _mm256_extractf128_ps(c, 1));
}

inline void write(const Matmul& m, int64_t row, int64_t out, __m128 sums) {
  const int64_t left = m.w.out - out, at = row * m.w.out + out;
  const auto put = [count = static_cast<size_t>(left < kOuts ? left : kOuts)](auto* to, const void* values) {
    if (count == kOuts) return void(__builtin_memcpy(to, values, kOuts * sizeof(*to)));
    __builtin_memcpy(to, values, count * sizeof(*to));
  };
  if (m.y_bfloat16) {
    const __m256i rounded = (__m256i)(round_to_bfloat16((Floats)_mm256_castps128_ps256(sums)) >> 16);
    const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm_setzero_si128());
    put(static_cast<uint16_t*>(m.y) + at, &words);
  } else {
    put(static_cast<float*>(m.y) + at, &sums);
  }
}

// sums[R, kOuts] += a step of x [R, inputs] * the same step of kOuts rows of bfloat16 numbers.
template <int R>
inline void step(const uint16_t* const (&rows)[kOuts], const float* x, int64_t inputs, Floats (&sums)[R][kOuts]) {
#pragma GCC unroll 4
  for (int o = 0; o < kOuts; ++o) {
    for (int64_t i = 0; i < kStep; i += kVector) {
      const Pair weights = load_pair(rows[o] + i);
      for (int r = 0; r < R; ++r) {
        const Pair numbers = load_pair(x + r * inputs + i);
        sums[r][o] += weights.first * numbers.first;
        sums[r][o] += weights.second * numbers.second;
      }
    }
  }
}

// Computes y[R, kOuts] for a bfloat16 weight.
template <int R>
void multiply_numbers(const Matmul& m, const float* x, int64_t inputs, int64_t row, int64_t out, const Quad& w) {
  Floats sums[R][kOuts] = {};
  int64_t i = 0;
  const auto at = [&](int o) { return reinterpret_cast<const uint16_t*>(w.data[o]) + i; };
  for (; i + kStep <= m.w.inner; i += kStep) {
    for (int64_t o = 0; o < kOuts; ++o) w.prefetch(kOuts * 2 * i + 64 * o);
    step<R>({at(0), at(1), at(2), at(3)}, x + i, inputs, sums);
  }
  if (const int64_t left = m.w.inner - i; left > 0) {
    using Rest = Filled<uint16_t, kStep>;
    const Rest rest[kOuts] = {{at(0), left}, {at(1), left}, {at(2), left}, {at(3), left}};
    step<R>({rest[0].elements, rest[1].elements, rest[2].elements, rest[3].elements}, x + i, inputs, sums);
  }
  for (int r = 0; r < R; ++r) write(m, row + r, out, sums_of(sums[r]));
}

template <int R>
void numbers(const Matmul& m, const uint8_t* packed, int64_t row, const Part& part, void*) {
  const int64_t inputs = row_bytes(m.w) / 4;
  const float* x = reinterpret_cast<const float*>(packed) + row * inputs;
  for (int64_t out = part.out; out < part.out + part.outs; out += kOuts) {
    const Quad w = part.quad(m.w, out);
    if constexpr (R <= 3) {
      multiply_numbers<R>(m, x, inputs, row, out, w);
    } else {  // the sums of all rows do not fit into the registers
      multiply_numbers<2>(m, x, inputs, row, out, w);
      multiply_numbers<R - 2>(m, x + 2 * inputs, inputs, row + 2, out, w);
    }
  }
}

// Unpacks the codes of a segment of L steps to words, 16 in a vector. `left` is the number of inputs from the segment's first one
// on. Without `Whole` they end within the segment.
template <int Bits, int L, bool Whole>
inline void unpack(const uint8_t* row, int64_t segment, int64_t left, __m256i (&words)[2 * L]) {
  if constexpr (Bits == 8 && !Whole) {
    const Filled<uint8_t, L * kStep> rest(row + segment * L * kStep, left);
    unpack<Bits, L, true>(rest.elements, 0, left, words);
  } else if constexpr (Bits == 8) {
    const auto* from = reinterpret_cast<const __m128i*>(row + segment * L * kStep);
    for (int i = 0; i < 2 * L; ++i) words[i] = _mm256_cvtepu8_epi16(_mm_loadu_si128(from + i));
  } else {
    constexpr int64_t unit = Bits == 4 ? 4 : 8;  // steps of a packed unit
    constexpr int width = Bits == 4 ? 4 : 2;
    const int64_t within = segment * L % unit;
    const uint8_t* from = row + (segment * L - within) * kStep * Bits / 8;
    for (int h = 0; h < 2; ++h) {
      const __m256i all = _mm256_srl_epi16(load_integers(from + 32 * h), _mm_cvtsi64_si128(within * width));
      for (int i = 0; i < L; ++i) {
        __m256i& codes = words[2 * i + h];
        codes = _mm256_and_si256(_mm256_srli_epi16(all, i * width), _mm256_set1_epi16((1 << width) - 1));
        if constexpr (Bits == 3) {
          int16_t mask;
          __builtin_memcpy(&mask, from + 64 + 4 * (within + i) + 2 * h, 2);
          const __m256i bits = _mm256_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, -32768);
          const __m256i set = _mm256_cmpeq_epi16(_mm256_and_si256(_mm256_set1_epi16(mask), bits), bits);
          codes = _mm256_or_si256(codes, _mm256_and_si256(set, _mm256_set1_epi16(4)));
        }
      }
    }
  }
}

// Unpacks a unit of 4-bit codes to bytes.
inline void unpack_bytes(const uint8_t* unit, __m256i (&bytes)[4]) {
  const __m256i mask = _mm256_set1_epi8(15);
  for (int h = 0; h < 2; ++h) {
    const __m256i codes = load_integers(unit + 32 * h);
    bytes[2 * h] = _mm256_and_si256(codes, mask);
    bytes[2 * h + 1] = _mm256_and_si256(_mm256_srli_epi16(codes, 4), mask);
  }
}

// sums += bytes * x. This is assembly, because compilers move the additions after all products and then run out of registers.
inline void add_products(__m256i& sums, __m256i bytes, const __m256i& x) {
  __m256i products;
  __asm__("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(sums), "=&x"(products) : "x"(bytes), "m"(x));
}

// Returns a vector with `start` in the first lane and zeros in the others.
inline __m256i start_of(int32_t start) { return _mm256_zextsi128_si256(_mm_cvtsi32_si128(start)); }

// Returns `start` plus the products of a segment's codes with the packed integers of x. A sum of 16 bits is at most
// 4 * 2 * 15 * 127.
inline __m256i multiply_bytes(const __m256i (&bytes)[4], const __m256i* integers, __m256i start) {
  __m256i sums = _mm256_maddubs_epi16(bytes[0], integers[0]);
#pragma GCC unroll 4
  for (int i = 1; i < 4; ++i) add_products(sums, bytes[i], integers[i]);
  return _mm256_add_epi32(start, _mm256_madd_epi16(sums, _mm256_set1_epi16(1)));
}

template <int Vectors>
inline __m256i multiply_words(const __m256i (&words)[Vectors], const __m256i* integers, __m256i sum) {
  for (int i = 0; i < Vectors; ++i) sum = _mm256_add_epi32(sum, _mm256_madd_epi16(words[i], integers[i]));
  return sum;
}

// Widens `count` scales or zeros from `index` on to float32.
void widen_all(const void* numbers, bool wide, int64_t index, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = read_number(numbers, wide, index + i);
}

// sums[R] += segment s of R rows of x * the same segment of a row of codes. `left` inputs remain from the segment's first one on.
template <int R, int Bits, int L, bool Zeros, bool Whole>
__attribute__((always_inline)) inline void segment(const uint8_t* row, int64_t s, int64_t left, const SegmentOperands& x,
                                                   Floats (&sums)[R]) {
  __m256i codes[in_bytes(Bits, L) ? 4 : 2 * L];
  if constexpr (in_bytes(Bits, L)) {
    unpack_bytes(row + s * L * kStep * Bits / 8, codes);
  } else {
    unpack<Bits, L, Whole>(row, s, left, codes);
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    const auto* integers = reinterpret_cast<const __m256i*>(x.of_row(x.integers, r));
    const __m256i start = start_of(*x.of_row(x.starts, r));
    __m256i lanes;
    if constexpr (in_bytes(Bits, L)) {
      lanes = multiply_bytes(codes, integers, start);
    } else {
      lanes = multiply_words(codes, integers, start);
    }
    Floats values = convert<Floats>((Ints)lanes);
    if constexpr (Zeros) {  // zeros add to the offset of the codes
      values -= (Floats)_mm256_zextps128_ps256(_mm_set_ss(*x.of_row(x.sums, r))) * x.zero;
    }
    sums[r] += values * splat(x.factors[r * kLanes]);
  }
}

struct Avx2 {
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

using Here = Few<Avx2>;

}  // namespace

extern const Multiplier kMatmulFewAvx2 = {packed_bytes, pack, Here::block, Here::scratch_bytes, Here::multiply};

}  // namespace jaxserve

#endif
