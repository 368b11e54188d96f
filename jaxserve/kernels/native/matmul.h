// Product of a few rows with a bfloat16 weight on the matrix unit of x86-64 (AMX-BF16; matmul.cc).

#pragma once

#include <cstdint>

namespace jaxserve {

constexpr int64_t kMaxRows = 32;
constexpr int64_t kOutBlock = 32;  // rows of the weight that are multiplied at once
constexpr int64_t kInnerBlock = 32;

// y [rows, out] = x [rows, inner] times w [out, inner] transposed; sums in float32. rows <= kMaxRows,
// out >= kOutBlock, inner a multiple of kInnerBlock.
struct Matmul {
  const uint32_t* x;  // pairs of bfloat16, packed by pack_rows
  const uint16_t* w;  // bfloat16
  float* y;
  int64_t rows, out, inner;
};

// x [rows, inner] as the matrix unit wants its second operand: for each tile of up to 16 rows, pairs of values
// [inner / 2, rows of the tile]. `packed` holds rows * inner / 2 pairs.
void pack_rows(const uint16_t* x, int64_t rows, int64_t inner, uint32_t* packed);

// Columns [begin, end) of y, at least kOutBlock of them. The weight is read once, as it lies.
void matmul_amx(const Matmul&, int64_t begin, int64_t end);

// Whether this machine and its kernel let us use the matrix unit; asks the kernel for it.
bool amx_available();

}  // namespace jaxserve
