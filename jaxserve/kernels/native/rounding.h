// The interface of the kernel that rounds weights to fewer bits (rounding.cc). The instruction set is chosen at run time (machine.h).

#pragma once

#include <cstdint>

namespace jaxserve {

// Rows of a weight, and the memory for their codes, scales and zeros (quantization/qarray.py).
struct RoundedRows {
  const void* w;  // [rows, size], bfloat16 or float32, all finite
  bool bfloat16;
  int64_t rows, size, group;  // of `group` inputs that share a scale; it divides `size`
  int bits;                   // 8, 4 or 3
  uint8_t* codes;             // [rows, packed bytes]
  uint16_t* scales;           // [rows, size / group], bfloat16
  uint16_t* zeros;            // likewise, or null for a symmetric weight
};

// The bytes of scratch memory that the kernel needs.
constexpr int64_t kMaxLanes = 16;
inline int64_t rounding_scratch_bytes(const RoundedRows& r) { return 2 * r.group * kMaxLanes * 4 + r.rows * r.size; }

using RoundRows = void (*)(const RoundedRows& rows, void* scratch);

extern const RoundRows kRoundAvx512, kRoundAvx2, kRoundBaseline;

}  // namespace jaxserve
