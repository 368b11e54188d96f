// The scales and zeros of a quantised weight. The namespace is unnamed, so that every file has its own copy of the functions,
// compiled for its instruction set.

#pragma once

#include <cstdint>

#include "matmul.h"

namespace jaxserve {
namespace {

inline float widen(uint16_t bfloat16) {
  union {
    uint32_t bits;
    float value;
  } x = {static_cast<uint32_t>(bfloat16) << 16};
  return x.value;
}

inline float read_number(const void* numbers, bool wide, int64_t index) {
  return wide ? static_cast<const float*>(numbers)[index] : widen(static_cast<const uint16_t*>(numbers)[index]);
}

// A position in the groups of one row.
struct Groups {
  const Weight& w;
  int64_t index, last;  // indices in the scales: of the group, and of the row's last group
  int64_t left;         // remaining steps of the group

  // Returns the position of a step in the first row.
  static Groups at(const Weight& w, int64_t step) {
    const int64_t length = w.group / kStep, number = w.groups > 1 ? step / length : 0;
    const int64_t left = w.groups > 1 ? length - step % length : INT64_MAX;
    return {w, number, w.groups - 1, left};
  }

  // Returns the position of the same step in row `row`, if this is a position in the first row.
  Groups of_row(int64_t row) const { return {w, index + row * w.groups, last + row * w.groups, left}; }

  // Moves by at most `left` steps. Padding beyond the last group belongs to it.
  void advance(int64_t steps) {
    left -= steps;
    if (left > 0) return;
    const bool more = index < last;
    index += more;
    left = more ? w.group / kStep : INT64_MAX;
  }

  float scale() const { return read_number(w.scales, w.wide_scales, index); }
  float zero() const { return w.zeros ? read_number(w.zeros, w.wide_zeros, index) : 0.0f; }
};

// The division of a row of x into segments for products with codes. A segment is a whole number of steps, and no segment crosses
// a group.
struct Segments {
  int64_t steps;      // of a segment
  int64_t number;     // of segments in a row
  int64_t per_group;  // segments of a group

  explicit Segments(const Weight& w) {
    const bool one = w.groups == 1;
    steps = one || w.group % (4 * kStep) == 0 ? 4 : w.group % (2 * kStep) == 0 ? 2 : 1;
    number = (w.inner + steps * kStep - 1) / (steps * kStep);
    per_group = one ? number : w.group / (steps * kStep);
  }
};

}  // namespace
}  // namespace jaxserve
