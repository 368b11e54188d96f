// Codes of a weight as tiles of bytes for the matrix unit's integers. Only matmul_amx_int8.cc includes this file.
//
// A tile has 16 outputs by 64 inputs, or by 32 where segments (groups.h) have only 32. A segment of 128 inputs has two tiles. Codes
// of 8 bits are read as stored where they can be. All others are unpacked to a slab: the tiles of two times 16 outputs in a slice of
// the inputs. Inputs are in the order of `store_bytes`, like those of x.

#pragma once

#include <immintrin.h>

#include "groups.h"
#include "integers512.h"
#include "matmul.h"
#include "outputs.h"

namespace jaxserve {
namespace {

constexpr int64_t kSliceSteps = kUnitSteps;                   // of a slice, whose data begins at a whole unit of packed codes
constexpr int64_t kSlabBytes = kPair * kSliceSteps * kStep;

// The sizes of segments of L steps.
template <int L>
struct Sizes {
  static constexpr int64_t kBytes = L * kStep;                     // codes of an output in a segment
  static constexpr int64_t kTileBytes = kBytes < 64 ? kBytes : 64;  // codes of an output in a tile
  static constexpr int64_t kTiles = kBytes / kTileBytes;           // tiles of a segment
  static constexpr int64_t kSegments = kSliceSteps / L;            // segments of a slice
};

// The tiles of a pair of 16 outputs in a slice, and the bytes between them.
struct Codes {
  const uint8_t* first;
  int64_t row, half, tile;  // bytes between outputs, between the two times 16 outputs, and between neighbouring tiles

  const uint8_t* at(int64_t index, int64_t half_index) const { return first + index * tile + half_index * half; }
};

template <int L>
inline Codes of_slab(const uint8_t* slab) {
  constexpr int64_t kRow = Sizes<L>::kTileBytes;
  return {slab, kRow, kTile * kRow, kPair * kRow};
}

// Returns the tiles of the outputs [out, out + kPair) as stored, from segment `segment` on.
template <int L>
inline Codes as_stored(const Weight& w, int64_t out, int64_t segment) {
  return {w.data + out * w.row_bytes + segment * Sizes<L>::kBytes, w.row_bytes, kTile * w.row_bytes, Sizes<L>::kTileBytes};
}

// Returns a segment of a row of codes as bytes, 64 in a vector (32 if L is 1). `left` inputs remain from its first one on.
template <int Bits, int L>
inline void bytes_of_segment(const uint8_t* row, int64_t segment, int64_t left, __m512i (&bytes)[Sizes<L>::kTiles]) {
  if constexpr (Bits == 8) {
    const uint8_t* from = row + segment * Sizes<L>::kBytes;
    for (int64_t i = 0; i < Sizes<L>::kTiles; ++i, left -= 64) {
      const int64_t some = min(left, Sizes<L>::kTileBytes);
      const __mmask64 mask = some >= 64 ? ~uint64_t{0} : some > 0 ? (uint64_t{1} << some) - 1 : 0;
      bytes[i] = _mm512_maskz_loadu_epi8(mask, from + 64 * i);
    }
    return;
  }
  constexpr int64_t kUnit = Bits == 4 ? 4 : 8;  // steps of a packed unit
  constexpr int kWidth = Bits == 4 ? 4 : 2;
  const int64_t step = segment * L, within = step % kUnit;
  const uint8_t* from = row + step / kUnit * kUnit * kStep * Bits / 8;
  __m512i codes = _mm512_loadu_si512(from);
  if constexpr (Bits == 4 && L == 4) {
    const __m512i mask = _mm512_set1_epi8(15);
    bytes[0] = _mm512_and_si512(codes, mask);
    bytes[1] = _mm512_and_si512(_mm512_srli_epi16(codes, 4), mask);
    return;
  }
  if constexpr (L < kUnit) codes = _mm512_srl_epi16(codes, _mm_cvtsi64_si128(within * kWidth));
  const auto words = [&](int i) {  // of step i of the segment
    const __m512i low = _mm512_and_si512(_mm512_srli_epi16(codes, static_cast<unsigned>(i * kWidth)), _mm512_set1_epi16((1 << kWidth) - 1));
    if constexpr (Bits == 4) return low;
    uint32_t mask;
    __builtin_memcpy(&mask, from + 64 + 4 * (within + i), 4);
    return _mm512_mask_add_epi16(low, mask, low, _mm512_set1_epi16(4));
  };
  if constexpr (L == 1) {
    const __m512i both = words(0);
    const __m256i first = _mm512_castsi512_si256(both), second = _mm512_extracti64x4_epi64(both, 1);
    bytes[0] = _mm512_castsi256_si512(_mm256_or_si256(first, _mm256_slli_epi16(second, 8)));
  } else {
    for (int i = 0; i < L / 2; ++i) bytes[i] = _mm512_or_si512(words(i), _mm512_slli_epi16(words(i + L / 2), 8));
  }
}

// Prefetches `bytes` bytes of the outputs [out, out + kPair), from `offset` bytes after the beginning of their rows on.
inline void prefetch(const Weight& w, int64_t out, int64_t offset, int64_t bytes) {
  const auto* row = reinterpret_cast<const char*>(w.data + out * w.row_bytes + offset);
  for (int64_t r = 0; r < kPair; ++r, row += w.row_bytes) {
    for (int64_t i = 0; i < bytes; i += 64) _mm_prefetch(row + i, _MM_HINT_T0);
  }
}

// Writes segments [segment, segment + count) of the outputs [out, out + kPair) to a slab. Outputs beyond the last one repeat it.
template <int Bits, int L>
inline void unpack(const Weight& w, int64_t out, int64_t segment, int64_t count, uint8_t* slab) {
  constexpr int64_t kRow = Sizes<L>::kTileBytes, kTiles = Sizes<L>::kTiles;
  for (int64_t r = 0; r < kPair; ++r) {
    const uint8_t* row = w.data + min(out + r, w.out - 1) * w.row_bytes;
    uint8_t* to = slab + r * kRow;
    for (int64_t s = segment; s < segment + count; ++s) {
      __m512i vectors[kTiles];
      bytes_of_segment<Bits, L>(row, s, w.inner - s * Sizes<L>::kBytes, vectors);
      for (int64_t i = 0; i < kTiles; ++i, to += kPair * kRow) {
        if constexpr (kRow == 64) {
          _mm512_store_si512(to, vectors[i]);
        } else {
          _mm256_store_si256(reinterpret_cast<__m256i*>(to), _mm512_castsi512_si256(vectors[i]));
        }
      }
    }
  }
}

}  // namespace
}  // namespace jaxserve
