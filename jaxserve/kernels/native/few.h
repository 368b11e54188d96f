// What products of a few rows have in common, whatever the instruction set: four rows of the weight are read beside each other,
// straight into registers, and each is used at once for all rows of x; a single row of x meets long rows of the weight one after
// the other. For files as in vectors.h.

#pragma once

#include <immintrin.h>

#include <type_traits>

#include "groups.h"
#include "integers.h"
#include "vectors.h"

namespace jaxserve {
namespace {

constexpr int64_t kLanes = LANES;
constexpr int64_t kOuts = 4;
constexpr int64_t kRows = 4;                // that meet the weight at once
constexpr int64_t kWidened = 32;            // rows of the weight whose scales are brought to float32 at once
constexpr int64_t kBeyond = 16;             // of them may be written, and read, beyond the last
constexpr int64_t kBlockBytes = 512 << 10;  // of the weight: small enough to share out evenly,
constexpr int64_t kLeastBlocks = 4;         // and parts of even a small weight
constexpr int64_t kRowsBytes = 256 << 10;   // of x: they stay in L2 while they meet a block of the weight
constexpr int64_t kAheadBytes = 8192;       // how far ahead memory is asked for, or four rows if they are longer
// Rows of codes longer than this, that meet a single row of x as bytes, are read one after the other: memory is faster so than by
// four of them beside each other. Shorter ones, which small models have, lie in cache, where the processor would wait for each
// row's sums; and codes that are widened first keep it busier than memory.
constexpr int64_t kShortCodes = 256;

// Four neighbouring rows of the weight; those beyond the last repeat it.
struct Quad {
  const uint8_t* data[kOuts];
  const uint8_t* soon;  // what is asked for while they are read

  Quad(const Weight& w, int64_t out, const uint8_t* soon) : soon(soon) {
    for (int64_t o = 0; o < kOuts; ++o) data[o] = w.data + (out + o < w.out ? out + o : w.out - 1) * w.row_bytes;
  }

  // Asks for a line of what comes soon, once for each line read here. In the order in which it lies, and not in that of
  // its use: prefetchers and memory are faster so. Into L2, where more requests may be under way than to L1.
  __attribute__((always_inline)) void prefetch(int64_t offset) const {  // see blocks.h
    _mm_prefetch(reinterpret_cast<const char*>(soon + offset), _MM_HINT_T1);
  }
};

// Rows of the weight that are multiplied now, of a block of them, and where those lie that this thread multiplies behind it.
struct Part {
  int64_t out, outs, end;
  const uint8_t* after;

  Quad quad(const Weight& w, int64_t first) const {
    const int64_t ahead = kOuts * w.row_bytes < kAheadBytes ? kAheadBytes : kOuts * w.row_bytes;
    const int64_t left = (end - first) * w.row_bytes - ahead;
    return {w, first, left > 0 ? w.data + first * w.row_bytes + ahead : after - left};
  }
};

// Of rows of the weight, each segment's scale, and its zero if there are any, in float32.
struct Numbers {
  const Segments segments;
  float *scales, *zeros;  // [kWidened, segments]

  Numbers(const Weight& w, void* scratch)
      : segments(w), scales(static_cast<float*>(scratch)), zeros(scales + kWidened * segments.number + kBeyond) {}

  static size_t bytes(const Weight& w) { return static_cast<size_t>(2 * (kWidened * Segments(w).number + kBeyond) * 4); }

  // `widen_all` brings scales or zeros to float32: of at most kWidened rows.
  template <auto widen_all>
  void widen(const Weight& w, int64_t out, int64_t most) {
    const int64_t rows = w.out - out < most ? w.out - out : most;
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
      // Those of the next rows are asked for: they are so few that the hardware does not foresee them.
      const int64_t size = wide ? 4 : 2;
      const char* next = static_cast<const char*>(numbers) + (first + count) * size;
      for (int64_t at = 0; at < count * size; at += 64) _mm_prefetch(next + at, _MM_HINT_T0);
    };
    take(w.scales, w.wide_scales, scales);
    if (w.zeros) take(w.zeros, w.wide_zeros, zeros);
  }
};

// A row of x that meets codes: the integers of all segments, then their scales, what their products begin with, and their sums.
struct Form {
  int64_t integers, padded;  // bytes; scales, which may be read, though not used, beyond the last segment's

  Form(const Weight& w, int64_t of_segment)
      : integers(Segments(w).number * of_segment), padded((Segments(w).number + kLanes - 1) / kLanes * kLanes) {}

  int64_t row_bytes() const { return integers + 3 * padded * 4; }
  const float* scales(const uint8_t* row) const { return reinterpret_cast<const float*>(row + integers); }
  const int32_t* starts(const uint8_t* row) const { return reinterpret_cast<const int32_t*>(row + integers) + padded; }
  const float* sums(const uint8_t* row) const { return scales(row) + 2 * padded; }

  // Writes a row: pack_segment(s, to) writes the integers of a segment and returns their Base.
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

// A segment of R rows of x, each so many bytes behind the one before; the scale of its products with a row of codes; and that row's
// zero.
struct Meeting {
  const uint8_t* integers;
  const int32_t* starts;
  const float *sums, *factors;  // factors[R, kLanes]
  float zero;
  int64_t row_bytes;

  template <typename T>
  const T* of_row(const T* first, int r) const {
    return reinterpret_cast<const T*>(reinterpret_cast<const uint8_t*>(first) + r * row_bytes);
  }
};

using Product = void (*)(const Matmul&, const uint8_t* packed, int64_t row, const Part&, void* scratch);

// An instruction set I says how R rows meet numbers, numbers<R>, and a segment of L steps of a row of codes, segment<R, Bits, L, Zeros>;
// whether that is as bytes, in_bytes; how x is packed, row_bytes and integers_bytes; and how sums are written.
template <typename I>
struct Few {
  // sums[Outs, R] of x times neighbouring rows of codes from row `first` of the four on, in segments of L steps. The numbers of row
  // `first` are at `at`. For several rows of x the scales of products are computed beforehand, for as many segments at once as a
  // vector has lanes; a single row has too little use of them.
  template <int Outs, int R, int Bits, int L, bool Zeros>
  static void multiply_codes(const Weight& w, const Quad& rows, int first, const uint8_t* x, const Numbers& numbers, int64_t at,
                             Floats (*to)[R]) {
    constexpr int64_t kBytes = L * kStep * Bits / 8, kOfX = I::integers_bytes(Bits, L);
    const int64_t number = numbers.segments.number;
    const Form form(w, kOfX);
    const int64_t x_bytes = form.row_bytes();
    const float *const scales = form.scales(x), *const totals = form.sums(x);
    const int32_t* const starts = form.starts(x);
    Floats sums[Outs][R] = {};
    alignas(64) float factors[Outs][R][kLanes];
    int64_t left = w.inner;
    for (int64_t begin = 0; begin < number; begin += kLanes) {
      if constexpr (R > 1) {
#pragma GCC unroll 4
        for (int o = 0; o < Outs; ++o) {
          const Floats of_row = load(numbers.scales + at + o * number + begin);
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r) store(factors[o][r], of_row * load(form.scales(x + r * x_bytes) + begin));
        }
      }
      const int64_t end = begin + kLanes < number ? begin + kLanes : number;
      for (int64_t s = begin; s < end; ++s, left -= L * kStep) {
        const auto meet = [&](auto whole) __attribute__((always_inline)) {
#pragma GCC unroll 4
          for (int o = 0; o < Outs; ++o) {
            for (int64_t i = s * kBytes; i < (s + 1) * kBytes; i += 64) rows.prefetch(first * w.row_bytes + Outs * i + 64 * o);
            const int64_t here = at + o * number + s;
            const float single = R == 1 ? scales[s] * numbers.scales[here] : 0;
            const Meeting x_and_scales = {x + s * kOfX, starts + s, totals + s, R == 1 ? &single : factors[o][0] + s - begin,
                                          Zeros ? numbers.zeros[here] : 0, x_bytes};
            I::template segment<R, Bits, L, Zeros, decltype(whole)::value>(rows.data[first + o], s, left, x_and_scales, sums[o]);
          }
        };
        if (Bits != 8 || left >= L * kStep) {  // rows of fewer bits are padded
          meet(std::true_type());
        } else {
          meet(std::false_type());
        }
      }
    }
    for (int o = 0; o < Outs; ++o) {
      for (int r = 0; r < R; ++r) to[o][r] = sums[o][r];
    }
  }

  // y[R, outs] of a quantised weight, in segments of L steps.
  template <int R, int Bits, int L, bool Zeros>
  static void codes(const Matmul& m, const uint8_t* packed, int64_t row, const Part& part, void* scratch) {
    const uint8_t* x = packed + row * I::row_bytes(m.w);
    Numbers numbers(m.w, scratch);
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
    const int64_t some = kBlockBytes / (kOuts * m.w.row_bytes), fourth = m.w.out / (kOuts * kLeastBlocks);
    const int64_t quads = some < fourth ? some : fourth;
    return {0, kOuts * (quads ? quads : 1), 0, m.rows};
  }

  static size_t scratch_bytes(const Matmul& m) { return m.w.bits == 16 ? 0 : Numbers::bytes(m.w); }

  static void multiply(const Matmul& m, const void* packed, const Block& b, const Block* after, void* scratch) {
    const Product products[kRows] = {product_of<1>(m.w), product_of<2>(m.w), product_of<3>(m.w), product_of<4>(m.w)};
    const auto multiply_rows = [&](int64_t first, int64_t rows) {
      const int64_t end = b.out + b.outs;
      Part part = {b.out, b.outs, end, m.w.data + (after ? after->out : end) * m.w.row_bytes};
      if (rows > kRows) part.outs = kOuts;  // all these rows meet it while it is in L1
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
