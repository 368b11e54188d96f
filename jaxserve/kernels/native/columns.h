// Attention of a chunk of a prompt over 16-bit pages with transposed operands: a query row is a column. Only for files that are
// compiled once per instruction set (vectors.h).
//
// The context is read block by block, as in attention.cc. For each block:
//
//   scores [positions, rows] = keys [positions, dims] * queries [dims, rows]
//   out [dims, rows] += values, transposed to [dims, positions], * weights [positions, rows]
//
// A vector therefore holds one position or one dimension of 16 rows, and the softmax needs no sums across lanes. Products have
// bfloat16 operands and float32 sums. They are computed by a `Unit`, which attention_amx.cc and attention_bf16.cc define.

#pragma once

#include <immintrin.h>

#include "attention.h"
#include "softmax.h"

namespace jaxserve {
namespace {

constexpr int kTile = LANES;            // rows of a tile; a row has 32 numbers of 16 bits, or 16 numbers of 32 bits
constexpr int kStep = 2 * kTile;        // dimensions or positions that one product sums over
constexpr int kSteps = kBlock / kStep;  // products that cover the positions of a block
constexpr int kWords = kTile * kTile;   // words of 32 bits in a tile
constexpr int kScores = kBlock * kTile;        // scores of 16 rows in a block
constexpr int kWeights = 2 * kSteps * kWords;  // words for the weights of 16 rows in a block
constexpr int kAtOnce = 2;              // maximum number of row tiles that are multiplied by a block at once
constexpr int kChains = 4;              // independent running maxima, so that none waits for another
// Below all scores. It is finite, so that a row that sees nothing gets no NaN.
constexpr float kLowest = -1e30f;
constexpr float kUnseen = 2 * kLowest;  // the score of a position that a row does not see

// The buffers of a tile's attention for one kv head. D is head_dim, a multiple of kStep. In shapes of two brackets the first one
// counts tiles, and the second one is the shape of a tile. Scores and weights exist only for the rows that are multiplied by a
// block at once, in groups of 16.
struct Buffers {
  uint16_t* keys;     // [kBlock, D]
  uint32_t* values;   // [D / 16, kSteps][16 dims, 16 pairs of positions]
  float* scores;      // [kAtOnce][kBlock, 16 rows]
  uint32_t* weights;  // [kAtOnce][kSteps, 2][16 pairs of positions, 16 rows]: see soften_columns
  uint32_t* q;        // [rows / 16, D / kStep][16 pairs of dims, 16 rows]
  float* out;         // [rows / 16][D, 16 rows]
  float *top, *total;  // [rows / 16][16 rows]: the maximum score and the sum of weights so far
};

Buffers lay_out(float* at, int64_t dims, int64_t row_tiles) {
  Pieces pieces = {at};
  Buffers b;
  b.keys = reinterpret_cast<uint16_t*>(pieces.take(kBlock * dims / 2));
  b.values = reinterpret_cast<uint32_t*>(pieces.take(kBlock * dims / 2));
  b.scores = pieces.take(kAtOnce * kScores);
  b.weights = reinterpret_cast<uint32_t*>(pieces.take(kAtOnce * kWeights));
  b.q = reinterpret_cast<uint32_t*>(pieces.take(row_tiles * dims / 2 * kTile));
  b.out = pieces.take(row_tiles * dims * kTile);
  b.top = pieces.take(row_tiles * kTile);
  b.total = pieces.take(row_tiles * kTile);
  return b;
}

inline void store_transposed(Floats (&x)[LANES], uint32_t* to) {
  transpose(x);
  for (int i = 0; i < LANES; ++i) store(reinterpret_cast<float*>(to) + i * LANES, x[i]);
}

// Writes `count` rows bfloat16[D] as columns of pairs, and zeros for the missing ones of 16.
void pack_queries(const uint16_t* const* rows, int count, int64_t dims, uint32_t* q) {
  for (int64_t d = 0; d < dims; d += kStep, q += kWords) {
    Floats x[LANES];
    for (int i = 0; i < kTile; ++i) x[i] = i < count ? load(reinterpret_cast<const float*>(rows[i] + d)) : Floats{};
    store_transposed(x, q);
  }
}

// Copies the keys and values of a block's positions to the buffers, and writes zeros for the missing positions.
void gather_block(const Rows<uint16_t>& rows, int64_t dims, const NextBlock& next, const Buffers& b) {
  const int count = rows.count;
  for (int i = 0; i < kBlock; ++i) {
    next.prefetch_key(i);
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
      store_transposed(x, to);
    }
  }
}

// The positions of a block that each of 16 rows sees: [begin, end). With `all` every row sees every position.
struct Seen {
  alignas(64) int32_t begin[kTile], end[kTile];
  bool nothing = true, all = true;  // whether no row sees any position; whether every row sees every position
};

// Returns the larger number of each lane, and y where x is NaN.
inline Floats larger(Floats x, Floats y) { return (Floats)_mm512_max_ps((__m512)x, (__m512)y); }

// Returns 2^x for x <= 0 with a relative error of 2e-7, by a polynomial on [-1/2, 1/2] and the exponent.
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

// Returns the numbers of two vectors rounded to bfloat16, in pairs of one number from each vector.
inline Bits round_to_pairs(Floats first, Floats second) {
  alignas(64) static constexpr uint16_t kOrder[2 * LANES] = {0,  16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                             8,  24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
  return (Bits)_mm512_permutexvar_epi16(_mm512_load_si512(kOrder), both);
}

// Computes weights from scores, relative to each row's new maximum, and returns the factors for the sums of earlier blocks.
// With `Exact` a weight is stored as two bfloat16 numbers: its upper half, and the remainder. Otherwise it is rounded to one.
template <bool Exact>
Floats soften_columns(float* scores, uint32_t* to, const Seen& seen, float scale, float* top, float* total) {
  const Floats before = load(top);
  Floats tops[kChains] = {before, before, before, before};
  for (int i = 0; i < kBlock; ++i) {
    Floats x = load(scores + i * kTile) * scale;
    if (!seen.all) {
      const __m512i at = _mm512_set1_epi32(i), begin = _mm512_load_si512(seen.begin), end = _mm512_load_si512(seen.end);
      const __mmask16 visible = _mm512_cmple_epi32_mask(begin, at) & _mm512_cmplt_epi32_mask(at, end);
      x = (Floats)_mm512_mask_blend_ps(visible, (__m512)splat(kUnseen), (__m512)x);
      store(scores + i * kTile, x);
    }
    tops[i % kChains] = larger(x, tops[i % kChains]);
  }
  const Floats best = larger(larger(tops[0], tops[1]), larger(tops[2], tops[3]));
  const Floats decay = power(before - best);
  if (!seen.all) scale = 1.0f;  // the stored scores are already scaled
  Floats sums[2] = {load(total) * decay, Floats{}};
  const auto put = [](uint32_t* pairs, Bits both) { memcpy(pairs, &both, sizeof(both)); };
  const auto upper_halves = [](Floats first, Floats second) { return (Bits)first >> 16 | ((Bits)second & 0xffff0000u); };
  for (int i = 0; i < kBlock; i += 2, to += kTile) {
    if (i == kStep) to += kWords;  // skip the remainders of the first step
    Floats weights[2];
    for (int j = 0; j < 2; ++j) {
      weights[j] = power(load(scores + (i + j) * kTile) * scale - best);
      sums[j] += weights[j];
    }
    if constexpr (Exact) {
      const auto remainder = [](Floats x) { return x - (Floats)((Bits)x & 0xffff0000u); };
      put(to, upper_halves(weights[0], weights[1]));
      put(to + kWords, upper_halves(remainder(weights[0]), remainder(weights[1])));
    } else {
      put(to, round_to_pairs(weights[0], weights[1]));
    }
  }
  store(top, best);
  store(total, sums[0] + sums[1]);
  return decay;
}

// Returns the positions that rows [row, row + 16) of the tile see in the block of `count` positions from `position` on.
Seen seen_by(const Attention& a, const Tile& t, int64_t row, int64_t position, int count) {
  Seen seen;
  const int64_t last = t.length * a.groups - 1;
  const auto query_of = [&](int64_t i) {  // the position of row `row + i`, relative to the block
    return t.start + (row + i < last ? row + i : last) / a.groups - position;
  };
  if (count == kBlock && query_of(0) + 1 >= kBlock && query_of(kTile - 1) + 1 <= a.window) {
    seen.nothing = false;
    return seen;
  }
  seen.all = false;
  for (int i = 0; i < kTile; ++i) {
    const int64_t query = query_of(i);
    const int64_t begin = query + 1 > a.window ? query + 1 - a.window : 0;
    seen.begin[i] = (int32_t)(begin < kBlock ? begin : kBlock);
    seen.end[i] = (int32_t)(query + 1 < 0 ? 0 : query + 1 < count ? query + 1 : count);
    if (seen.begin[i] < seen.end[i]) seen.nothing = false;
  }
  return seen;
}

// Divides the columns of up to 16 rows by their totals, and writes them as rows bfloat16[D].
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

// Adds a block of `count` positions from `position` on to the outputs of N tiles of 16 rows, from row 16 * `tile` on.
template <typename Unit, int N>
void attend_block(const Attention& a, const Tile& t, const Buffers& b, int64_t tile, int64_t position, int count, float scale) {
  const int64_t dims = a.head_dim;
  float* const out = b.out + tile * kTile * dims;
  Seen seen[N];
  bool nothing = true;
  for (int n = 0; n < N; ++n) {
    seen[n] = seen_by(a, t, (tile + n) * kTile, position, count);
    nothing = nothing && seen[n].nothing;
  }
  if (nothing) return;
  Unit::template multiply_keys<N>(b, b.q + tile * kTile * dims / 2, dims);
  for (int64_t n = 0; n < N; ++n) {
    const int64_t row = (tile + n) * kTile;
    const Floats decay = soften_columns<Unit::kExact>(b.scores + n * kScores, b.weights + n * kWeights, seen[n], scale, b.top + row,
                                                      b.total + row);
    if (!_mm512_cmp_ps_mask((__m512)decay, _mm512_set1_ps(1.0f), _CMP_NEQ_UQ)) continue;
    for (float* x = out + n * kTile * dims; x < out + (n + 1) * kTile * dims; x += kTile) store(x, load(x) * decay);
  }
  Unit::template add_values<N>(b, (count + kStep - 1) / kStep, dims, out);
}

// Computes attention of a tile by a `Unit`, which has multiply_keys (scores = keys * queries) and add_values (out += values *
// weights) for up to kTiles tiles of 16 columns. The unit is set up by its constructor and released by its destructor.
template <typename Unit>
void attend_columns(const Attention& a, const Tile& t, const Tile* after, float* scratch) {
  const int64_t rows = t.length * a.groups, dims = a.head_dim, row_tiles = (rows + kTile - 1) / kTile;
  const Buffers b = lay_out(scratch, dims, row_tiles);
  const int64_t stride = a.kv_heads * a.groups * dims;  // between tokens in q and out
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
  const float scale = a.scale * kLog2E;  // because weights are computed as powers of 2
  for (Blocks<uint16_t> blocks(a, t, after); blocks.more(); blocks.advance()) {
    const int count = blocks.rows().count;
    gather_block(blocks.rows(), dims, blocks.next(), b);
    blocks.next().prefetch_values();
    int64_t tile = 0;
    for (; tile + Unit::kTiles <= row_tiles; tile += Unit::kTiles) {
      attend_block<Unit, Unit::kTiles>(a, t, b, tile, blocks.position, count, scale);
    }
    if (tile < row_tiles) attend_block<Unit, 1>(a, t, b, tile, blocks.position, count, scale);
  }

  for (int64_t tile = 0; tile < row_tiles; ++tile) {
    uint16_t* out[kTile] = {};
    for (int i = 0; i < count_of(tile); ++i) out[i] = static_cast<uint16_t*>(a.out) + offset(tile * kTile + i);
    write_rows(b.out + tile * kTile * dims, b.total + tile * kTile, count_of(tile), dims, out);
  }
}

}  // namespace
}  // namespace jaxserve
