// The tile instructions of x86-64 (AMX), and the AVX512-BF16 instructions that their kernels need too, computed by plain loops as
// Intel's manual defines them. Included before a kernel's source (-include), it runs the kernel on any processor with AVX-512:
// tests/kernels/test_matrix_unit.py.
//
// An instruction that a configuration does not allow is undefined on a processor, and ends the process here.

#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#define JAXSERVE_EMULATED_TILES

namespace emulated {

struct Tile {
  int rows = 0, bytes = 0;  // as configured
  alignas(64) unsigned char data[16][64];
};

inline thread_local Tile tiles[8];

inline void require(bool allowed) {
  if (!allowed) abort();
}

inline void configure_tiles(const void* config) {
  unsigned char bytes[64];
  memcpy(bytes, config, sizeof(bytes));
  require(bytes[0] == 1);
  for (int i = 0; i < 8; ++i) {
    Tile& tile = tiles[i];
    tile.bytes = bytes[16 + 2 * i] | bytes[17 + 2 * i] << 8;
    tile.rows = bytes[48 + i];
    require(tile.bytes <= 64 && tile.rows <= 16 && (tile.bytes == 0) == (tile.rows == 0));
    memset(tile.data, 0, sizeof(tile.data));
  }
}

inline void release() {
  for (Tile& tile : tiles) tile = Tile{};
}

inline Tile& used(int index) {
  require(tiles[index].rows != 0);
  return tiles[index];
}

inline void zero(int index) { memset(used(index).data, 0, sizeof(Tile::data)); }

inline void load(int index, const void* from, int64_t stride) {
  Tile& tile = used(index);
  zero(index);
  for (int row = 0; row < tile.rows; ++row) memcpy(tile.data[row], static_cast<const char*>(from) + row * stride, tile.bytes);
}

inline void store(int index, void* to, int64_t stride) {
  const Tile& tile = used(index);
  for (int row = 0; row < tile.rows; ++row) memcpy(static_cast<char*>(to) + row * stride, tile.data[row], tile.bytes);
}

// Denormal numbers are zeros.
inline float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }

inline float number(const unsigned char* bfloat16) {
  uint32_t bits = 0;
  memcpy(reinterpret_cast<char*>(&bits) + 2, bfloat16, 2);
  float x;
  memcpy(&x, &bits, sizeof(x));
  return flushed(x);
}

// TDPBF16PS: even and odd products are summed apart, and both sums are then added to the tile.
inline void multiply(int sums, int first, int second) {
  Tile &to = used(sums), &a = used(first), &b = used(second);
  require(to.rows == a.rows && to.bytes == b.bytes && a.bytes == 4 * b.rows);
  for (int m = 0; m < to.rows; ++m) {
    for (int n = 0; n < to.bytes / 4; ++n) {
      float even = 0, odd = 0, sum;
      for (int k = 0; k < a.bytes / 4; ++k) {
        even = flushed(std::fma(number(a.data[m] + 4 * k), number(b.data[k] + 4 * n), even));
        odd = flushed(std::fma(number(a.data[m] + 4 * k + 2), number(b.data[k] + 4 * n + 2), odd));
      }
      memcpy(&sum, to.data[m] + 4 * n, 4);
      sum = flushed(flushed(sum) + flushed(even + odd));
      memcpy(to.data[m] + 4 * n, &sum, 4);
    }
  }
}

// TDPBUSD: fours of unsigned and signed bytes.
inline void multiply_bytes(int sums, int first, int second) {
  Tile &to = used(sums), &a = used(first), &b = used(second);
  require(to.rows == a.rows && to.bytes == b.bytes && a.bytes == 4 * b.rows);
  for (int m = 0; m < to.rows; ++m) {
    int32_t* const row = reinterpret_cast<int32_t*>(to.data[m]);
    for (int k = 0; k < a.bytes; ++k) {
      for (int n = 0; n < to.bytes / 4; ++n) row[n] += a.data[m][k] * static_cast<signed char>(b.data[k / 4][4 * n + k % 4]);
    }
  }
}

inline uint16_t rounded(float x) {
  uint32_t bits;
  x = flushed(x);
  memcpy(&bits, &x, sizeof(bits));
  if (std::isnan(x)) return static_cast<uint16_t>(bits >> 16 | 64);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// VCVTNE2PS2BF16: the second operand has the lower half of the result.
inline __m512bh round_two(__m512 high, __m512 low) {
  float x[32];
  uint16_t y[32];
  memcpy(x, &low, 64);
  memcpy(x + 16, &high, 64);
  for (int i = 0; i < 32; ++i) y[i] = rounded(x[i]);
  __m512bh both;
  memcpy(&both, y, 64);
  return both;
}

inline __m256bh round_one(__m512 numbers) {
  float x[16];
  uint16_t y[16];
  memcpy(x, &numbers, 64);
  for (int i = 0; i < 16; ++i) y[i] = rounded(x[i]);
  __m256bh half;
  memcpy(&half, y, 32);
  return half;
}

// VDPBF16PS: the odd product of each lane is added first.
inline __m512 multiply_pairs(__m512 sums, __m512bh first, __m512bh second) {
  float x[16];
  unsigned char a[64], b[64];
  memcpy(x, &sums, 64);
  memcpy(a, &first, 64);
  memcpy(b, &second, 64);
  for (int i = 0; i < 16; ++i) {
    x[i] = flushed(std::fma(number(a + 4 * i + 2), number(b + 4 * i + 2), flushed(x[i])));
    x[i] = flushed(std::fma(number(a + 4 * i), number(b + 4 * i), x[i]));
  }
  memcpy(&sums, x, 64);
  return sums;
}

}  // namespace emulated

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbusd
#define _tile_loadd(tile, from, stride) emulated::load(tile, from, stride)
#define _tile_stored(tile, to, stride) emulated::store(tile, to, stride)
#define _tile_zero(tile) emulated::zero(tile)
#define _tile_dpbf16ps(sums, first, second) emulated::multiply(sums, first, second)
#define _tile_dpbusd(sums, first, second) emulated::multiply_bytes(sums, first, second)
#define _tile_release() emulated::release()
#define _mm512_cvtne2ps_pbh(high, low) emulated::round_two(high, low)
#define _mm512_cvtneps_pbh(numbers) emulated::round_one(numbers)
#define _mm512_dpbf16_ps(sums, first, second) emulated::multiply_pairs(sums, first, second)
