// What products of a few rows have in common, whatever the instruction set: four rows of the weight are read beside each other,
// straight into registers, and each is used at once for all rows of x; a single row of x meets long rows of the weight one after
// the other. For files as in vectors.h.

#pragma once

#include <immintrin.h>

#include <type_traits>

#include "groups.h"

namespace jaxserve {
namespace {

constexpr int64_t kOuts = 4;
constexpr int64_t kRows = 4;                // that meet the weight at once
constexpr int64_t kWidened = 32;            // rows of the weight whose scales are brought to float32 at once
constexpr int64_t kLine = 16;               // of them may be written beyond the last
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

// The scales of rows of the weight, and their zeros if there are any, in float32.
struct Numbers {
  int64_t groups;
  float *scales, *zeros;  // [kWidened, groups]

  Numbers(const Weight& w, void* scratch)
      : groups(w.groups), scales(static_cast<float*>(scratch)), zeros(scales + kWidened * groups + kLine) {}

  static size_t bytes(const Weight& w) { return static_cast<size_t>(2 * (kWidened * w.groups + kLine) * 4); }

  // `widen_all` brings scales or zeros to float32.
  template <auto widen_all>
  void widen(const Weight& w, int64_t out) {
    const int64_t count = (w.out - out < kWidened ? w.out - out : kWidened) * groups;
    widen_all(w.scales, w.wide_scales, out * groups, count, scales);
    ask_for(w.scales, w.wide_scales, out * groups + count, count);
    if (w.zeros) {
      widen_all(w.zeros, w.wide_zeros, out * groups, count, zeros);
      ask_for(w.zeros, w.wide_zeros, out * groups + count, count);
    }
  }

  // Those of the next rows: so few that the hardware does not foresee them.
  static void ask_for(const void* numbers, bool wide, int64_t index, int64_t count) {
    const int64_t size = wide ? 4 : 2;
    const char* from = static_cast<const char*>(numbers) + index * size;
    for (int64_t at = 0; at < count * size; at += 64) _mm_prefetch(from + at, _MM_HINT_T0);
  }
};

using Product = void (*)(const Matmul&, const uint8_t* packed, int64_t row, const Part&, void* scratch);

// An instruction set I says how R rows meet numbers, numbers<R>, and a segment of L steps of a row of codes with zeros or without,
// segment<R, Bits, L, Zeros>, in vectors I::Lanes; whether that is as bytes, in_bytes; how x is packed, row_bytes and
// segment_bytes; and how sums are written.
template <typename I>
struct Few {
  using Lanes = typename I::Lanes;

  // sums[Outs, R] of x times neighbouring rows of codes from row `first` of the four on, in segments of L steps. The scales of row
  // `first` are at `at`.
  template <int Outs, int R, int Bits, int L, bool Zeros>
  static void multiply_codes(const Weight& w, const Quad& rows, int first, const uint8_t* x, const Numbers& numbers, int64_t at,
                             Lanes (*to)[R]) {
    constexpr int64_t kBytes = L * kStep * Bits / 8;
    const Segments segments(w);
    const int64_t x_bytes = I::row_bytes(w);
    Lanes sums[Outs][R] = {};
    int64_t left = w.inner;
    for (int64_t s = 0, in_group = 0; s < segments.number; ++s, x += I::segment_bytes(Bits, L), left -= L * kStep) {
      const auto meet = [&](auto whole) __attribute__((always_inline)) {
#pragma GCC unroll 4
        for (int o = 0; o < Outs; ++o) {
          for (int64_t i = s * kBytes; i < (s + 1) * kBytes; i += 64) rows.prefetch(first * w.row_bytes + Outs * i + 64 * o);
          I::template segment<R, Bits, L, Zeros, decltype(whole)::value>(rows.data[first + o], s, left, x, x_bytes, numbers,
                                                                         at + o * w.groups, sums[o]);
        }
      };
      if (Bits != 8 || left >= L * kStep) {  // rows of fewer bits are padded
        meet(std::true_type());
      } else {
        meet(std::false_type());
      }
      if (++in_group == segments.per_group) in_group = 0, ++at;
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
    for (int64_t done = 0; done < part.outs; done += kOuts) {
      const int64_t out = part.out + done, at = done % kWidened * m.w.groups;
      if (done % kWidened == 0) numbers.widen<I::widen_all>(m.w, out);
      const Quad rows = part.quad(m.w, out);
      Lanes sums[kOuts][R];
      if (R == 1 && I::in_bytes(Bits, L) && m.w.row_bytes > kShortCodes) {
        for (int o = 0; o < kOuts; ++o) {
          multiply_codes<1, R, Bits, L, Zeros>(m.w, rows, o, x, numbers, at + o * m.w.groups, sums + o);
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
