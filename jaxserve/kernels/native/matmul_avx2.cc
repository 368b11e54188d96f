// Products of rows of bfloat16 on AVX2.
//
// Outputs lie beside each other in the lanes of a vector. The weight, which lies row by row, is turned to that in registers, 8 rows
// and 16 bytes at a time.
//
// bfloat16 weights are widened to float32, and every output is summed in the same order: of 256 inputs first the even ones, then
// the odd ones. Codes meet x in 16-bit fixed point, in integers that a lane adds up exactly over a segment of at most 128 inputs;
// only its sum is brought to float32 and scaled. Each segment of x has a scale of its own, so that a number of it keeps more of
// its digits than bfloat16 has, unless it is smaller than the largest by a factor of 2^7 or more. So a row's result does not
// depend on how many rows there are.
//
// With many rows a slice of a panel of 16 outs is turned into a buffer that stays in L1, and groups of up to 6 rows of x are
// multiplied by it. With few it is used at once, by codes even without turning: integers may be added in any order.

#include "matmul.h"

#if defined(__x86_64__)

#include <immintrin.h>

#include <type_traits>

#include "groups.h"

namespace jaxserve {
namespace {

constexpr int64_t kLanes = 8;
constexpr int64_t kPanel = 2 * kLanes;         // outs
constexpr int kRows = 6;                       // 12 sums in registers
constexpr int kFewNumbers = 4, kFewCodes = 3;  // rows that meet the weight at once, without a buffer
constexpr int64_t kBlockBytes = 128 << 10;     // of the weight, for few rows: small enough to share out evenly,
constexpr int64_t kBlockWork = 1 << 20;        // so many multiplications,
constexpr int64_t kLeastBlocks = 4;            // and parts of even a small weight
constexpr int64_t kBlockOuts = 128;            // for many rows: slices of x, and sums, fit into L2
constexpr int64_t kBlockRows = 128;
constexpr int64_t kMemoryRows = 32;            // up to so many, the weight is read in the order in which it lies

inline int64_t parts(int64_t whole, int64_t part) { return (whole + part - 1) / part; }
inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Inputs of a slice, the least that any kind of weight unpacks as a whole, and what they take in a row of the weight.
constexpr int64_t inputs_of(int bits) { return bits == 3 || bits == 16 ? 256 : 128; }
constexpr int64_t bytes_of(int bits) { return inputs_of(bits) * bits / 8; }

inline __m256i load(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }

inline int32_t load_pair(const void* from) {
  int32_t pair;
  __builtin_memcpy(&pair, from, 4);
  return pair;
}

// x as the weight meets it, slice by slice, so that what is used together lies together: numbers [slices, rows, inputs] for a
// bfloat16 weight; else words [slices, rows, inputs], scales [segments, rows], and what a segment's sums begin with.
struct Packed {
  Segments segments;
  int64_t rows, slices, inputs;

  explicit Packed(const Matmul& m)
      : segments(m.w), rows(m.rows), slices(parts(m.w.inner, inputs_of(m.w.bits))), inputs(inputs_of(m.w.bits)) {}

  int64_t numbers() const { return slices * rows * inputs; }
  int64_t at(int64_t slice, int64_t row) const { return (slice * rows + row) * inputs; }
  const float* scales(const void* x) const {
    return reinterpret_cast<const float*>(static_cast<const uint16_t*>(x) + numbers());
  }
  const int32_t* starts(const void* x) const {
    return reinterpret_cast<const int32_t*>(scales(x) + segments.number * rows);
  }
};

size_t packed_bytes(const Matmul& m) {
  const Packed form(m);
  const int64_t bytes = m.w.bits == 16 ? form.numbers() * 4 : form.numbers() * 2 + form.segments.number * form.rows * 8;
  return static_cast<size_t>(bytes);
}

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

inline __m256i low_words(__m256i a, __m256i b) {  // as they are, in turn by 16 bits
  return _mm256_blend_epi16(a, _mm256_slli_epi32(b, 16), 0xaa);
}

// A segment in integers. Bytes are unpacked into even and odd ones, so x of such a weight is parted likewise, by 32 inputs.
void pack_segment(const uint16_t* x, int64_t steps, int bits, uint16_t* words, float* scale, int32_t* start) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  __m256 largest = _mm256_setzero_ps(), poison = _mm256_setzero_ps();
  for (int64_t i = 0; i < 2 * steps; ++i) {
    const __m256 a = even(load(x + 16 * i)), b = odd(load(x + 16 * i));
    largest = _mm256_max_ps(largest, _mm256_max_ps(_mm256_andnot_ps(sign, a), _mm256_andnot_ps(sign, b)));
    poison = _mm256_fmadd_ps(_mm256_add_ps(a, b), _mm256_setzero_ps(), poison);  // what is not finite stays
  }
  constexpr float kMost = 32767, kLeast = 1e-30f;  // below it the quotient may overflow
  const float top = most(largest), factor = top > kLeast ? kMost / top : 0;
  float lost = 0;
  for (int i = 0; i < 8; ++i) lost += reinterpret_cast<const float*>(&poison)[i];
  *scale = (top > kLeast ? top * (1 / kMost) : 0) + lost;
  __m256i sum = _mm256_setzero_si256();
  for (int64_t i = 0; i < 2 * steps; i += 2, words += kStep) {
    __m256i a[2], b[2];
    for (int j = 0; j < 2; ++j) {
      const __m256i numbers = load(x + 16 * (i + j));
      a[j] = _mm256_cvtps_epi32(_mm256_mul_ps(even(numbers), _mm256_set1_ps(factor)));
      b[j] = _mm256_cvtps_epi32(_mm256_mul_ps(odd(numbers), _mm256_set1_ps(factor)));
      sum = _mm256_add_epi32(sum, _mm256_add_epi32(a[j], b[j]));
    }
    __m256i first = low_words(a[0], b[0]), second = low_words(a[1], b[1]);
    if (bits == 8) {
      first = _mm256_permute4x64_epi64(_mm256_packs_epi32(a[0], a[1]), 0xd8);
      second = _mm256_permute4x64_epi64(_mm256_packs_epi32(b[0], b[1]), 0xd8);
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(words), first);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(words + 16), second);
  }
  int32_t total = 0;
  for (int i = 0; i < 8; ++i) total += reinterpret_cast<const int32_t*>(&sum)[i];
  *start = -total * (1 << (bits - 1));  // codes count from -2^(bits - 1)
}

void pack(const Matmul& m, int64_t row, void* packed) {
  const Weight& w = m.w;
  const Packed form(m);
  const int64_t steps = w.bits == 16 ? 1 : form.segments.steps, size = steps * kStep;
  auto* numbers = static_cast<float*>(packed);
  auto* words = static_cast<uint16_t*>(packed);
  auto* scales = const_cast<float*>(form.scales(packed));
  auto* starts = const_cast<int32_t*>(form.starts(packed));
  for (const int64_t end = row + kPackRows < m.rows ? row + kPackRows : m.rows; row < end; ++row) {
    const uint16_t* x = static_cast<const uint16_t*>(m.x) + row * w.inner;
    for (int64_t i = 0; i < form.slices * form.inputs; i += size) {
      const int64_t at = form.at(i / form.inputs, row) + i % form.inputs, segment = i / size * form.rows + row;
      Filled rest;
      const uint16_t* from = rest.fill(x + i, w.inner - i, size);
      if (w.bits == 16) {
        float* to = numbers + form.at(i / form.inputs, row) + i % form.inputs / 2;
        for (int64_t j = 0; j < size / 2; ++j) {
          to[j] = widen(from[2 * j]);
          to[j + inputs_of(16) / 2] = widen(from[2 * j + 1]);
        }
      } else if (i < w.inner) {
        pack_segment(from, steps, w.bits, words + at, scales + segment, starts + segment);
      } else {  // beyond the last segment
        __builtin_memset(words + at, 0, static_cast<size_t>(size) * 2);
      }
    }
  }
}

// Neighbouring rows of the weight, from a slice on, at `first`, `stride` bytes apart. Where rows or inputs end they are copied,
// with the last row again and zeros behind them.
template <int Bits, int64_t Outs>
struct Slice {
  const uint8_t* first;
  int64_t stride;
  uint8_t copies[Outs][bytes_of(Bits)];

  Slice(const Weight& w, int64_t out, int64_t slice) : first(w.data + out * w.row_bytes), stride(w.row_bytes) {
    const int64_t at = slice * bytes_of(Bits), left = w.row_bytes - at;
    first += at;
    if (out + Outs <= w.out && left >= bytes_of(Bits)) return;
    const int64_t bytes = left < bytes_of(Bits) ? left : bytes_of(Bits);
    for (int64_t o = 0; o < Outs; ++o) {
      const uint8_t* row = w.data + (out + o < w.out ? out + o : w.out - 1) * w.row_bytes + at;
      __builtin_memset(copies[o] + bytes, 0, static_cast<size_t>(bytes_of(Bits) - bytes));
      __builtin_memcpy(copies[o], row, static_cast<size_t>(bytes));
    }
    first = copies[0];
    stride = bytes_of(Bits);
  }
};

// Asks for a weight's bytes in the order in which they lie, by so much ahead as the panel takes that is read meanwhile. A little
// at a time: only so many requests may be under way.
struct Ahead {
  const uint8_t* at;     // a line
  const uint8_t* until;  // what has been asked for

  Ahead(const Weight& w, int64_t out) : at(w.data + (out < w.out ? out : w.out) * w.row_bytes), until(at) {}

  void ask(int64_t bytes) {
    for (until += bytes; at < until; at += 64) _mm_prefetch(reinterpret_cast<const char*>(at), _MM_HINT_T1);
  }
};

// Words of 32 bits [8 rows, 4] as columns.
inline void turn(const uint8_t* rows, int64_t stride, __m256i (&columns)[4]) {
  __m256i x[4];
  for (int i = 0; i < 4; ++i) {
    const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows + i * stride));
    const __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows + 4 * stride + i * stride));
    x[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
  }
  const __m256i a = _mm256_unpacklo_epi32(x[0], x[1]), b = _mm256_unpacklo_epi32(x[2], x[3]);
  const __m256i c = _mm256_unpackhi_epi32(x[0], x[1]), d = _mm256_unpackhi_epi32(x[2], x[3]);
  columns[0] = _mm256_unpacklo_epi64(a, b);
  columns[1] = _mm256_unpackhi_epi64(a, b);
  columns[2] = _mm256_unpacklo_epi64(c, d);
  columns[3] = _mm256_unpackhi_epi64(c, d);
}

// A slice of 8 outs into one half of a panel's buffer: vectors of 8 numbers or pairs of codes, kPanel apart.
template <int Bits>
void unpack(const uint8_t* rows, int64_t stride, int32_t* panel) {
  const auto put = [panel](int64_t pair, __m256i x) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(panel + pair * kPanel), x);
  };
  __m256i masks[Bits == 3 ? 8 : 1];
  if constexpr (Bits == 3) {
    __m256i x[4];
    for (int i = 0; i < 2; ++i) {
      turn(rows + 64 + 16 * i, stride, x);
      for (int j = 0; j < 4; ++j) masks[4 * i + j] = x[j];
    }
  }
  for (int64_t i = 0; i < bytes_of(Bits == 3 ? 4 : Bits) / 16; ++i) {
    __m256i x[4];
    turn(rows + 16 * i, stride, x);
    for (int64_t j = 0; j < 4; ++j) {
      const int64_t column = 4 * i + j;
      if constexpr (Bits == 16) {
        put(column, _mm256_castps_si256(even(x[j])));
        put(column + inputs_of(16) / 2, _mm256_castps_si256(odd(x[j])));
      } else if constexpr (Bits == 8) {  // the even bytes of 32, then the odd ones
        const __m256i low = _mm256_set1_epi16(255);
        put(column / 8 * 16 + column % 8, _mm256_and_si256(x[j], low));
        put(column / 8 * 16 + column % 8 + 8, _mm256_srli_epi16(x[j], 8));
      } else if constexpr (Bits == 4) {
        const __m256i low = _mm256_set1_epi16(15);
        for (int s = 0; s < 4; ++s) put(16 * s + column, _mm256_and_si256(_mm256_srli_epi16(x[j], 4 * s), low));
      } else {
        const __m256i low = _mm256_set1_epi16(3), high = _mm256_set1_epi16(4), pair = _mm256_set1_epi32(3);
        for (int s = 0; s < 8; ++s) {
          const __m256i bits = _mm256_and_si256(_mm256_srli_epi32(masks[s], static_cast<int>(2 * column)), pair);
          const __m256i apart = _mm256_or_si256(_mm256_slli_epi32(bits, 2), _mm256_slli_epi32(bits, 17));
          const __m256i codes = _mm256_and_si256(_mm256_srli_epi16(x[j], 2 * s), low);
          put(16 * s + column, _mm256_or_si256(codes, _mm256_and_si256(apart, high)));
        }
      }
    }
  }
}

// The scales and zeros of 8 outs in a group. Zeros count in what the codes' sums begin with.
struct Scales {
  __m256 scale, zero;

  Scales(const Weight& w, int64_t out, int64_t group) : scale(read(w, w.scales, w.wide_scales, out, group)) {
    if (!w.zeros) return;
    const __m256 numbers = read(w, w.zeros, w.wide_zeros, out, group);
    zero = _mm256_mul_ps(numbers, _mm256_set1_ps(1.0f / static_cast<float>(1 << (w.bits - 1))));
  }

  static __m256 read(const Weight& w, const void* numbers, bool wide, int64_t out, int64_t group) {
    const auto at = [&](int64_t o) { return (out + o < w.out ? out + o : w.out - 1) * w.groups + group; };
    if (wide) {
      const auto* x = static_cast<const float*>(numbers);
      return _mm256_setr_ps(x[at(0)], x[at(1)], x[at(2)], x[at(3)], x[at(4)], x[at(5)], x[at(6)], x[at(7)]);
    }
    const auto* x = static_cast<const int16_t*>(numbers);
    const __m128i words = _mm_setr_epi16(x[at(0)], x[at(1)], x[at(2)], x[at(3)], x[at(4)], x[at(5)], x[at(6)], x[at(7)]);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
  }

  // sums += a segment's sum, which began with `start`, of x with a scale.
  __m256 add(__m256 sums, __m256i sum, int32_t start, float x_scale, bool zeros) const {
    __m256 value = _mm256_cvtepi32_ps(sum);
    if (zeros) value = _mm256_fmadd_ps(_mm256_set1_ps(static_cast<float>(start)), zero, value);
    return _mm256_fmadd_ps(value, _mm256_mul_ps(scale, _mm256_set1_ps(x_scale)), sums);
  }
};

void write(const Matmul& m, int64_t row, int64_t out, __m256 sums) {
  const int64_t left = m.w.out - out, count = left < kLanes ? left : kLanes, at = row * m.w.out + out;
  if (m.y_bfloat16) {
    const __m256i bits = _mm256_castps_si256(sums), last = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(last, _mm256_set1_epi32(0x7fff)));
    const __m256 number = _mm256_cmp_ps(sums, sums, _CMP_EQ_OQ);
    rounded = _mm256_blendv_epi8(_mm256_set1_epi32(0x7fc00000), rounded, _mm256_castps_si256(number));
    rounded = _mm256_srli_epi32(rounded, 16);
    const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
    auto* to = static_cast<uint16_t*>(m.y) + at;
    if (count == kLanes) return _mm_storeu_si128(reinterpret_cast<__m128i*>(to), words);
    __builtin_memcpy(to, &words, static_cast<size_t>(count) * 2);
  } else {
    auto* to = static_cast<float*>(m.y) + at;
    if (count == kLanes) return _mm256_storeu_ps(to, sums);
    __builtin_memcpy(to, &sums, static_cast<size_t>(count) * 4);
  }
}

// sums [R, kPanel] += x [R, a slice] times a panel's slice, in numbers: first the even inputs, then the odd ones. Asks for so many
// bytes for each step.
template <int R>
void add_numbers(const float* x, const float* panel, float* sums, Ahead& ahead, int64_t bytes) {
  for (int64_t half = 0; half < inputs_of(16); half += inputs_of(16) / 2) {
    __m256 s[R][2] = {};
    for (int64_t step = half; step < half + inputs_of(16) / 2; step += kStep) {
      ahead.ask(bytes);
      for (int64_t i = step; i < step + kStep; ++i) {
        const __m256 first = _mm256_load_ps(panel + i * kPanel), second = _mm256_load_ps(panel + i * kPanel + kLanes);
        for (int r = 0; r < R; ++r) {
          const __m256 number = _mm256_broadcast_ss(x + r * inputs_of(16) + i);
          s[r][0] = _mm256_fmadd_ps(first, number, s[r][0]);
          s[r][1] = _mm256_fmadd_ps(second, number, s[r][1]);
        }
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int h = 0; h < 2; ++h) {
        float* sum = sums + r * kPanel + h * kLanes;
        _mm256_store_ps(sum, _mm256_add_ps(_mm256_load_ps(sum), s[r][h]));
      }
    }
  }
}

// sums + products of pairs of words. As one piece, because compilers move the additions behind all products, and then run out
// of registers.
inline __m256i add_products(__m256i sums, __m256i codes, __m256i numbers) {
  __m256i products;
  __asm__("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(sums), "=&x"(products) : "x"(codes), "x"(numbers));
  return sums;
}

// totals [R, kPanel] = starts + `pairs` pairs of words of x [R, a slice] times those of a panel. A function of its own, because
// compilers keep fewer sums in registers within another.
template <int R, int64_t Inputs>
__attribute__((noinline)) void multiply_pairs(const uint16_t* x, int64_t pairs, const int32_t* panel, const int32_t* starts,
                                              int32_t* totals) {
  __m256i lanes[R][2];
  for (int r = 0; r < R; ++r) lanes[r][0] = lanes[r][1] = _mm256_set1_epi32(starts[r]);
  for (int64_t i = 0; i < pairs; ++i) {
    const __m256i first = load(panel + i * kPanel), second = load(panel + i * kPanel + kLanes);
    for (int r = 0; r < R; ++r) {
      const __m256i pair = _mm256_set1_epi32(load_pair(x + r * Inputs + 2 * i));
      lanes[r][0] = add_products(lanes[r][0], first, pair);
      lanes[r][1] = add_products(lanes[r][1], second, pair);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int h = 0; h < 2; ++h) _mm256_store_si256(reinterpret_cast<__m256i*>(totals + r * kPanel + h * kLanes), lanes[r][h]);
  }
}

// sums [R, kPanel] += a segment of x [R, ...] times its part of a panel, in codes.
template <int R, int64_t Inputs>
void add_codes(const uint16_t* x, int64_t pairs, const float* x_scales, const int32_t* starts, const int32_t* panel,
               const Scales (&scales)[2], bool zeros, float* sums) {
  alignas(32) int32_t totals[R * kPanel];
  multiply_pairs<R, Inputs>(x, pairs, panel, starts, totals);
  for (int r = 0; r < R; ++r) {
    for (int h = 0; h < 2; ++h) {
      const int64_t at = r * kPanel + h * kLanes;
      _mm256_store_ps(sums + at, scales[h].add(_mm256_load_ps(sums + at), load(totals + at), starts[r], x_scales[r], zeros));
    }
  }
}

// Calls f with the number of rows as a constant.
template <typename F>
inline void with_rows(int64_t rows, F f) {
  switch (rows) {
    case 1: return f(std::integral_constant<int, 1>{});
    case 2: return f(std::integral_constant<int, 2>{});
    case 3: return f(std::integral_constant<int, 3>{});
    case 4: return f(std::integral_constant<int, 4>{});
    case 5: return f(std::integral_constant<int, 5>{});
    default: return f(std::integral_constant<int, kRows>{});
  }
}

// Many rows: some panels, slice by slice. `buffer` holds a panel's slice, and then the sums [panels, rows, kPanel].
template <int Bits>
void multiply_panels(const Matmul& m, const Packed& form, const void* x, const Block& b, void* buffer) {
  const Weight& w = m.w;
  auto* panel = static_cast<int32_t*>(buffer);
  auto* sums = reinterpret_cast<float*>(panel + inputs_of(Bits) * kPanel);
  const Segments& segments = form.segments;
  const int64_t panels = parts(b.outs, kPanel), in_slice = inputs_of(Bits) / (segments.steps * kStep);
  const int64_t passes = parts(b.rows, kRows), height = parts(b.rows, passes), pairs = segments.steps * kStep / 2;
  const int64_t asked = b.rows <= kMemoryRows ? kPanel * bytes_of(Bits) / passes : 0;  // for a slice and a pass
  Ahead ahead(w, b.out + b.outs);
  for (int64_t i = 0; i < panels * b.rows * kPanel; i += kLanes) _mm256_store_ps(sums + i, _mm256_setzero_ps());
  for (int64_t s = 0; s < form.slices; ++s) {
    const int64_t first = s * in_slice, end = segments.number < first + in_slice ? segments.number : first + in_slice;
    for (int64_t p = 0; p < panels; ++p) {
      const int64_t out = b.out + p * kPanel;
      const Slice<Bits, kPanel> slice(w, out, s);
      unpack<Bits>(slice.first, slice.stride, panel);
      unpack<Bits>(slice.first + kLanes * slice.stride, slice.stride, panel + kLanes);
      const auto for_rows = [&](auto add) {
        for (int64_t row = 0; row < b.rows; row += height) {
          float* to = sums + (p * b.rows + row) * kPanel;
          with_rows(b.rows - row < height ? b.rows - row : height, [&](auto rows) { add(rows, b.row + row, to); });
        }
      };
      if constexpr (Bits == 16) {
        const auto* numbers = static_cast<const float*>(x);
        for_rows([&](auto rows, int64_t row, float* to) {
          const auto* weights = reinterpret_cast<const float*>(panel);
          add_numbers<rows>(numbers + form.at(s, row), weights, to, ahead, asked / (inputs_of(16) / kStep));
        });
      } else {
        const auto* words = static_cast<const uint16_t*>(x);
        for (int64_t i = first; i < end; ++i) {
          const int64_t group = i / segments.per_group, pair = (i - first) * pairs;
          const Scales scales[2] = {Scales(w, out, group), Scales(w, out + kLanes, group)};
          for_rows([&](auto rows, int64_t row, float* to) {
            ahead.ask(asked / in_slice);
            add_codes<rows, inputs_of(Bits)>(words + form.at(s, row) + 2 * pair, pairs, form.scales(x) + i * form.rows + row,
                                             form.starts(x) + i * form.rows + row, panel + pair * kPanel, scales, w.zeros, to);
          });
        }
      }
    }
  }
  for (int64_t p = 0; p < panels; ++p) {
    for (int64_t row = 0; row < b.rows; ++row) {
      for (int64_t h = 0; h < 2 && b.out + p * kPanel + h * kLanes < w.out; ++h) {
        const float* from = sums + (p * b.rows + row) * kPanel + h * kLanes;
        write(m, b.row + row, b.out + p * kPanel + h * kLanes, _mm256_load_ps(from));
      }
    }
  }
}

// R rows and 8 outs of a bfloat16 weight.
template <int R>
void multiply_few_numbers(const Matmul& m, const Packed& form, const float* x, int64_t row, int64_t out) {
  __m256 sums[R] = {};
  Ahead ahead(m.w, out + kLanes);
  for (int64_t s = 0; s < form.slices; ++s) {
    const Slice<16, kLanes> slice(m.w, out, s);
    const float* numbers = x + form.at(s, row);
    __m256 chains[R][2] = {};
    for (int64_t i = 0; i < inputs_of(16); i += 8) {
      __m256i pairs[4];
      turn(slice.first + i * 2, slice.stride, pairs);
      for (int j = 0; j < 8; ++j) {
        const __m256 weights = j % 2 ? odd(pairs[j / 2]) : even(pairs[j / 2]);
        for (int r = 0; r < R; ++r) {
          const float* number = numbers + r * inputs_of(16) + j % 2 * (inputs_of(16) / 2) + (i + j) / 2;
          chains[r][j % 2] = _mm256_fmadd_ps(weights, _mm256_broadcast_ss(number), chains[r][j % 2]);
        }
      }
      ahead.ask(kLanes * 16);
    }
    for (int r = 0; r < R; ++r) sums[r] = _mm256_add_ps(_mm256_add_ps(sums[r], chains[r][0]), chains[r][1]);
  }
  for (int r = 0; r < R; ++r) write(m, row + r, out, sums[r]);
}

// Sixteen codes as words: half `h` of step `s` of a slice, in the order that x has.
template <int Bits>
inline __m256i words_of(const uint8_t* row, int s, int h) {
  if constexpr (Bits == 8) {
    const __m256i bytes = load(row + 32 * s);
    return h ? _mm256_srli_epi16(bytes, 8) : _mm256_and_si256(bytes, _mm256_set1_epi16(255));
  } else if constexpr (Bits == 4) {
    const __m256i codes = _mm256_srli_epi16(load(row + 32 * h), 4 * s);
    return s == 3 ? codes : _mm256_and_si256(codes, _mm256_set1_epi16(15));
  } else {
    const __m256i codes = _mm256_and_si256(_mm256_srli_epi16(load(row + 32 * h), 2 * s), _mm256_set1_epi16(3));
    int16_t mask;
    __builtin_memcpy(&mask, row + 64 + 4 * s + 2 * h, 2);
    const __m256i bits = _mm256_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, -32768);
    const __m256i set = _mm256_cmpeq_epi16(_mm256_and_si256(_mm256_set1_epi16(mask), bits), bits);
    return _mm256_or_si256(codes, _mm256_and_si256(set, _mm256_set1_epi16(4)));
  }
}

// The sums of the lanes of each.
inline __m256i sums_of(const __m256i (&x)[kLanes]) {
  const __m256i a = _mm256_hadd_epi32(_mm256_hadd_epi32(x[0], x[1]), _mm256_hadd_epi32(x[2], x[3]));
  const __m256i b = _mm256_hadd_epi32(_mm256_hadd_epi32(x[4], x[5]), _mm256_hadd_epi32(x[6], x[7]));
  return _mm256_add_epi32(_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31));
}

// R rows and 8 outs of codes, in segments of L steps.
template <int R, int Bits, int L>
void multiply_few_codes(const Matmul& m, const Packed& form, const uint16_t* x, int64_t row, int64_t out) {
  const Segments& segments = form.segments;
  __m256 sums[R] = {};
  Ahead ahead(m.w, out + kLanes);
  for (int64_t slice = 0, segment = 0; segment < segments.number; ++slice) {
    const Slice<Bits, kLanes> codes(m.w, out, slice);
    const uint16_t* numbers = x + form.at(slice, row);
    for (int step = 0; step < int{inputs_of(Bits) / kStep} && segment < segments.number; step += L, ++segment) {
      __m256i lanes[R][kLanes];
      for (int o = 0; o < kLanes; ++o) {
        for (int r = 0; r < R; ++r) lanes[r][o] = _mm256_setzero_si256();
        for (int s = step; s < step + L; ++s) {
          for (int h = 0; h < 2; ++h) {
            const __m256i words = words_of<Bits>(codes.first + o * codes.stride, s, h);
            for (int r = 0; r < R; ++r) {
              const __m256i products = _mm256_madd_epi16(words, load(numbers + r * inputs_of(Bits) + s * kStep + h * 16));
              lanes[r][o] = _mm256_add_epi32(lanes[r][o], products);
            }
          }
        }
      }
      const Scales scales(m.w, out, segment / segments.per_group);
      for (int r = 0; r < R; ++r) {
        const int64_t at = segment * form.rows + row + r;
        const int32_t start = form.starts(x)[at];
        const __m256i sum = _mm256_add_epi32(sums_of(lanes[r]), _mm256_set1_epi32(start));
        sums[r] = scales.add(sums[r], sum, start, form.scales(x)[at], m.w.zeros);
      }
      ahead.ask(kLanes * L * kStep * Bits / 8);
    }
  }
  for (int r = 0; r < R; ++r) write(m, row + r, out, sums[r]);
}

template <int R, int Bits>
void multiply_few(const Matmul& m, const Packed& form, const void* x, int64_t row, int64_t out) {
  if constexpr (Bits == 16) {
    multiply_few_numbers<R>(m, form, static_cast<const float*>(x), row, out);
  } else {
    const auto* words = static_cast<const uint16_t*>(x);
    const int64_t steps = form.segments.steps;
    if (steps == 4) return multiply_few_codes<R, Bits, 4>(m, form, words, row, out);
    if (steps == 2) return multiply_few_codes<R, Bits, 2>(m, form, words, row, out);
    multiply_few_codes<R, Bits, 1>(m, form, words, row, out);
  }
}

template <int Bits>
void multiply_block(const Matmul& m, const void* x, const Block& b, void* buffer) {
  const Packed form(m);
  constexpr int kFew = Bits == 16 ? kFewNumbers : kFewCodes;
  if (b.rows <= kFew) {
    return with_rows(b.rows, [&](auto rows) {
      if constexpr (rows <= kFew) {
        for (int64_t out = b.out; out < b.out + b.outs; out += kLanes) multiply_few<rows, Bits>(m, form, x, b.row, out);
      }
    });
  }
  const int64_t outs = b.rows <= kMemoryRows ? kPanel : b.outs;  // at once
  for (int64_t out = 0; out < b.outs; out += outs) {
    const Block part = {b.out + out, outs < b.outs - out ? outs : b.outs - out, b.row, b.rows};
    multiply_panels<Bits>(m, form, x, part, buffer);
  }
}

Block block(const Matmul& m) {
  if (m.rows > kMemoryRows) return {0, kBlockOuts, 0, kBlockRows};
  const int64_t outs = least(kBlockBytes / m.w.row_bytes, least(kBlockWork / (m.rows * m.w.inner), m.w.out / kLeastBlocks));
  return {0, parts(outs ? outs : 1, kPanel) * kPanel, 0, m.rows};
}

size_t scratch_bytes(const Matmul& m) {
  const int64_t rows = m.rows < kBlockRows ? m.rows : kBlockRows;
  const int64_t sums = rows * (m.rows > kMemoryRows ? kBlockOuts : kPanel);
  return static_cast<size_t>(inputs_of(m.w.bits) * kPanel + sums) * sizeof(float);
}

void multiply(const Matmul& m, const void* packed, const Block& b, void* scratch) {
  if (m.w.bits == 16) return multiply_block<16>(m, packed, b, scratch);
  if (m.w.bits == 8) return multiply_block<8>(m, packed, b, scratch);
  if (m.w.bits == 4) return multiply_block<4>(m, packed, b, scratch);
  multiply_block<3>(m, packed, b, scratch);
}

}  // namespace

extern const Multiplier kMatmulAvx2 = {packed_bytes, pack, block, scratch_bytes, multiply};

}  // namespace jaxserve

#endif
