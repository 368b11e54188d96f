// Attention of a chunk of a prompt over 16-bit pages on the matrix unit of x86-64 (AMX-BF16), with the layout of columns.h.
//
// A weight enters the product as two bfloat16 numbers, its upper half and the remainder, so that sums are as exact as with float32
// weights.

#include "attention.h"

#if defined(__x86_64__) && defined(__linux__)

#include "amx.h"
#include "columns.h"

namespace jaxserve {
namespace {

// out[16 * (4 or 2) dims, 16 rows] += values * weights
template <bool Four>
inline void multiply_dims(const uint32_t* values, const uint32_t* weights, int steps, float* out) {
  constexpr int64_t kDims = kSteps * kWords;  // between tiles of dims
  _tile_loadd(0, out, 64);
  _tile_loadd(1, out + kWords, 64);
  if (Four) {
    _tile_loadd(2, out + 2 * kWords, 64);
    _tile_loadd(3, out + 3 * kWords, 64);
  }
  for (int step = 0; step < steps; ++step, values += kWords, weights += 2 * kWords) {
    _tile_loadd(6, weights, 64);
    _tile_loadd(7, weights + kWords, 64);
    _tile_loadd(4, values, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(0, 4, 7);
    _tile_loadd(5, values + kDims, 64);
    _tile_dpbf16ps(1, 5, 6);
    _tile_dpbf16ps(1, 5, 7);
    if (Four) {
      _tile_loadd(4, values + 2 * kDims, 64);
      _tile_dpbf16ps(2, 4, 6);
      _tile_dpbf16ps(2, 4, 7);
      _tile_loadd(5, values + 3 * kDims, 64);
      _tile_dpbf16ps(3, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, out, 64);
  _tile_stored(1, out + kWords, 64);
  if (Four) {
    _tile_stored(2, out + 2 * kWords, 64);
    _tile_stored(3, out + 3 * kWords, 64);
  }
}

struct MatrixUnit {
  static constexpr bool kExact = true;
  static constexpr int kTiles = 1;

  MatrixUnit() {
    TileConfig config;
    config.set(0, 8, kTile);
    configure_tiles(config);
  }
  ~MatrixUnit() { _tile_release(); }

  // scores[kBlock, 16] = keys[kBlock, D] * q[D, 16]
  template <int N>
  static void multiply_keys(const Buffers& b, const uint32_t* q, int64_t dims) {
    memory_barrier();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    const uint16_t* keys = b.keys;
    const int64_t row = 2 * dims, tile = kTile * dims;
    for (int64_t d = 0; d < dims; d += kStep, keys += kStep, q += kWords) {
      _tile_loadd(4, q, 64);
      _tile_loadd(5, keys, row);
      _tile_dpbf16ps(0, 5, 4);
      _tile_loadd(6, keys + tile, row);
      _tile_dpbf16ps(1, 6, 4);
      _tile_loadd(5, keys + 2 * tile, row);
      _tile_dpbf16ps(2, 5, 4);
      _tile_loadd(6, keys + 3 * tile, row);
      _tile_dpbf16ps(3, 6, 4);
    }
    _tile_stored(0, b.scores, 64);
    _tile_stored(1, b.scores + kWords, 64);
    _tile_stored(2, b.scores + 2 * kWords, 64);
    _tile_stored(3, b.scores + 3 * kWords, 64);
  }

  // out[D, 16] += values * weights over `steps` steps of positions.
  template <int N>
  static void add_values(const Buffers& b, int steps, int64_t dims, float* out) {
    memory_barrier();
    int64_t d = 0;
    for (; d + 4 * kTile <= dims; d += 4 * kTile) {
      multiply_dims<true>(b.values + d * kSteps * kTile, b.weights, steps, out + d * kTile);
    }
    if (d < dims) multiply_dims<false>(b.values + d * kSteps * kTile, b.weights, steps, out + d * kTile);
  }
};

}  // namespace

void attend_amx(const Attention& a, const Tile& t, const Tile* after, float* scratch) {
  attend_columns<MatrixUnit>(a, t, after, scratch);
}

}  // namespace jaxserve

#endif
