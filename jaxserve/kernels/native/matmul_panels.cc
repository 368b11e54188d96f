// Products of rows of bfloat16 on vectors: on AVX2, and on AVX-512 with its VNNI and BF16 instructions.
//
// Outputs lie beside each other in the lanes of a vector. The weight, which lies row by row, is turned to that in registers, as
// many rows as a vector has lanes, 16 bytes (AVX2) or a line at a time (panels_weight.h). A lane then holds an element of 32 bits of
// one output, and meets the same element of x, which is brought to all lanes (panels_x.h).
//
// Elements of numbers are always summed in the same order. Codes meet x in integers: a lane adds them up exactly over a segment of
// at most 128 inputs; only its sum is brought to float32 and scaled. So a row's result does not depend on how many rows there are.
//
// A slice of a panel of two vectors of outs is turned into a buffer that stays in L1, and groups of rows of x are multiplied by it,
// as many as registers have room for sums. For few rows there are matmul_avx2.cc and matmul_vnni.cc.

#include "matmul.h"

#if defined(__x86_64__)

#include <immintrin.h>

#include <type_traits>

#include "groups.h"
#include "panels.h"
#include "panels_weight.h"
#include "panels_x.h"
#include "vectors.h"

namespace jaxserve {
namespace {

constexpr int kRows = LANES == 16 ? 8 : 6;   // 16 or 12 sums in registers; fewer passes of 12 rows ask memory faster than it answers
constexpr int64_t kBlockBytes = 128 << 10;   // of the weight, for few rows: small enough to share out evenly,
constexpr int64_t kBlockWork = 1 << 20;      // so many multiplications,
constexpr int64_t kLeastBlocks = 4;          // and parts of even a small weight
constexpr int64_t kBlockOuts = 128;          // for many rows: slices of x, and sums, fit into L2
constexpr int64_t kBlockRows = LANES == 16 ? kManyRows : 128;
constexpr int64_t kMemoryRows = 32;          // up to so many, the weight is read in the order in which it lies
constexpr int64_t kBufferBytes = 16 << 10;   // of unpacked slices: half of L1

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

#if LANES == 8
// Sums of neighbouring words.
inline Ints pairs_of(Ints words) { return (Ints)_mm256_madd_epi16((__m256i)words, _mm256_set1_epi16(1)); }
#endif

// sums [R, 2] += products of elements. Asks for `bytes` of the weight for each 32 elements.
template <int B, int R, typename Sum>
__attribute__((always_inline)) inline void multiply(const int32_t* x, int64_t count, const int32_t* panel, Ahead& ahead,
                                                    int64_t bytes, Sum (&sums)[R][2]) {
  constexpr bool kNarrow = LANES == 8 && in_bytes(B);  // 8 sums of 4 products fit into 16 bits: 8 * 2 * 15 * 127
  constexpr int64_t kAtOnce = kNarrow ? 8 : 32;
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
}

// sums [R, kPanel] += x [R, a slice] times a panel's slice, in numbers. This and the next are functions of their own, because compilers
// keep fewer sums in registers within others.
template <int R>
__attribute__((noinline)) void add_numbers(const int32_t* x, const int32_t* panel, float* sums, Ahead& ahead, int64_t bytes) {
  for (int chain = 0; chain < kChains; ++chain, x += kChain, panel += kChain * kPanel) {
    Floats totals[R][2] = {};
    multiply<16, R>(x, kChain, panel, ahead, bytes, totals);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        float* sum = sums + r * kPanel + h * kLanes;
        store(sum, load(sum) + totals[r][h]);
      }
    }
  }
}

// sums [R, kPanel] += a segment of x [R, ...] times its part of a panel, in codes.
template <int B, int R>
__attribute__((noinline)) void add_codes(const int32_t* x, int64_t count, const float* x_scales, const int32_t* starts,
                                         const int32_t* panel, const Scales (&scales)[2], bool zeros, float* sums, Ahead& ahead,
                                         int64_t bytes) {
  Ints totals[R][2];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) totals[r][0] = totals[r][1] = Ints{} + starts[r];
  multiply<B, R>(x, count, panel, ahead, bytes, totals);
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
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

// Slices that are unpacked at once: they stay in L1 while rows of x meet them, and so do these rows' sums.
constexpr int64_t slices_of(int bits) { return kBufferBytes / (elements_of(bits) * kPanel * 4); }

// Some panels, a few slices after the other, before that from row `next` of the weight on. Behind `panel`, a buffer for a panel's slices,
// is one for the sums [panels, rows, kPanel].
template <int B, int Steps>
void multiply_panels(const Matmul& m, const Packed& form, const int32_t* x, const Block& b, int64_t next, int32_t* panel) {
  const Weight& w = m.w;
  constexpr int64_t kSlices = slices_of(B), kSlice = elements_of(B) * kPanel, kInSlice = inputs_of(B) / (Steps * kStep);
  constexpr int64_t kElements = Steps * kStep / in_element(B);  // of a segment
  auto* const buffer = reinterpret_cast<float*>(panel + kSlices * kSlice);
  const Segments& segments = form.segments;
  const int64_t panels = parts(b.outs, kPanel), passes = parts(b.rows, kRows), height = parts(b.rows, passes);
  const int64_t asked = parts(kPanel * bytes_of(B), passes);  // for a slice and a pass
  const auto row_of = [&](int64_t out) { return w.data + least(out, w.out - 1) * w.row_bytes; };
  Ahead ahead(row_of(next), w.row_bytes, w.row_bytes);
  const int64_t at_once = LANES == 8 && b.rows <= kMemoryRows ? 1 : kSlices;  // on AVX2 few rows are up to 1.4 times slower by more
  for (int64_t slice = 0; slice < form.slices; slice += at_once) {
    const int64_t end = least(slice + at_once, form.slices);
    for (int64_t p = 0; p < panels; ++p) {
      const int64_t out = b.out + p * kPanel;
      for (int64_t s = slice; s < end; ++s) {
        const Slice<B> rows(w, out, s);
        int32_t* to = panel + (s - slice) * kSlice;
        unpack<B, Steps>(rows.first, rows.stride, to);
        unpack<B, Steps>(rows.first + kLanes * rows.stride, rows.stride, to + kLanes);
      }
      if (b.rows > kMemoryRows) {  // the next of these panels, or the first one in the slices behind
        const bool last = p + 1 == panels, over = last && end == form.slices;
        const int64_t column = over ? 0 : last ? end : slice;
        ahead = Ahead(row_of(over ? next : last ? b.out : out + kPanel) + column * bytes_of(B), w.row_bytes, kSlices * bytes_of(B));
      }
      Scales scales[B == 16 ? 1 : kSlices * kInSlice][2];
      for (int64_t i = slice * kInSlice; B != 16 && i < least(end * kInSlice, segments.number); ++i) {
        for (int64_t h = 0; h < 2; ++h) scales[i - slice * kInSlice][h] = {w, out + h * kLanes, i / segments.per_group};
      }
      for (int64_t done = 0; done < b.rows; done += height) {
        const int64_t count = least(b.rows - done, height), row = b.row + done;
        float* const sums = buffer + (p * b.rows + done) * kPanel;
        if (slice == 0) __builtin_memset(sums, 0, static_cast<size_t>(count * kPanel) * 4);
        with_rows(count, [&](auto rows) {
          for (int64_t s = slice; s < end; ++s) {
            const int32_t *from = x + form.at(s, row), *weights = panel + (s - slice) * kSlice;
            if constexpr (B == 16) {
              add_numbers<rows>(from, weights, sums, ahead, asked / (elements_of(B) / 32));
            } else {
              for (int64_t i = s * kInSlice; i < least((s + 1) * kInSlice, segments.number); ++i) {
                const int64_t at = i * form.rows + row, element = (i - s * kInSlice) * kElements;
                add_codes<B, rows>(from + element, kElements, form.scales(x) + at, form.starts(x) + at, weights + element * kPanel,
                                   scales[i - slice * kInSlice], w.zeros, sums, ahead, asked / kInSlice / parts(kElements, 32));
              }
            }
          }
        });
        for (int64_t i = 0; end == form.slices && i < count; ++i) write(m, row + i, out, sums + i * kPanel);
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
  return static_cast<size_t>(kBufferBytes + sums * 4);
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
