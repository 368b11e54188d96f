// Products of rows of bfloat16 on vectors: on AVX2, and on AVX-512 with its VNNI and BF16 instructions.
//
// The lanes of a vector are neighbouring outputs. The weight is stored row by row, so it is transposed in registers: as many rows as
// a vector has lanes, and 16 bytes (AVX2) or a cache line (AVX-512) of each at a time (panels_weight.h). A lane then has an element
// of 32 bits of one output, and is multiplied by the same element of x, which is broadcast to all lanes (panels_x.h).
//
// Products of bfloat16 numbers are always summed in the same order. For codes x is rounded to integers, and a lane sums products
// exactly over a segment of at most 128 inputs. Only this sum is converted to float32 and scaled. A row's result therefore does not
// depend on the number of rows.
//
// A slice of a panel, which is two vectors of outputs, is transposed into a buffer that stays in L1. It is multiplied by groups of
// rows of x, as many as the registers can hold sums of. For few rows there are matmul_avx2.cc and matmul_vnni.cc.

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

// Rows with sums in registers: 16 sums on AVX-512, 12 on AVX2. With 12 rows there, fewer passes would request memory faster than it
// answers.
constexpr int kRows = LANES == 16 ? 8 : 6;
// A block for few rows: maximum bytes of the weight and maximum number of multiplications, so that threads get even shares, and the
// minimum number of blocks of a small weight.
constexpr int64_t kBlockBytes = 128 << 10;
constexpr int64_t kBlockWork = 1 << 20;
constexpr int64_t kMinBlocks = 4;
// A block for many rows: its slices of x, and its sums, fit into L2.
constexpr int64_t kBlockOuts = 128;
constexpr int64_t kBlockRows = LANES == 16 ? kMaxRows : 128;
constexpr int64_t kMemoryRows = 32;         // maximum of "few rows", for which the weight is read in the order of its addresses
constexpr int64_t kBufferBytes = 16 << 10;  // bytes of unpacked slices, half of L1

// Writes the sums of one row for a panel.
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
  const __m256i rounded = _mm256_permute4x64_epi64(words, 0xd8);  // because packus packs each half on its own
#endif
  if (count == kPanel) return void(__builtin_memcpy(to, &rounded, sizeof(rounded)));
  __builtin_memcpy(to, &rounded, static_cast<size_t>(count) * 2);
}

// sums [R, 2] += the products of `count` elements of x and of a panel. The R rows of x are elements_of(B) elements apart.
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
// Returns the sums of neighbouring words.
inline Ints pairs_of(Ints words) { return (Ints)_mm256_madd_epi16((__m256i)words, _mm256_set1_epi16(1)); }
#endif

// sums [R, 2] += the products of `count` elements of x and of a panel. Prefetches `bytes` of the weight for each 32 elements.
template <int B, int R, typename Sum>
__attribute__((always_inline)) inline void multiply(const int32_t* x, int64_t count, const int32_t* panel, Ahead& ahead,
                                                    int64_t bytes, Sum (&sums)[R][2]) {
  constexpr bool kNarrow = LANES == 8 && in_bytes(B);  // 8 sums of 4 products fit into 16 bits: 8 * 2 * 15 * 127
  constexpr int64_t kAtOnce = kNarrow ? 8 : 32;
  int64_t i = 0;
  do {
    if (i % 32 == 0) ahead.prefetch(bytes);
    const int64_t some = min(kAtOnce, count - i);
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

// sums [R, kPanel] += a slice of R rows of x * a panel's slice, for bfloat16 numbers. add_numbers and add_codes are not inlined,
// because compilers would then keep fewer sums in registers.
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

// sums [R, kPanel] += a segment of R rows of x * the same segment of a panel, for codes.
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

// Calls f with the number of rows, at most Max, as a compile-time constant.
template <int Max = kRows, typename F>
inline void with_rows(int64_t rows, F f) {
  if constexpr (Max > 1) {
    if (rows < Max) return with_rows<Max - 1>(rows, f);
  }
  f(std::integral_constant<int, Max>{});
}

// Returns the number of slices that are unpacked at once. They stay in L1 with the sums of the rows that are multiplied by them.
constexpr int64_t slices_of(int bits) { return kBufferBytes / (elements_of(bits) * kPanel * 4); }

// Multiplies the panels of a block, a few slices at a time. The panel that begins at row `next` of the weight will be multiplied
// afterwards. `panel` is the buffer for a panel's slices, and the sums [panels, rows, kPanel] follow it.
template <int B, int Steps>
void multiply_panels(const Matmul& m, const Packed& layout, const int32_t* x, const Block& b, int64_t next, int32_t* panel) {
  const Weight& w = m.w;
  constexpr int64_t kSlices = slices_of(B), kSlice = elements_of(B) * kPanel, kInSlice = inputs_of(B) / (Steps * kStep);
  constexpr int64_t kElements = Steps * kStep / in_element(B);  // elements of a segment
  auto* const buffer = reinterpret_cast<float*>(panel + kSlices * kSlice);
  const Segments& segments = layout.segments;
  const int64_t panels = ceil_div(b.outs, kPanel), passes = ceil_div(b.rows, kRows), height = ceil_div(b.rows, passes);
  const int64_t ahead_bytes = ceil_div(kPanel * bytes_of(B), passes);  // prefetched for each slice in each pass
  const auto row_of = [&](int64_t out) { return w.data + min(out, w.out - 1) * w.row_bytes; };
  Ahead ahead(row_of(next), w.row_bytes, w.row_bytes);
  const int64_t at_once = LANES == 8 && b.rows <= kMemoryRows ? 1 : kSlices;  // more would make few rows up to 1.4 times slower
  for (int64_t slice = 0; slice < layout.slices; slice += at_once) {
    const int64_t end = min(slice + at_once, layout.slices);
    for (int64_t p = 0; p < panels; ++p) {
      const int64_t out = b.out + p * kPanel;
      for (int64_t s = slice; s < end; ++s) {
        const Slice<B> rows(w, out, s);
        int32_t* to = panel + (s - slice) * kSlice;
        unpack<B, Steps>(rows.first, rows.stride, to);
        unpack<B, Steps>(rows.first + kLanes * rows.stride, rows.stride, to + kLanes);
      }
      if (b.rows > kMemoryRows) {  // prefetch the next panel in these slices, or the first panel in the next slices
        const bool last = p + 1 == panels, over = last && end == layout.slices;
        const int64_t column = over ? 0 : last ? end : slice;
        ahead = Ahead(row_of(over ? next : last ? b.out : out + kPanel) + column * bytes_of(B), w.row_bytes, kSlices * bytes_of(B));
      }
      Scales scales[B == 16 ? 1 : kSlices * kInSlice][2];
      for (int64_t i = slice * kInSlice; B != 16 && i < min(end * kInSlice, segments.number); ++i) {
        for (int64_t h = 0; h < 2; ++h) scales[i - slice * kInSlice][h] = {w, out + h * kLanes, i / segments.per_group};
      }
      for (int64_t done = 0; done < b.rows; done += height) {
        const int64_t count = min(b.rows - done, height), row = b.row + done;
        float* const sums = buffer + (p * b.rows + done) * kPanel;
        if (slice == 0) __builtin_memset(sums, 0, static_cast<size_t>(count * kPanel) * 4);
        with_rows(count, [&](auto rows) {
          for (int64_t s = slice; s < end; ++s) {
            const int32_t *from = x + layout.at(s, row), *weights = panel + (s - slice) * kSlice;
            if constexpr (B == 16) {
              add_numbers<rows>(from, weights, sums, ahead, ahead_bytes / (elements_of(B) / 32));
            } else {
              for (int64_t i = s * kInSlice; i < min((s + 1) * kInSlice, segments.number); ++i) {
                const int64_t at = i * layout.rows + row, element = (i - s * kInSlice) * kElements;
                add_codes<B, rows>(from + element, kElements, layout.scales(x) + at, layout.starts(x) + at, weights + element * kPanel,
                                   scales[i - slice * kInSlice], w.zeros, sums, ahead, ahead_bytes / kInSlice / ceil_div(kElements, 32));
              }
            }
          }
        });
        for (int64_t i = 0; end == layout.slices && i < count; ++i) write(m, row + i, out, sums + i * kPanel);
      }
    }
  }
}

template <int B, int Steps>
void multiply_block(const Matmul& m, const int32_t* x, const Block& b, const Block* after, int32_t* buffer) {
  const Packed layout(m);
  const int64_t outs = b.rows <= kMemoryRows ? kPanel : b.outs;  // outputs that are multiplied at once
  for (int64_t out = 0; out < b.outs; out += outs) {
    const Block part = {b.out + out, min(outs, b.outs - out), b.row, b.rows};
    const int64_t next = out + outs < b.outs || !after ? part.out + part.outs : after->out;
    multiply_panels<B, Steps>(m, layout, x, part, next, buffer);
  }
}

Block block(const Matmul& m) {
  if (m.rows > kMemoryRows) return {0, kBlockOuts, 0, kBlockRows};
  const int64_t outs = min(kBlockBytes / m.w.row_bytes, min(kBlockWork / (m.rows * m.w.inner), m.w.out / kMinBlocks));
  return {0, ceil_div(outs ? outs : 1, kPanel) * kPanel, 0, m.rows};
}

size_t scratch_bytes(const Matmul& m) {
  const int64_t sums = min(m.rows, kBlockRows) * (m.rows > kMemoryRows ? kBlockOuts : kPanel);
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
