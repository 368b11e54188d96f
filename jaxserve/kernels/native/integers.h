// Rounding of x to 8-bit integers for products with codes. Every segment of a row, of at most 128 numbers, has its own scale, which
// maps the segment's largest magnitude to 127. All vector kernels round x in this way, so that their results differ only by the
// order in which float32 numbers are added.

#pragma once

#include <cstdint>

namespace jaxserve {
namespace {

// The factor from a segment's numbers to integers and its inverse, the scale. `poison` is 0, or NaN if the segment has a number
// that is not finite; then the scale is NaN too.
struct Rounding {
  float factor, scale;

  Rounding(float largest, float poison) {
    constexpr float kTiny = 1e-30f;  // below it the quotient may overflow
    constexpr float kMaxInteger = 127;
    const bool any = largest > kTiny;
    factor = any ? kMaxInteger / largest : 0;
    scale = (any ? largest * (1 / kMaxInteger) : 0) + poison;
  }
};

// The numbers of a segment's integers that its products with codes need. Codes u are unsigned and mean u - 2^(bits - 1), so that a
// sum of products with u starts from -2^(bits - 1) times the sum of the integers.
struct Base {
  float scale, sum;  // the integers' scale and their sum
  int32_t start;     // the first value of a sum of products

  Base(int bits, float scale, int32_t total)
      : scale(scale), sum(static_cast<float>(total)), start(-total * (1 << (bits - 1))) {}
};

}  // namespace
}  // namespace jaxserve
