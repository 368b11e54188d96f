// Products of rows with a weight, for one instruction set each (matmul_*.cc) and chosen at run time (matmul_call.cc).

#pragma once

#include <cstddef>
#include <cstdint>

namespace jaxserve {

// A weight [out, inner] as stored: bfloat16, or codes with scales as jaxserve/quantization/qarray.py defines them.
struct Weight {
  const uint8_t* data;  // rows of row_bytes
  const void* scales;   // [out, groups]; null for bfloat16
  const void* zeros;    // [out, groups], or null
  bool wide_scales, wide_zeros;  // float32 instead of bfloat16
  int bits;                      // 16, 8, 4 or 3
  int64_t out, inner, row_bytes;
  int64_t group, groups;  // group * groups = inner; a group is a multiple of kStep, or all of inner
};

// y [rows, out] = x [rows, inner] times w transposed, with sums in float32.
struct Matmul {
  const void* x;
  void* y;
  bool x_bfloat16, y_bfloat16;  // instead of float32
  int64_t rows;
  Weight w;
};

// A part of y.
struct Block {
  int64_t out, outs, row, rows;
};

constexpr int64_t kStep = 32;         // inputs that are unpacked at once
constexpr int64_t kUnitSteps = 8;     // steps of the largest unit that codes are packed in
constexpr int64_t kPackRows = 16;     // rows of x that are rearranged at once
constexpr int64_t kManyRows = 576;    // of a block: a budget of 512 tokens and rows that decode beside it
constexpr int64_t kAlignment = 64;    // of packed rows and scratch memory

static inline int64_t steps_of(int64_t inner) { return (inner + kStep - 1) / kStep; }

// One way to multiply. All of x is rearranged before any part of y is computed.
struct Multiplier {
  size_t (*packed_bytes)(const Matmul&);
  void (*pack)(const Matmul&, int64_t row, void* packed);  // rows [row, row + kPackRows)
  Block (*block)(const Matmul&);                           // size of the parts to compute; its origin is 0
  size_t (*scratch_bytes)(const Matmul&);
  // `after` is the block that this thread computes next, if known: its memory may be prefetched.
  void (*multiply)(const Matmul&, const void* packed, const Block&, const Block* after, void* scratch);
};

extern const Multiplier kMatmulAmx, kMatmulVnni, kMatmulAvx512;  // x in bfloat16
extern const Multiplier kMatmulFewAvx2, kMatmulAvx2;
extern const Multiplier kMatmulFloatAvx512, kMatmulFloatAvx2, kMatmulFloatBaseline;

// Returns whether this machine and its operating system permit the use of the matrix unit, after requesting it.
bool amx_available();

}  // namespace jaxserve
