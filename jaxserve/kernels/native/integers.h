// x in integers of 8 bits, to meet codes. Every segment of a row has a scale of its own, the largest of its at most 128 numbers. All
// products by codes on vectors round x alike, so that what they give differs only by the order in which float32 numbers are added.

#pragma once

#include <cstdint>

namespace jaxserve {
namespace {

// How a segment's numbers become integers, from the largest of them. A sum that is not finite makes the scale so too.
struct Rounding {
  float factor, scale;

  Rounding(float largest, float poison) {
    constexpr float kLeast = 1e-30f;  // below it the quotient may overflow
    constexpr float kMost = 127;
    const bool any = largest > kLeast;
    factor = any ? kMost / largest : 0;
    scale = (any ? largest * (1 / kMost) : 0) + poison;
  }
};

// What a segment's integers are scaled by, and what their products with codes begin with: codes count from -2^(bits - 1).
struct Base {
  float scale, sum;  // of the integers
  int32_t start;

  Base(int bits, float scale, int32_t total)
      : scale(scale), sum(static_cast<float>(total)), start(-total * (1 << (bits - 1))) {}
};

}  // namespace
}  // namespace jaxserve
