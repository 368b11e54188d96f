// Products of rows of bfloat16 on vectors: on AVX2, and on AVX-512 with its VNNI and BF16 instructions.
//
// Outputs lie beside each other in the lanes of a vector. The weight, which lies row by row, is turned to that in registers, as
// many rows as a vector has lanes, 16 bytes (AVX2) or a line at a time. A lane then holds an element of 32 bits of one output, and meets the
// same element of x, which is brought to all lanes.
//
// Of bfloat16 numbers an element is a pair (AVX-512 multiplies and adds up pairs) or one, widened to float32 (AVX2: of 256 inputs
// first the even ones, then the odd ones). They are always summed in the same order. Codes meet x in integers (integers.h): by
// fours of bytes, or, of 8 bits on AVX2, whose sums of bytes are too narrow for them, by pairs of words. A lane adds them up exactly over a segment of at most 128 inputs; only
// its sum is brought to float32 and scaled. So a row's result does not depend on how many rows there are.
//
// A slice of a panel of two vectors of outs is turned into a buffer that stays in L1, and groups of rows of x are multiplied by it,
// as many as registers have room for sums. For few rows there are matmul_avx2.cc and matmul_vnni.cc.

#include "matmul.h"

#if defined(__x86_64__)

#include <immintrin.h>

#include <type_traits>
#include <utility>

#include "groups.h"
#include "integers.h"
#include "vectors.h"
#if LANES == 16
#include "transpose.h"
#endif

namespace jaxserve {
namespace {

constexpr int64_t kLanes = LANES;
constexpr int64_t kPanel = 2 * kLanes;               // outs
constexpr int kRows = LANES == 16 ? 12 : 6;          // 24 or 12 sums in registers
constexpr int64_t kBlockBytes = 128 << 10;           // of the weight, for few rows: small enough to share out evenly,
constexpr int64_t kBlockWork = 1 << 20;              // so many multiplications,
constexpr int64_t kLeastBlocks = 4;                  // and parts of even a small weight
constexpr int64_t kBlockOuts = 128;                  // for many rows: slices of x, and sums, fit into L2
constexpr int64_t kBlockRows = LANES == 16 ? kManyRows : 128;
constexpr int64_t kMemoryRows = 32;                  // up to so many, the weight is read in the order in which it lies

inline int64_t parts(int64_t whole, int64_t part) { return (whole + part - 1) / part; }
inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Inputs of a slice, the least that any kind of weight unpacks as a whole; what they take in a row of the weight; and how many
// elements they make.
constexpr int64_t inputs_of(int bits) { return bits == 3 || bits == 16 ? 256 : 128; }
constexpr int64_t bytes_of(int bits) { return inputs_of(bits) * bits / 8; }
constexpr bool in_bytes(int bits) { return LANES == 16 ? bits <= 8 : bits < 8; }
constexpr int64_t in_element(int bits) { return in_bytes(bits) ? 4 : bits == 16 && LANES == 8 ? 1 : 2; }
constexpr int64_t elements_of(int bits) { return inputs_of(bits) / in_element(bits); }
constexpr int kChains = LANES == 16 ? 1 : 2;                 // sums of a slice of numbers, one after the other;
constexpr int64_t kChain = inputs_of(16) / 2;                // and elements of each

inline Ints load(const int32_t* from) { return (Ints)load(reinterpret_cast<const float*>(from)); }
inline void store(int32_t* to, Ints x) { store(reinterpret_cast<float*>(to), (Floats)x); }

inline uint32_t pair_at(const uint16_t* from) {
  uint32_t pair;
  __builtin_memcpy(&pair, from, 4);
  return pair;
}

// Calls f with each element that a pair of bfloat16 numbers makes, in one lane or in all: the chain that it belongs to and itself.
template <typename T, typename F>
inline void elements_of_pair(T numbers, F f) {
#if LANES == 16
  f(0, numbers);
#else
  f(0, numbers << 16);
  f(1, numbers & 0xffff0000u);
#endif
}

// sums + products of elements: numbers, pairs of words, fours of bytes.
template <int B>
inline Ints add_products(Ints sums, Ints codes, Ints x) {
#if LANES == 16
  if constexpr (in_bytes(B)) return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes, (__m512i)x);
#else
  // As one piece, because compilers move the additions behind all products, and then run out of registers. Of bytes sums of 16 bits.
  Ints products;
  if constexpr (in_bytes(B)) {
    __asm__("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(sums), "=&x"(products) : "x"(codes), "x"(x));
  } else {
    __asm__("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(sums), "=&x"(products) : "x"(codes), "x"(x));
  }
  return sums;
#endif
}

template <int B>
inline Floats add_products(Floats sums, Ints weights, Ints x) {
#if LANES == 16
  return (Floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)weights, (__m512bh)x);
#else
  return (Floats)weights * (Floats)x + sums;
#endif
}

// x as the weight meets it, slice by slice, so that what is used together lies together: elements [slices, rows, ...]; for codes
// also scales [segments, rows], and what a segment's sums begin with.
struct Packed {
  Segments segments;
  int64_t rows, slices, elements;

  explicit Packed(const Matmul& m)
      : segments(m.w), rows(m.rows), slices(parts(m.w.inner, inputs_of(m.w.bits))), elements(elements_of(m.w.bits)) {}

  int64_t at(int64_t slice, int64_t row) const { return (slice * rows + row) * elements; }
  const float* scales(const int32_t* x) const { return reinterpret_cast<const float*>(x + at(slices, 0)); }
  const int32_t* starts(const int32_t* x) const { return x + at(slices, 0) + segments.number * rows; }
};

size_t packed_bytes(const Matmul& m) {
  const Packed form(m);
  return static_cast<size_t>(form.at(form.slices, 0) + (m.w.bits == 16 ? 0 : form.segments.number * form.rows * 2)) * 4;
}

inline __m256i load_words(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
inline __m256 even(__m256i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); }
inline __m256 odd(__m256i x) { return _mm256_castsi256_ps(_mm256_blend_epi16(x, _mm256_setzero_si256(), 0x55)); }

// `count` numbers of x, and zeros up to `size`.
struct Filled {
  alignas(32) uint16_t numbers[4 * kStep];

  const uint16_t* fill(const uint16_t* x, int64_t count, int64_t size) {
    if (count >= size) return x;
    for (int64_t i = 0; i < size; ++i) numbers[i] = i < count ? x[i] : 0;
    return numbers;
  }
};

inline float most(__m256 x) {
  __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_max_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}

#if LANES == 8
// Sums of neighbouring words.
inline Ints pairs_of(Ints words) { return (Ints)_mm256_madd_epi16((__m256i)words, _mm256_set1_epi16(1)); }
#endif

inline __m256i low_words(__m256i a, __m256i b) {  // in turn
  return _mm256_blend_epi16(a, _mm256_slli_epi32(b, 16), 0xaa);
}

// A segment in integers, in the order of the unpacked codes. A four of bytes is, of codes of 8 bits, four neighbours; of fewer bits a
// pair of the segment's first half and the pair of its second half that lies as far behind. Words of 8 bits are parted into even and
// odd ones, by 32 inputs.
void pack_segment(const uint16_t* x, int64_t steps, int bits, int32_t* elements, float* scale, int32_t* start) {
  constexpr int64_t kMost = 8;  // vectors of 16 numbers
  const __m256 sign = _mm256_set1_ps(-0.0f);
  __m256 largest = _mm256_setzero_ps(), poison = _mm256_setzero_ps();
  for (int64_t i = 0; i < 2 * steps; ++i) {
    const __m256 a = even(load_words(x + 16 * i)), b = odd(load_words(x + 16 * i));
    largest = _mm256_max_ps(largest, _mm256_max_ps(_mm256_andnot_ps(sign, a), _mm256_andnot_ps(sign, b)));
    poison = _mm256_fmadd_ps(_mm256_add_ps(a, b), _mm256_setzero_ps(), poison);  // what is not finite stays
  }
  float lost = 0;
  for (int i = 0; i < 8; ++i) lost += reinterpret_cast<const float*>(&poison)[i];
  const Rounding rounding(most(largest), lost);
  const __m256 factor = _mm256_set1_ps(rounding.factor);
  __m256i first[kMost], second[kMost], sum = _mm256_setzero_si256();
  for (int64_t i = 0; i < 2 * steps; ++i) {
    first[i] = _mm256_cvtps_epi32(_mm256_mul_ps(even(load_words(x + 16 * i)), factor));
    second[i] = _mm256_cvtps_epi32(_mm256_mul_ps(odd(load_words(x + 16 * i)), factor));
    sum = _mm256_add_epi32(sum, _mm256_add_epi32(first[i], second[i]));
  }
  auto* to = reinterpret_cast<__m256i*>(elements);
  if (bits == 8) {
#if LANES == 16
    for (int64_t i = 0; i < 2 * steps; ++i) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(elements) + i, _mm256_cvtepi16_epi8(low_words(first[i], second[i])));
    }
#else
    for (int64_t i = 0; i < 2 * steps; i += 2) {
      _mm256_storeu_si256(to++, _mm256_permute4x64_epi64(_mm256_packs_epi32(first[i], first[i + 1]), 0xd8));
      _mm256_storeu_si256(to++, _mm256_permute4x64_epi64(_mm256_packs_epi32(second[i], second[i + 1]), 0xd8));
    }
#endif
  } else {
    const __m256i bytes = _mm256_set1_epi16(255);
    for (int64_t i = 0; i < steps; ++i) {
      const __m256i a = low_words(first[i], second[i]), b = low_words(first[i + steps], second[i + steps]);
      _mm256_storeu_si256(to++, _mm256_or_si256(_mm256_and_si256(a, bytes), _mm256_slli_epi16(b, 8)));
    }
  }
  int32_t total = 0;
  for (int i = 0; i < 8; ++i) total += reinterpret_cast<const int32_t*>(&sum)[i];
  const Base base(bits, rounding.scale, total);
  *scale = base.scale;
  *start = base.start;
}

void pack(const Matmul& m, int64_t row, void* packed) {
  const Weight& w = m.w;
  const Packed form(m);
  const int64_t steps = w.bits == 16 ? 1 : form.segments.steps, size = steps * kStep, inputs = inputs_of(w.bits);
  auto* elements = static_cast<int32_t*>(packed);
  auto* scales = const_cast<float*>(form.scales(elements));
  auto* starts = const_cast<int32_t*>(form.starts(elements));
  for (const int64_t end = row + kPackRows < m.rows ? row + kPackRows : m.rows; row < end; ++row) {
    const uint16_t* x = static_cast<const uint16_t*>(m.x) + row * w.inner;
    for (int64_t i = 0; i < form.slices * inputs; i += size) {
      const int64_t element = i % inputs / in_element(w.bits), segment = i / size * form.rows + row;
      int32_t* to = elements + form.at(i / inputs, row);
      Filled rest;
      const uint16_t* from = rest.fill(x + i, w.inner - i, size);
      if (w.bits == 16) {
        for (int j = 0; j < size / 2; ++j) {
          elements_of_pair(pair_at(from + 2 * j), [to, at = i % inputs / 2 + j](int chain, uint32_t numbers) {
            to[chain * kChain + at] = static_cast<int32_t>(numbers);
          });
        }
      } else if (i < w.inner) {
        pack_segment(from, steps, w.bits, to + element, scales + segment, starts + segment);
      } else {  // beyond the last segment
        __builtin_memset(to + element, 0, static_cast<size_t>(size) * 4 / in_element(w.bits));
      }
    }
  }
}

// Neighbouring rows of the weight, from a slice on, at `first`, `stride` bytes apart. Where rows or inputs end they are copied,
// with the last row again and zeros behind them.
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

// Asks for a weight's bytes in the order in which they lie, from the panel on that comes next. A little at a time: only so many
// requests may be under way.
struct Ahead {
  const uint8_t* at;     // a line
  const uint8_t* until;  // what has been asked for

  Ahead(const Weight& w, int64_t out) : at(w.data + (out < w.out ? out : w.out) * w.row_bytes), until(at) {}

  void ask(int64_t bytes) {
    for (until += bytes; at < until; at += 64) _mm_prefetch(reinterpret_cast<const char*>(at), _MM_HINT_T1);
  }
};

// Elements [kLanes rows, Columns] as columns; at most kColumns.
#if LANES == 16
constexpr int kColumns = 16;  // whole lines: rows may lie so that a cache keeps few lines of all at once

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

// The highest bits of a pair of codes of 3 bits, from the masks of its step.
inline Bits high_bits(Bits masks, int pair) {
  const Bits bits = masks >> 2 * pair;
  return (bits << 2 & 4u) | (bits << 17 & 0x40000u);
}

// The codes of kLanes outs in 4 or 3 bits as fours of bytes: of each step of a slice as many pairs as there are columns, from `first` on.
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

// A slice of kLanes outs into one half of a panel's buffer: vectors of elements, kPanel apart. Segments have so many steps.
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
      } else {  // the even bytes of 32, then the odd ones
        put(column / 8 * 16 + column % 8, x[j] & 0x00ff00ffu);
        put(column / 8 * 16 + column % 8 + 8, x[j] >> 8 & 0x00ff00ffu);
      }
    }
    if constexpr (B < 8) unpack_codes<B, Steps>(x, masks, static_cast<int>(i), panel);
  }
}

// The scales and zeros of kLanes outs in a group. Zeros count in what the codes' sums begin with.
struct Scales {
  Floats scale, zero;

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

  // sums += a segment's sum, which began with `start`, of x with a scale.
  Floats add(Floats sums, Ints sum, int32_t start, float x_scale, bool zeros) const {
    Floats value = convert<Floats>(sum);
    if (zeros) value += static_cast<float>(start) * zero;
    return value * (scale * x_scale) + sums;
  }
};

// A panel's sums of one row.
void write(const Matmul& m, int64_t row, int64_t out, const float* sums) {
  const int64_t left = m.w.out - out, count = left < kPanel ? left : kPanel, at = row * m.w.out + out;
  if (!m.y_bfloat16) {
    __builtin_memcpy(static_cast<float*>(m.y) + at, sums, static_cast<size_t>(count) * 4);
    return;
  }
  auto* to = static_cast<uint16_t*>(m.y) + at;
  const Bits first = round_to_bfloat16(load(sums)) >> 16, second = round_to_bfloat16(load(sums + kLanes)) >> 16;
#if LANES == 16
  const __m512i low = _mm512_castsi256_si512(_mm512_cvtepi32_epi16((__m512i)first));
  const __m512i rounded = _mm512_inserti64x4(low, _mm512_cvtepi32_epi16((__m512i)second), 1);
#else
  const __m256i words = _mm256_packus_epi32((__m256i)first, (__m256i)second);
  const __m256i rounded = _mm256_permute4x64_epi64(words, 0xd8);  // it packs each half by itself
#endif
  if (count == kPanel) return void(__builtin_memcpy(to, &rounded, sizeof(rounded)));
  __builtin_memcpy(to, &rounded, static_cast<size_t>(count) * 2);
}

// sums [R, 2] += `count` elements of x [R, ...], rows elements_of(B) apart, times those of a panel.
template <int B, int R, typename Sum>
inline void add_all(const int32_t* x, int64_t count, const int32_t* panel, Sum (&sums)[R][2]) {
  int64_t i = 0;
  do {
    const Ints first = load(panel + i * kPanel), second = load(panel + i * kPanel + kLanes);
    for (int r = 0; r < R; ++r) {
      const Ints element = Ints{} + x[r * elements_of(B) + i];
      sums[r][0] = add_products<B>(sums[r][0], first, element);
      sums[r][1] = add_products<B>(sums[r][1], second, element);
    }
  } while (++i < count);
}

// totals [R, 2] = starts + products of elements. Asks for `bytes` of the weight for each 32 elements. A function of its own, because
// compilers keep fewer sums in registers within another.
template <int B, int R, typename Sum>
__attribute__((noinline)) void multiply(const int32_t* x, int64_t count, const int32_t* panel, const int32_t* starts,
                                        Ahead& ahead, int64_t bytes, Sum (&totals)[R][2]) {
  constexpr bool kNarrow = LANES == 8 && in_bytes(B);  // 8 sums of 4 products fit into 16 bits: 8 * 2 * 15 * 127
  constexpr int64_t kAtOnce = kNarrow ? 8 : 32;
  Sum sums[R][2];
  for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = (Sum)(Ints{} + starts[r]);
  int64_t i = 0;
  do {
    if (i % 32 == 0) ahead.ask(bytes);
    const int64_t some = least(kAtOnce, count - i);
    const int32_t *from = x + i, *weights = panel + i * kPanel;
    if constexpr (kNarrow) {
      Ints narrow[R][2] = {};
      add_all<B>(from, some, weights, narrow);
      for (int r = 0; r < R; ++r) {
        for (int h = 0; h < 2; ++h) sums[r][h] += pairs_of(narrow[r][h]);
      }
    } else {
      add_all<B>(from, some, weights, sums);
    }
    i += some;
  } while (i < count);
  for (int r = 0; r < R; ++r) {
    for (int h = 0; h < 2; ++h) totals[r][h] = sums[r][h];
  }
}

// sums [R, kPanel] += x [R, a slice] times a panel's slice, in numbers.
template <int R>
void add_numbers(const int32_t* x, const int32_t* panel, float* sums, Ahead& ahead, int64_t bytes) {
  static const int32_t zeros[R] = {};
  for (int chain = 0; chain < kChains; ++chain, x += kChain, panel += kChain * kPanel) {
    Floats totals[R][2];
    multiply<16, R>(x, kChain, panel, zeros, ahead, bytes, totals);
    for (int64_t r = 0; r < R; ++r) {
      for (int64_t h = 0; h < 2; ++h) {
        float* sum = sums + r * kPanel + h * kLanes;
        store(sum, load(sum) + totals[r][h]);
      }
    }
  }
}

// sums [R, kPanel] += a segment of x [R, ...] times its part of a panel, in codes.
template <int B, int R>
void add_codes(const int32_t* x, int64_t count, const float* x_scales, const int32_t* starts, const int32_t* panel,
               const Scales (&scales)[2], bool zeros, float* sums, Ahead& ahead, int64_t bytes) {
  Ints totals[R][2];
  multiply<B, R>(x, count, panel, starts, ahead, bytes, totals);
  for (int64_t r = 0; r < R; ++r) {
    for (int64_t h = 0; h < 2; ++h) {
      float* sum = sums + r * kPanel + h * kLanes;
      store(sum, scales[h].add(load(sum), totals[r][h], starts[r], x_scales[r], zeros));
    }
  }
}

// Calls f with the number of rows as a constant, which is at most Most.
template <int Most = kRows, typename F>
inline void with_rows(int64_t rows, F f) {
  if constexpr (Most > 1) {
    if (rows < Most) return with_rows<Most - 1>(rows, f);
  }
  f(std::integral_constant<int, Most>{});
}

// Many rows: some panels, slice by slice, before those from `next` on. Behind `panel`, a buffer for a panel's slice, is one for the
// sums [panels, rows, kPanel].
template <int B, int Steps>
void multiply_panels(const Matmul& m, const Packed& form, const int32_t* x, const Block& b, int64_t next, int32_t* panel) {
  const Weight& w = m.w;
  constexpr int64_t kElements = elements_of(B);
  auto* sums = reinterpret_cast<float*>(panel + kElements * kPanel);
  const Segments& segments = form.segments;
  const int64_t panels = parts(b.outs, kPanel), in_slice = inputs_of(B) / (Steps * kStep);
  const int64_t passes = parts(b.rows, kRows), height = parts(b.rows, passes), elements = Steps * kStep / in_element(B);
  const int64_t asked = b.rows <= kMemoryRows ? kPanel * bytes_of(B) / passes : 0;  // for a slice and a pass
  Ahead ahead(w, next);
  for (int64_t i = 0; i < panels * b.rows * kPanel; i += kLanes) store(sums + i, Floats{});
  for (int64_t s = 0; s < form.slices; ++s) {
    const int64_t first = s * in_slice, end = least(first + in_slice, segments.number);
    for (int64_t p = 0; p < panels; ++p) {
      const int64_t out = b.out + p * kPanel;
      const Slice<B> slice(w, out, s);
      unpack<B, Steps>(slice.first, slice.stride, panel);
      unpack<B, Steps>(slice.first + kLanes * slice.stride, slice.stride, panel + kLanes);
      const auto for_rows = [&](auto add) {
        for (int64_t row = 0; row < b.rows; row += height) {
          float* to = sums + (p * b.rows + row) * kPanel;
          with_rows(least(b.rows - row, height), [&](auto rows) { add(rows, b.row + row, to); });
        }
      };
      if constexpr (B == 16) {
        for_rows([&](auto rows, int64_t row, float* to) {
          add_numbers<rows>(x + form.at(s, row), panel, to, ahead, asked / (kElements / 32));
        });
      } else {
        for (int64_t i = first; i < end; ++i) {
          const int64_t group = i / segments.per_group, element = (i - first) * elements;
          const Scales scales[2] = {Scales(w, out, group), Scales(w, out + kLanes, group)};
          for_rows([&](auto rows, int64_t row, float* to) {
            const int64_t at = i * form.rows + row;
            add_codes<B, rows>(x + form.at(s, row) + element, elements, form.scales(x) + at, form.starts(x) + at,
                               panel + element * kPanel, scales, w.zeros, to, ahead, asked / in_slice / parts(elements, 32));
          });
        }
      }
      if (s + 1 < form.slices) continue;
      for (int64_t row = 0; row < b.rows; ++row) {
        write(m, b.row + row, out, sums + (p * b.rows + row) * kPanel);
      }
    }
  }
}

template <int B, int Steps>
void multiply_block(const Matmul& m, const int32_t* x, const Block& b, const Block* after, int32_t* buffer) {
  const Packed form(m);
  const int64_t outs = b.rows <= kMemoryRows ? kPanel : b.outs;  // at once
  for (int64_t out = 0; out < b.outs; out += outs) {
    const Block part = {b.out + out, least(outs, b.outs - out), b.row, b.rows};
    const int64_t next = out + outs < b.outs || !after ? part.out + part.outs : after->out;
    multiply_panels<B, Steps>(m, form, x, part, next, buffer);
  }
}

Block block(const Matmul& m) {
  if (m.rows > kMemoryRows) return {0, kBlockOuts, 0, kBlockRows};
  const int64_t outs = least(kBlockBytes / m.w.row_bytes, least(kBlockWork / (m.rows * m.w.inner), m.w.out / kLeastBlocks));
  return {0, parts(outs ? outs : 1, kPanel) * kPanel, 0, m.rows};
}

size_t scratch_bytes(const Matmul& m) {
  const int64_t sums = least(m.rows, kBlockRows) * (m.rows > kMemoryRows ? kBlockOuts : kPanel);
  return static_cast<size_t>(elements_of(m.w.bits) * kPanel + sums) * 4;
}

void multiply(const Matmul& m, const void* packed, const Block& b, const Block* after, void* scratch) {
  const auto* x = static_cast<const int32_t*>(packed);
  auto* buffer = static_cast<int32_t*>(scratch);
  const auto in_segments = [&](auto bits) {
    const int64_t steps = Segments(m.w).steps;
    if (steps == 4) return multiply_block<bits, 4>(m, x, b, after, buffer);
    if (steps == 2) return multiply_block<bits, 2>(m, x, b, after, buffer);
    multiply_block<bits, 1>(m, x, b, after, buffer);
  };
  if (m.w.bits == 16) return multiply_block<16, 1>(m, x, b, after, buffer);
  if (m.w.bits == 8) return in_segments(std::integral_constant<int, 8>{});
  if (m.w.bits == 4) return in_segments(std::integral_constant<int, 4>{});
  in_segments(std::integral_constant<int, 3>{});
}

}  // namespace

#if LANES == 16
extern const Multiplier kMatmulAvx512 = {packed_bytes, pack, block, scratch_bytes, multiply};
#else
extern const Multiplier kMatmulAvx2 = {packed_bytes, pack, block, scratch_bytes, multiply};
#endif

}  // namespace jaxserve

#endif
