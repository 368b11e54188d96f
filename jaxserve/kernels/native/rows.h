// Functions of rows (rows.cc), chosen at run time (machine.h).

#pragma once

#include <cstdint>

namespace jaxserve {

// Of one instruction set. Numbers are bfloat16 or float32, sums and functions are in float32.
struct RowFunctions {
  // to [size] = x / sqrt(mean(x^2) + eps) * weight: root-mean-square normalisation.
  void (*norm)(const void* x, const void* weight, float eps, int64_t size, bool bfloat16, void* to);
  // to [size] = silu(gate) * up.
  void (*swiglu)(const void* gate, const void* up, int64_t size, bool bfloat16, void* to);
  // to [size] += x.
  void (*add)(const void* x, int64_t size, bool bfloat16, void* to);
  // to [2 half] = x [2 half], number i and number half + i turned by the angle i of which the cosine and the sine are given.
  void (*rotate)(const void* x, const float* cos, const float* sin, int64_t half, bool bfloat16, void* to);
  // to = x [size] in int8 codes, and their scale, a float32: a row of a KV pool (kernels/kv.py).
  void (*quantize)(const void* x, int64_t size, bool bfloat16, void* to);
};

extern const RowFunctions kRowsAvx512, kRowsAvx2, kRowsBaseline;

}  // namespace jaxserve
