// Attention of a chunk of a prompt over 16-bit pages, turned: a query row is a column. For files as in vectors.h.
//
// The walk over the context is that of attention.cc. Scores [positions, rows] are keys, as they lie, times queries; out
// [dims, rows] is values, turned, times weights. So a vector holds the same position or dimension of 16 rows, and a softmax needs
// no sums across lanes. Products are of bfloat16 and sums float32; what multiplies is a `Unit`: attention_amx.cc, attention_bf16.cc.

#pragma once

#include <immintrin.h>

#include "attention.h"
#include "softmax.h"

namespace jaxserve {
namespace {

constexpr int kTile = LANES;            // rows of a tile; 32 numbers of 16 bits or 16 of 32 bits to a row
constexpr int kStep = 2 * kTile;        // dimensions or positions that one product sums over
constexpr int kSteps = kBlock / kStep;  // of a block's positions
constexpr int kWords = kTile * kTile;   // of 32 bits in a tile
constexpr int kChains = 4;              // of maxima that do not wait for each other
constexpr float kLowest = -1e30f;       // below all scores, and finite: what is seen of nothing is no NaN
constexpr float kUnseen = 2 * kLowest;  // the score of a position that is not seen

// Buffers of one kv head of a tile; D: head_dim, a multiple of kStep. What is in brackets beside [16, 16] counts tiles.
struct Buffers {
  uint16_t* keys;     // [kBlock, D]
  uint32_t* values;   // [D / 16, kSteps][16 dims, 16 pairs of positions]
  float* scores;      // [kBlock, 16 rows]
  uint32_t* weights;  // [kSteps, 2][16 pairs of positions, 16 rows]: rounded; or upper halves, and what they leave
  uint32_t* q;        // [rows / 16, D / kStep][16 pairs of dims, 16 rows]
  float* out;         // [rows / 16][D, 16 rows]
  float *top, *total;  // [rows / 16][16 rows]
};

Buffers lay_out(float* at, int64_t dims, int64_t row_tiles) {
  Pieces pieces = {at};
  Buffers b;
  b.keys = reinterpret_cast<uint16_t*>(pieces.take(kBlock * dims / 2));
  b.values = reinterpret_cast<uint32_t*>(pieces.take(kBlock * dims / 2));
  b.scores = pieces.take(kBlock * kTile);
  b.weights = reinterpret_cast<uint32_t*>(pieces.take(2 * kSteps * kWords));
  b.q = reinterpret_cast<uint32_t*>(pieces.take(row_tiles * dims / 2 * kTile));
  b.out = pieces.take(row_tiles * dims * kTile);
  b.top = pieces.take(row_tiles * kTile);
  b.total = pieces.take(row_tiles * kTile);
  return b;
}

inline void store_turned(Floats (&x)[LANES], uint32_t* to) {
  transpose(x);
  for (int i = 0; i < LANES; ++i) store(reinterpret_cast<float*>(to) + i * LANES, x[i]);
}

// Some rows bfloat16[D] as columns of pairs; zeros for those that are not there.
void pack_queries(const uint16_t* const* rows, int count, int64_t dims, uint32_t* q) {
  for (int64_t d = 0; d < dims; d += kStep, q += kWords) {
    Floats x[LANES];
    for (int i = 0; i < kTile; ++i) x[i] = i < count ? load(reinterpret_cast<const float*>(rows[i] + d)) : Floats{};
    store_turned(x, q);
  }
}

// Brings the keys and values of `count` positions into the buffers, and zeros for the rest of the block.
void gather_block(const Rows<uint16_t>& rows, int64_t dims, const Coming& next, const Buffers& b) {
  const int count = rows.count;
  for (int i = 0; i < kBlock; ++i) {
    next.ask_for_key(i);
    uint16_t* to = b.keys + i * dims;
    i < count ? memcpy(to, rows.keys[i], 2 * (size_t)dims) : memset(to, 0, 2 * (size_t)dims);
  }
  const auto sixteen = [&](int i, int64_t d) {
    if (i >= count) return _mm512_setzero_si512();
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows.values[i] + d)));
  };
  uint32_t* to = b.values;
  for (int64_t d = 0; d < dims; d += kTile) {
    for (int i = 0; i < kBlock; i += kStep, to += kWords) {
      Floats x[LANES];
      for (int pair = 0; pair < kTile; ++pair) {
        const __m512i first = sixteen(i + 2 * pair, d), second = sixteen(i + 2 * pair + 1, d);
        x[pair] = (Floats)_mm512_or_si512(first, _mm512_slli_epi32(second, 16));
      }
      store_turned(x, to);
    }
  }
}

// Which positions of the block each of 16 rows sees: [begin, end).
struct Seen {
  alignas(64) int32_t begin[kTile], end[kTile];
  bool nothing = true, all = true;  // of all rows
};

inline Floats larger(Floats x, Floats y) { return (Floats)_mm512_max_ps((__m512)x, (__m512)y); }  // y if x is NaN

// 2^x for x <= 0, to 2e-7 relative: a polynomial on [-1/2, 1/2] and the exponent.
inline Floats power(Floats x) {
  const __m512 whole = _mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const Floats f = x - (Floats)whole;
  Floats p = 1.3264700e-3f * f + 9.6715100e-3f;
  p = p * f + 5.5507340e-2f;
  p = p * f + 2.4022242e-1f;
  p = p * f + 6.9314698e-1f;
  p = p * f + 1.0f;
  return (Floats)_mm512_scalef_ps((__m512)p, whole);
}

// Turns scores into weights relative to each row's new maximum; returns by how much what was summed before must be scaled. With
// `Exact` a weight becomes two bfloat16, its upper half and what that leaves; without, the one next to it.
template <bool Exact>
Floats soften_columns(const Buffers& b, const Seen& seen, float scale, float* top, float* total) {
  const __m512i begin = _mm512_load_si512(seen.begin), end = _mm512_load_si512(seen.end);
  const Floats before = load(top);
  Floats tops[kChains] = {before, before, before, before};
  for (int i = 0; i < kBlock; ++i) {
    Floats x = load(b.scores + i * kTile) * scale;
    if (!seen.all) {
      const __m512i at = _mm512_set1_epi32(i);
      const __mmask16 visible = _mm512_cmple_epi32_mask(begin, at) & _mm512_cmplt_epi32_mask(at, end);
      x = (Floats)_mm512_mask_blend_ps(visible, (__m512)splat(kUnseen), (__m512)x);
      store(b.scores + i * kTile, x);
    }
    tops[i % kChains] = larger(x, tops[i % kChains]);
  }
  const Floats best = larger(larger(tops[0], tops[1]), larger(tops[2], tops[3]));
  const Floats decay = power(before - best);
  if (!seen.all) scale = 1.0f;  // it has been done
  Floats sums[2] = {load(total) * decay, Floats{}};
  const auto put = [](uint32_t* pairs, Bits first, Bits second) {
    const Bits both = first >> 16 | (second & 0xffff0000u);
    memcpy(pairs, &both, sizeof(both));
  };
  uint32_t* to = b.weights;
  for (int i = 0; i < kBlock; i += 2, to += kTile) {
    if (i == kStep) to += kWords;  // of the first step the lower halves
    Floats weights[2];
    for (int j = 0; j < 2; ++j) {
      weights[j] = power(load(b.scores + (i + j) * kTile) * scale - best);
      sums[j] += weights[j];
    }
    if constexpr (Exact) {
      const Bits upper[2] = {(Bits)weights[0] & 0xffff0000u, (Bits)weights[1] & 0xffff0000u};
      put(to, upper[0], upper[1]);
      put(to + kWords, (Bits)(weights[0] - (Floats)upper[0]), (Bits)(weights[1] - (Floats)upper[1]));
    } else {
      put(to, round_to_bfloat16(weights[0]), round_to_bfloat16(weights[1]));
    }
  }
  store(top, best);
  store(total, sums[0] + sums[1]);
  return decay;
}

// out[D, 16] = out * decay[16] + values weights[count, 16]
template <typename Unit>
void multiply_values(const Buffers& b, int count, int64_t dims, Floats decay, float* out) {
  if (_mm512_cmp_ps_mask((__m512)decay, _mm512_set1_ps(1.0f), _CMP_NEQ_UQ)) {
    for (int64_t d = 0; d < dims; ++d) store(out + d * kTile, load(out + d * kTile) * decay);
  }
  Unit::add_values(b, (count + kStep - 1) / kStep, dims, out);
}

// What rows [row, row + 16) of the tile see of the block of `count` positions from `position` on.
Seen seen_by(const Attention& a, const Tile& t, int64_t row, int64_t position, int count) {
  Seen seen;
  const int64_t last = t.length * a.groups - 1;
  for (int i = 0; i < kTile; ++i) {
    const int64_t query = t.start + (row + i < last ? row + i : last) / a.groups - position;  // relative to the block
    const int64_t begin = query + 1 > a.window ? query + 1 - a.window : 0;
    seen.begin[i] = (int32_t)(begin < kBlock ? begin : kBlock);
    seen.end[i] = (int32_t)(query + 1 < 0 ? 0 : query + 1 < count ? query + 1 : count);
    if (seen.begin[i] < seen.end[i]) seen.nothing = false;
    if (seen.begin[i] > 0 || seen.end[i] < kBlock) seen.all = false;
  }
  return seen;
}

// Columns of 16 rows, divided by their totals, to rows bfloat16[D].
void write_rows(float* out, const float* total, int count, int64_t dims, uint16_t* const* rows) {
  const Floats divisor = load(total);
  for (int64_t d = 0; d < dims; d += kTile) {
    Floats x[LANES];
    for (int i = 0; i < kTile; ++i) x[i] = load(out + (d + i) * kTile) / divisor;
    transpose(x);
    for (int i = 0; i < count; ++i) {
      const Bits bits = round_to_bfloat16(x[i]) >> 16;
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(rows[i] + d), _mm512_cvtepi32_epi16((__m512i)bits));
    }
  }
}

// A `Unit` begins, multiplies keys by a column of queries, adds the product of values and weights to out, and ends; see above.
template <typename Unit>
void attend_columns(const Attention& a, const Tile& t, const Tile* after, float* scratch) {
  const int64_t rows = t.length * a.groups, dims = a.head_dim, row_tiles = (rows + kTile - 1) / kTile;
  const Buffers b = lay_out(scratch, dims, row_tiles);
  const int64_t stride = a.kv_heads * a.groups * dims;  // from token to token in q and out
  const int64_t origin = t.row * stride + t.head * a.groups * dims;
  const auto offset = [&](int64_t row) { return origin + row / a.groups * stride + row % a.groups * dims; };
  const auto count_of = [&](int64_t tile) { return (int)(rows - tile * kTile < kTile ? rows - tile * kTile : kTile); };
  for (int64_t tile = 0; tile < row_tiles; ++tile) {
    const uint16_t* q[kTile] = {};
    for (int i = 0; i < count_of(tile); ++i) q[i] = static_cast<const uint16_t*>(a.q) + offset(tile * kTile + i);
    pack_queries(q, count_of(tile), dims, b.q + tile * kTile * dims / 2);
    store(b.top + tile * kTile, splat(kLowest));
  }
  memset(b.out, 0, (size_t)(row_tiles * kTile * dims) * sizeof(float));
  memset(b.total, 0, (size_t)(row_tiles * kTile) * sizeof(float));

  [[maybe_unused]] const Unit unit;
  const float scale = a.scale * kLog2E;  // weights are powers of 2
  for (Blocks<uint16_t> blocks(a, t, after); blocks.more(); blocks.advance()) {
    const int count = blocks.rows().count;
    gather_block(blocks.rows(), dims, blocks.next(), b);
    blocks.next().ask_for_values();
    for (int64_t tile = 0; tile < row_tiles; ++tile) {
      const Seen seen = seen_by(a, t, tile * kTile, blocks.position, count);
      if (seen.nothing) continue;
      Unit::multiply_keys(b, b.q + tile * kTile * dims / 2, dims);
      const Floats decay = soften_columns<Unit::kExact>(b, seen, scale, b.top + tile * kTile, b.total + tile * kTile);
      multiply_values<Unit>(b, count, dims, decay, b.out + tile * kTile * dims);
    }
  }

  for (int64_t tile = 0; tile < row_tiles; ++tile) {
    uint16_t* out[kTile] = {};
    for (int i = 0; i < count_of(tile); ++i) out[i] = static_cast<uint16_t*>(a.out) + offset(tile * kTile + i);
    write_rows(b.out + tile * kTile * dims, b.total + tile * kTile, count_of(tile), dims, out);
  }
}

}  // namespace
}  // namespace jaxserve
