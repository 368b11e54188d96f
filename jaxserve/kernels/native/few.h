// Products of a few rows of x, for all instruction sets. Four rows of the weight are read in parallel, straight into registers, and
// each is multiplied by all rows of x at once. A single row of x is multiplied by long rows of codes one after another. Only for
// files that are compiled once per instruction set (vectors.h).

#pragma once

#include <immintrin.h>

#include <type_traits>

#include "groups.h"
#include "integers.h"
#include "vectors.h"

namespace jaxserve {
namespace {

constexpr int64_t kLanes = LANES;
constexpr int64_t kOuts = 4;                // rows of the weight that are read in parallel
constexpr int64_t kRows = 4;                // maximum number of rows of x that are multiplied at once
constexpr int64_t kWidened = 32;            // rows of the weight whose scales are widened to float32 at once
constexpr int64_t kBeyond = 16;             // scales that may be written and read beyond the last one
constexpr int64_t kBlockBytes = 512 << 10;  // maximum size of a block of the weight, so that threads get even shares
constexpr int64_t kMinBlocks = 4;           // minimum number of blocks of a small weight
constexpr int64_t kRowsBytes = 256 << 10;   // rows of x that stay in L2 while they are multiplied by a block of the weight
constexpr int64_t kAheadBytes = 8192;       // distance of prefetching, or four rows if they are longer
// Bytes of a row of codes, above which rows are read one after another if a single row of x is multiplied as bytes: memory is then
// faster than with four rows in parallel. Shorter rows, which small models have, lie in the cache, and the processor would wait for
// the sums of each row. Codes that are widened first are limited by the processor and not by memory.
constexpr int64_t kShortCodes = 256;

// Four neighbouring rows of the weight. Rows beyond the last one repeat it.
struct Quad {
  const uint8_t* data[kOuts];
  const uint8_t* soon;  // the memory that is prefetched while these rows are read

  Quad(const Weight& w, int64_t out, const uint8_t* soon) : soon(soon) {
    for (int64_t o = 0; o < kOuts; ++o) data[o] = w.data + (out + o < w.out ? out + o : w.out - 1) * w.row_bytes;
  }

  // Prefetches one cache line of `soon`, for each line that is read. Lines are prefetched in the order of their addresses, not of
  // their use, which is faster for prefetchers and memory. They go to L2, which takes more requests at once than L1.
  __attribute__((always_inline)) void prefetch(int64_t offset) const {  // see blocks.h
    _mm_prefetch(reinterpret_cast<const char*>(soon + offset), _MM_HINT_T1);
  }
};

// The rows [out, out + outs) of the weight that are multiplied now, the `end` of their block, and the address of the rows that this
// thread multiplies after the block.
struct Part {
  int64_t out, outs, end;
  const uint8_t* after;

  Quad quad(const Weight& w, int64_t first) const {
    const int64_t ahead = kOuts * w.row_bytes < kAheadBytes ? kAheadBytes : kOuts * w.row_bytes;
    const int64_t left = (end - first) * w.row_bytes - ahead;
    return {w, first, left > 0 ? w.data + first * w.row_bytes + ahead : after - left};
  }
};

// The scales, and the zeros if the weight has any, of each segment of up to kWidened rows of the weight, in float32.
struct SegmentNumbers {
  const Segments segments;
  float *scales, *zeros;  // [kWidened, segments]

  SegmentNumbers(const Weight& w, void* scratch)
      : segments(w), scales(static_cast<float*>(scratch)), zeros(scales + kWidened * segments.number + kBeyond) {}

  static size_t bytes(const Weight& w) { return static_cast<size_t>(2 * (kWidened * Segments(w).number + kBeyond) * 4); }

  // Widens the numbers of at most `max_rows` rows from row `out` on by `widen_all`.
  template <auto widen_all>
  void widen(const Weight& w, int64_t out, int64_t max_rows) {
    const int64_t rows = w.out - out < max_rows ? w.out - out : max_rows;
    const auto take = [&](const void* numbers, bool wide, float* to) {
      const int64_t first = out * w.groups, count = rows * w.groups;
      if (segments.per_group == 1) {
        widen_all(numbers, wide, first, count, to);
      } else {
        for (int64_t i = 0; i < rows * segments.number; ++i) {
          const int64_t row = i / segments.number, segment = i % segments.number;
          to[i] = read_number(numbers, wide, first + row * w.groups + segment / segments.per_group);
        }
      }
      // Prefetch the numbers of the next rows: they are too few for the hardware to foresee.
      const int64_t size = wide ? 4 : 2;
      const char* next = static_cast<const char*>(numbers) + (first + count) * size;
      for (int64_t at = 0; at < count * size; at += 64) _mm_prefetch(next + at, _MM_HINT_T0);
    };
    take(w.scales, w.wide_scales, scales);
    if (w.zeros) take(w.zeros, w.wide_zeros, zeros);
  }
};

// The layout of a row of x for products with codes: the integers of all segments, then their scales, their starts and their sums
// (`Base`).
struct RowLayout {
  int64_t integers;  // bytes of the integers
  int64_t padded;    // number of scales, starts and sums, rounded up to a vector

  RowLayout(const Weight& w, int64_t of_segment)
      : integers(Segments(w).number * of_segment), padded((Segments(w).number + kLanes - 1) / kLanes * kLanes) {}

  int64_t row_bytes() const { return integers + 3 * padded * 4; }
  const float* scales(const uint8_t* row) const { return reinterpret_cast<const float*>(row + integers); }
  const int32_t* starts(const uint8_t* row) const { return reinterpret_cast<const int32_t*>(row + integers) + padded; }
  const float* sums(const uint8_t* row) const { return scales(row) + 2 * padded; }

  // Writes a row. pack_segment(s, to) writes the integers of segment s, of `of_segment` bytes, and returns their Base.
  template <typename PackSegment>
  void write(uint8_t* row, int64_t of_segment, PackSegment pack_segment) const {
    auto *const scales = reinterpret_cast<float*>(row + integers), *const sums = scales + 2 * padded;
    auto* const starts = reinterpret_cast<int32_t*>(scales + padded);
    for (int64_t s = 0; s < integers / of_segment; ++s) {
      const Base base = pack_segment(s, row + s * of_segment);
      scales[s] = base.scale;
      starts[s] = base.start;
      sums[s] = base.sum;
    }
  }
};

// One segment of R rows of x, and the numbers for its product with a row of codes.
struct SegmentOperands {
  const uint8_t* integers;
  const int32_t* starts;
  const float* sums;
  const float* factors;  // [R, kLanes]: the scales of the products
  float zero;            // the zero of the row of codes
  int64_t row_bytes;     // between rows of x

  template <typename T>
  const T* of_row(const T* first, int r) const {
    return reinterpret_cast<const T*>(reinterpret_cast<const uint8_t*>(first) + r * row_bytes);
  }
};

using Product = void (*)(const Matmul&, const uint8_t* packed, int64_t row, const Part&, void* scratch);

// Products of few rows by an instruction set I, which defines the product of R rows with bfloat16 numbers (numbers<R>) and with a
// segment of L steps of a row of codes (segment<R, Bits, L, Zeros>), whether codes are multiplied as bytes (in_bytes), the layout
// of x (row_bytes, integers_bytes), and how sums are written (sums_of, write).
template <typename I>
struct Few {
  // Computes to[Outs, R]: x times `Outs` neighbouring rows of codes, from row `first` of the four on, in segments of L steps. The
  // numbers of row `first` begin at `at`. For several rows of x the scales of products are computed beforehand, for a vector of
  // segments at once; for a single row that would not pay.
  template <int Outs, int R, int Bits, int L, bool Zeros>
  static void multiply_codes(const Weight& w, const Quad& rows, int first, const uint8_t* x, const SegmentNumbers& numbers, int64_t at,
                             Floats (*to)[R]) {
    constexpr int64_t kBytes = L * kStep * Bits / 8, kOfX = I::integers_bytes(Bits, L);
    const int64_t number = numbers.segments.number;
    const RowLayout layout(w, kOfX);
    const int64_t x_bytes = layout.row_bytes();
    const float *const scales = layout.scales(x), *const totals = layout.sums(x);
    const int32_t* const starts = layout.starts(x);
    Floats sums[Outs][R] = {};
    alignas(64) float factors[Outs][R][kLanes];
    int64_t left = w.inner;
    for (int64_t begin = 0; begin < number; begin += kLanes) {
      if constexpr (R > 1) {
#pragma GCC unroll 4
        for (int o = 0; o < Outs; ++o) {
          const Floats of_row = load(numbers.scales + at + o * number + begin);
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r) store(factors[o][r], of_row * load(layout.scales(x + r * x_bytes) + begin));
        }
      }
      const int64_t end = begin + kLanes < number ? begin + kLanes : number;
      for (int64_t s = begin; s < end; ++s, left -= L * kStep) {
        const auto multiply_segment = [&](auto whole) __attribute__((always_inline)) {
#pragma GCC unroll 4
          for (int o = 0; o < Outs; ++o) {
            for (int64_t i = s * kBytes; i < (s + 1) * kBytes; i += 64) rows.prefetch(first * w.row_bytes + Outs * i + 64 * o);
            const int64_t here = at + o * number + s;
            const float single = R == 1 ? scales[s] * numbers.scales[here] : 0;
            const SegmentOperands operands = {x + s * kOfX, starts + s, totals + s, R == 1 ? &single : factors[o][0] + s - begin,
                                              Zeros ? numbers.zeros[here] : 0, x_bytes};
            I::template segment<R, Bits, L, Zeros, decltype(whole)::value>(rows.data[first + o], s, left, operands, sums[o]);
          }
        };
        if (Bits != 8 || left >= L * kStep) {  // rows of 4 or 3 bits are padded
          multiply_segment(std::true_type());
        } else {
          multiply_segment(std::false_type());
        }
      }
    }
    for (int o = 0; o < Outs; ++o) {
      for (int r = 0; r < R; ++r) to[o][r] = sums[o][r];
    }
  }

  // Computes y[R, outs] for a quantised weight, in segments of L steps.
  template <int R, int Bits, int L, bool Zeros>
  static void codes(const Matmul& m, const uint8_t* packed, int64_t row, const Part& part, void* scratch) {
    const uint8_t* x = packed + row * I::row_bytes(m.w);
    SegmentNumbers numbers(m.w, scratch);
    const int64_t number = numbers.segments.number;
    for (int64_t done = 0; done < part.outs; done += kOuts) {
      const int64_t out = part.out + done, at = done % kWidened * number;
      if (done % kWidened == 0) numbers.widen<I::widen_all>(m.w, out, part.outs - done < kWidened ? part.outs - done : kWidened);
      const Quad rows = part.quad(m.w, out);
      Floats sums[kOuts][R];
      if (R == 1 && I::in_bytes(Bits, L) && m.w.row_bytes > kShortCodes) {
        for (int o = 0; o < kOuts; ++o) {
          multiply_codes<1, R, Bits, L, Zeros>(m.w, rows, o, x, numbers, at + o * number, sums + o);
        }
      } else {
        multiply_codes<kOuts, R, Bits, L, Zeros>(m.w, rows, 0, x, numbers, at, sums);
      }
      for (int r = 0; r < R; ++r) I::write(m, row + r, out, I::sums_of({sums[0][r], sums[1][r], sums[2][r], sums[3][r]}));
    }
  }

  template <int R, int Bits, int L>
  static Product in_segments(bool zeros) {
    return zeros ? codes<R, Bits, L, true> : codes<R, Bits, L, false>;
  }

  template <int R, int Bits>
  static Product of_codes(const Weight& w) {
    const int64_t steps = Segments(w).steps;
    const auto choose = steps == 4 ? in_segments<R, Bits, 4> : steps == 2 ? in_segments<R, Bits, 2> : in_segments<R, Bits, 1>;
    return choose(w.zeros != nullptr);
  }

  template <int R>
  static Product product_of(const Weight& w) {
    if (w.bits == 16) return I::template numbers<R>;
    return w.bits == 8 ? of_codes<R, 8>(w) : w.bits == 4 ? of_codes<R, 4>(w) : of_codes<R, 3>(w);
  }

  static Block block(const Matmul& m) {
    const int64_t some = kBlockBytes / (kOuts * m.w.row_bytes), fourth = m.w.out / (kOuts * kMinBlocks);
    const int64_t quads = some < fourth ? some : fourth;
    return {0, kOuts * (quads ? quads : 1), 0, m.rows};
  }

  static size_t scratch_bytes(const Matmul& m) { return m.w.bits == 16 ? 0 : SegmentNumbers::bytes(m.w); }

  static void multiply(const Matmul& m, const void* packed, const Block& b, const Block* after, void* scratch) {
    const Product products[kRows] = {product_of<1>(m.w), product_of<2>(m.w), product_of<3>(m.w), product_of<4>(m.w)};
    const auto multiply_rows = [&](int64_t first, int64_t rows) {
      const int64_t end = b.out + b.outs;
      Part part = {b.out, b.outs, end, m.w.data + (after ? after->out : end) * m.w.row_bytes};
      if (rows > kRows) part.outs = kOuts;  // multiply all rows by this part while it is in L1
      for (; part.out < end; part.out += part.outs) {
        for (int64_t row = first, left = rows; left > 0; row += kRows, left -= kRows) {
          products[(left < kRows ? left : kRows) - 1](m, static_cast<const uint8_t*>(packed), row, part, scratch);
        }
      }
    };
    const int64_t fit = kRowsBytes / (2 * m.w.inner) / kRows * kRows, at_once = fit ? fit : kRows;
    for (int64_t done = 0; done < b.rows; done += at_once) {
      multiply_rows(b.row + done, at_once < b.rows - done ? at_once : b.rows - done);
    }
  }
};

}  // namespace
}  // namespace jaxserve
