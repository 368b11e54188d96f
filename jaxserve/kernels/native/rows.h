// The interface of the kernels for single rows (rows.cc). The instruction set is chosen at run time (machine.h).

#pragma once

#include <cstdint>

namespace jaxserve {

// The functions of one instruction set. Numbers are bfloat16 or float32, and all is computed in float32.
struct RowFunctions {
  // to [size] = x / sqrt(mean(x^2) + eps) * weight: root-mean-square normalisation.
  void (*norm)(const void* x, const void* weight, float eps, int64_t size, bool bfloat16, void* to);
  // to [size] = silu(gate) * up.
  void (*swiglu)(const void* gate, const void* up, int64_t size, bool bfloat16, void* to);
  // to [size] += x.
  void (*add)(const void* x, int64_t size, bool bfloat16, void* to);
  // to [2 half] = x [2 half], with the pair of numbers i and half + i rotated by the angle whose cosine is cos[i] and sine sin[i].
  void (*rotate)(const void* x, const float* cos, const float* sin, int64_t half, bool bfloat16, void* to);
  // to = x [size] as int8 codes and their float32 scale, which is a row of a KV pool (kernels/kv.py).
  void (*quantize)(const void* x, int64_t size, bool bfloat16, void* to);
};

extern const RowFunctions kRowsAvx512, kRowsAvx2, kRowsBaseline;

}  // namespace jaxserve
