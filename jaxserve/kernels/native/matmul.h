// The interface of the kernels that multiply rows by a weight. There is one for each instruction set (matmul_*.cc), and
// matmul_call.cc chooses one at run time.

#pragma once

#include <cstddef>
#include <cstdint>

namespace jaxserve {

// A weight [out, inner] as stored: bfloat16, or codes with scales as jaxserve/quantization/qarray.py defines them.
struct Weight {
  const uint8_t* data;  // [out, row_bytes]
  const void* scales;   // [out, groups]; null for bfloat16
  const void* zeros;    // [out, groups], or null
  bool wide_scales, wide_zeros;  // whether they are float32; otherwise they are bfloat16
  int bits;                      // 16, 8, 4 or 3
  int64_t out, inner, row_bytes;
  int64_t group, groups;  // group * groups = inner; a group is a multiple of kStep, or all of inner
};

// y [rows, out] = x [rows, inner] times w transposed, with sums in float32.
struct Matmul {
  const void* x;
  void* y;
  bool x_bfloat16, y_bfloat16;  // whether they are bfloat16; otherwise they are float32
  int64_t rows;
  Weight w;
};

// The part y[row : row + rows, out : out + outs] of a product.
struct Block {
  int64_t out, outs, row, rows;
};

constexpr int64_t kStep = 32;       // inputs that are unpacked at once
constexpr int64_t kUnitSteps = 8;   // steps of the largest unit in which codes are packed
constexpr int64_t kPackRows = 16;   // rows of x that are rearranged at once
constexpr int64_t kMaxRows = 576;   // rows of a block: 512 tokens of chunks, and decode rows
constexpr int64_t kAlignment = 64;  // bytes, of packed rows and scratch memory

static inline int64_t steps_of(int64_t inner) { return (inner + kStep - 1) / kStep; }

// A kernel. All of x is packed (rearranged) before any block of y is computed.
struct Multiplier {
  size_t (*packed_bytes)(const Matmul&);
  void (*pack)(const Matmul&, int64_t row, void* packed);  // packs rows [row, row + kPackRows)
  Block (*block)(const Matmul&);                           // returns the first block, which has the size of all others
  size_t (*scratch_bytes)(const Matmul&);
  // Computes a block. `after` is the block that this thread computes next, whose memory may be prefetched, or null.
  void (*multiply)(const Matmul&, const void* packed, const Block&, const Block* after, void* scratch);
};

extern const Multiplier kMatmulAmx, kMatmulVnni, kMatmulAvx512;  // x in bfloat16
extern const Multiplier kMatmulAmxInt8;                          // x in bfloat16, codes alone
extern const Multiplier kMatmulFewAvx2, kMatmulAvx2;
extern const Multiplier kMatmulFloatAvx512, kMatmulFloatAvx2, kMatmulFloatBaseline;

// Returns whether this machine and its operating system permit the use of the matrix unit, after requesting it.
bool amx_available();

// Returns whether this also holds for its products of integers.
bool amx_int8_available();

}  // namespace jaxserve
