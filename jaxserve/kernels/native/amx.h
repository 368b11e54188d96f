// The matrix unit of x86-64 (AMX): the configuration of its tile registers, and its order with memory. Only attention_amx.cc,
// matmul_amx.cc and matmul_amx_int8.cc include this file.
//
// What compilers know of the memory behind tile instructions differs. Clang assumes that they may read and write anything. GCC
// knows that a tile store writes memory, but not that a tile load reads it, and takes a configuration for 8 bytes (up to GCC 13):
// it drops stores to the other 56 of a local one. So the kernels configure tiles by `configure_tiles` only, and call
// `memory_barrier` before and after tile loads of what they write themselves.

#pragma once

#include <immintrin.h>

#include <cstdint>

namespace jaxserve {
namespace {

constexpr int64_t kTileRows = 16;  // of a full tile, which also has 16 columns of 4 bytes

// The shapes of the eight tile registers, as the processor reads them.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t column_bytes[16] = {};
  uint8_t rows[16] = {};

  // Gives the tiles [first, end) `height` rows of `words` words of 4 bytes; no words mean that they are not used.
  constexpr void set(int first, int end, int64_t words, int64_t height = kTileRows) {
    for (int tile = first; tile < end; ++tile) {
      rows[tile] = static_cast<uint8_t>(words ? height : 0);
      column_bytes[tile] = static_cast<uint16_t>(4 * words);
    }
  }
};
static_assert(sizeof(TileConfig) == 64, "the processor reads 64 bytes");

inline void configure_tiles(const TileConfig& config) {
#ifdef JAXSERVE_EMULATED_TILES  // tests/kernels/native/emulated_tiles.h, for processors without a matrix unit
  emulated::configure_tiles(&config);
#else
  __asm__ volatile("ldtilecfg %0" : : "m"(config));  // the operand is the whole object
#endif
}

// Keeps the compiler from moving reads and writes of memory across this point.
inline void memory_barrier() { __asm__ volatile("" ::: "memory"); }

}  // namespace
}  // namespace jaxserve
