// The scales and zeros of a quantised weight. In an unnamed namespace, so that every unit has a copy of its own, made for
// its instruction set.

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

// Walks along the groups of one row.
struct Groups {
  const Weight& w;
  int64_t index, last;  // into scales
  int64_t left;         // steps that are left of the group

  // Of the first row.
  static Groups at(const Weight& w, int64_t step) {
    const int64_t length = w.group / kStep, number = w.groups > 1 ? step / length : 0;
    const int64_t left = w.groups > 1 ? length - step % length : INT64_MAX;
    return {w, number, w.groups - 1, left};
  }

  // The same step of another row.
  Groups of_row(int64_t row) const { return {w, index + row * w.groups, last + row * w.groups, left}; }

  // Takes steps of this group. Padding beyond the last group belongs to it.
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

// How x is cut to meet codes in integers: into segments of whole steps, none of which crosses a group.
struct Segments {
  int64_t steps, number, per_group;

  explicit Segments(const Weight& w) {
    const bool one = w.groups == 1;
    steps = one || w.group % (4 * kStep) == 0 ? 4 : w.group % (2 * kStep) == 0 ? 2 : 1;
    number = (w.inner + steps * kStep - 1) / (steps * kStep);
    per_group = one ? number : w.group / (steps * kStep);
  }
};

}  // namespace
}  // namespace jaxserve
