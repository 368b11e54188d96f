// With few rows the time goes into reading the weight. The matrix unit multiplies tiles of 16 x 32 by 32 x 16 values and
// wants its second operand in pairs; so the weight, which is large and lies row by row, is the first operand, and the
// rows of x, which are few, are rearranged into the second. The product comes out transposed and is turned on its way to
// y. Two blocks of 16 weight rows run together to hide the unit's latency.

#include "matmul.h"

#if defined(__x86_64__)

#include <cpuid.h>
#include <cstring>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace jaxserve {
namespace {

constexpr int kTile = 16;  // rows of a tile

struct alignas(64) Config {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t column_bytes[16] = {};
  uint8_t rows[16] = {};

  // Tiles 0-3 sums [16, columns], 4-5 weights [16, 32], 6-7 pairs of x [16, columns].
  Config(int first, int second) {
    const int columns[2] = {first, second};
    for (int i = 0; i < 4; ++i) set(i, kTile, columns[i % 2]);
    for (int i = 4; i < 6; ++i) set(i, kTile, kTile);
    for (int i = 6; i < 8; ++i) set(i, kTile, columns[i % 2]);
  }

  void set(int tile, int height, int words) {
    rows[tile] = static_cast<uint8_t>(words ? height : 0);
    column_bytes[tile] = static_cast<uint16_t>(4 * words);
  }
};

// Writes sums [16, columns] of weight rows from `out` on as columns of y.
void turn(const Matmul& m, const float* sums, int64_t out, int64_t row, int64_t columns) {
  for (int64_t r = 0; r < columns; ++r) {
    float* y = m.y + (row + r) * m.out + out;
    for (int i = 0; i < kTile; ++i) y[i] = sums[i * columns + r];
  }
}

template <bool Two>  // tiles of rows of x
void block(const Matmul& m, int64_t out, int64_t first, int64_t second) {
  const int64_t stride = 2 * m.inner;
  const uint16_t* w0 = m.w + out * m.inner;
  const uint16_t* w1 = w0 + kTile * m.inner;
  const uint32_t* x0 = m.x;
  const uint32_t* x1 = m.x + first * m.inner / 2;
  _tile_zero(0);
  _tile_zero(2);
  if (Two) {
    _tile_zero(1);
    _tile_zero(3);
  }
  for (int64_t k = 0; k < m.inner; k += kInnerBlock) {
    _tile_loadd(6, x0 + k / 2 * first, 4 * first);
    _tile_loadd(4, w0 + k, stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, w1 + k, stride);
    _tile_dpbf16ps(2, 5, 6);
    if (Two) {
      _tile_loadd(7, x1 + k / 2 * second, 4 * second);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  alignas(64) float sums[kTile * kTile];
  _tile_stored(0, sums, 4 * first);
  turn(m, sums, out, 0, first);
  _tile_stored(2, sums, 4 * first);
  turn(m, sums, out + kTile, 0, first);
  if (Two) {
    _tile_stored(1, sums, 4 * second);
    turn(m, sums, out, first, second);
    _tile_stored(3, sums, 4 * second);
    turn(m, sums, out + kTile, first, second);
  }
}

}  // namespace

void pack_rows(const uint16_t* x, int64_t rows, int64_t inner, uint32_t* packed) {
  for (int64_t row = 0; row < rows; row += kTile) {
    const int64_t columns = rows - row < kTile ? rows - row : kTile;
    for (int64_t r = 0; r < columns; ++r) {
      const uint16_t* from = x + (row + r) * inner;
      for (int64_t pair = 0; pair < inner / 2; ++pair) memcpy(packed + pair * columns + r, from + 2 * pair, 4);
    }
    packed += columns * inner / 2;
  }
}

void matmul_amx(const Matmul& m, int64_t begin, int64_t end) {
  const int64_t first = m.rows < kTile ? m.rows : kTile, second = m.rows - first;
  const Config config(static_cast<int>(first), static_cast<int>(second));
  _tile_loadconfig(&config);
  for (int64_t out = begin; out < end; out += kOutBlock) {
    const int64_t at = out + kOutBlock <= end ? out : end - kOutBlock;  // the last block may overlap the one before
    if (second) {
      block<true>(m, at, first, second);
    } else {
      block<false>(m, at, first, second);
    }
  }
  _tile_release();
}

bool amx_available() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned kBf16 = 1u << 22, kTiles = 1u << 24;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kBf16) == 0 || (d & kTiles) == 0) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // arch_prctl: ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}  // namespace jaxserve

#endif
