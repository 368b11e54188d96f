// Attention over int8 pages on AVX512-VNNI, which multiplies codes as bytes, four in a lane.
//
// The context is read block by block, as in attention.cc. The numbers of a query row are rounded to 16-bit integers, in units of
// 1/32512 of the largest, and the weights of a row in a block to units of 1/65535 of the largest. These errors are small compared
// with the rounding of outputs to bfloat16. Each integer is split into its upper and its lower byte. Each byte is multiplied by the
// codes of a block in integers, and only the sums are converted to float32. Keys are transposed in words of 4 dimensions, and
// values are interleaved to words of 4 positions.

#include "attention.h"

#if defined(__x86_64__)

#include <immintrin.h>

#include "softmax.h"

namespace jaxserve {
namespace {

constexpr int kRows = 6;   // maximum number of query rows in registers
constexpr int kWord = 4;   // codes of a lane
constexpr int kStep = 64;  // codes of a vector; rows are padded to a multiple of it
constexpr float kMaxInteger = 32512.0f;  // so that the upper byte does not overflow when the lower one is negative
constexpr float kMaxWeight = 65535.0f;

// The buffers of one tile and kv head. E is the padded head_dim.
struct Buffers {
  int64_t dims;      // E
  uint32_t* keys;    // [E / 4, kBlock]: 4 dimensions of a position, each a code + 128
  uint32_t* values;  // [kBlock / 4, E]: 4 positions of a dimension, in the order of `interleave`
  float* scores;     // [kRows, kBlock]
  uint8_t* weights;  // [kRows, 2, kBlock]: upper and lower bytes
  float *decay, *unit;  // [kRows]: factor for the sums of earlier blocks; unit of the integer weights
  Scales scales;
  uint32_t* q;     // [rows, 2, E / 4]: upper and lower bytes, signed
  int32_t* start;  // [rows, 2]: start of a sum of products, which corrects for the 128 that is added to codes
  float *out, *total, *scale, *top;  // [rows, E], [rows, LANES], [rows], [rows]
};

Buffers lay_out(float* at, int64_t dims, int64_t rows) {
  Pieces pieces = {at};
  Buffers b;
  b.dims = dims;
  b.keys = reinterpret_cast<uint32_t*>(pieces.take(dims / kWord * kBlock));
  b.values = reinterpret_cast<uint32_t*>(pieces.take(kBlock / kWord * dims));
  b.scores = pieces.take(kRows * kBlock);
  b.weights = reinterpret_cast<uint8_t*>(pieces.take(kRows * 2 * kBlock / kWord));
  b.decay = pieces.take(LANES);  // kRows floats, rounded up to a cache line
  b.unit = pieces.take(LANES);
  b.scales = {pieces.take(kBlock), pieces.take(kBlock)};
  b.q = reinterpret_cast<uint32_t*>(pieces.take(rows * 2 * dims / kWord));
  b.out = pieces.take(rows * dims);
  b.total = pieces.take(rows * LANES);
  b.start = reinterpret_cast<int32_t*>(pieces.take(rows * 2));
  b.scale = pieces.take(rows);
  b.top = pieces.take(rows);
  return b;
}

// Writes a query row bfloat16[D] as integers. A number that is not finite makes the row's scale NaN.
void pack_query(const Buffers& b, int64_t row, const uint16_t* q, int64_t dims, float scale) {
  __m512i largest = _mm512_setzero_si512();
  for (int64_t d = 0; d < dims; d += LANES) {
    const __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(q + d)));
    largest = _mm512_max_epi32(largest, _mm512_and_si512(bits, _mm512_set1_epi32(0x7fff)));
  }
  const int32_t top = _mm512_reduce_max_epi32(largest) << 16;
  float largest_number;
  memcpy(&largest_number, &top, sizeof(largest_number));
  b.scale[row] = top < 0x7f800000 ? largest_number * scale / kMaxInteger : __builtin_nanf("");
  const __m512 factor = _mm512_set1_ps(largest_number > 1e-30f ? kMaxInteger / largest_number : 0.0f);  // the quotient of smaller numbers would overflow
  auto* upper = reinterpret_cast<uint8_t*>(b.q + row * 2 * b.dims / kWord);
  memset(upper, 0, 2 * b.dims);
  __m512i sums[2] = {};
  for (int64_t d = 0; d < dims; d += LANES) {
    const __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(q + d)));
    const __m512 x = _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
    const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(x, factor));
    const __m512i low = _mm512_srai_epi32(_mm512_slli_epi32(whole, 24), 24);
    const __m512i high = _mm512_srai_epi32(_mm512_sub_epi32(whole, low), 8);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(upper + d), _mm512_cvtepi32_epi8(high));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(upper + b.dims + d), _mm512_cvtepi32_epi8(low));
    sums[0] = _mm512_add_epi32(sums[0], high);
    sums[1] = _mm512_add_epi32(sums[1], low);
  }
  for (int p = 0; p < 2; ++p) b.start[row * 2 + p] = -128 * _mm512_reduce_add_epi32(sums[p]);
}

inline __m512i load_codes(const int8_t* p, int64_t left) {
  return left >= kStep ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi8((1ull << left) - 1, p);
}

// Writes LANES rows of keys int8[D] as columns of `keys` [E / 4, kBlock].
void transpose_keys(const int8_t* const* rows, int64_t dims, uint32_t* keys) {
  for (int64_t d = 0; d < dims; d += kStep) {
    Floats x[LANES];
    for (int i = 0; i < LANES; ++i) x[i] = (Floats)load_codes(rows[i] + d, dims - d);
    transpose(x);
    for (int i = 0; i < LANES; ++i) {
      const Bits word = (Bits)x[i] ^ 0x80808080u;
      memcpy(keys + (d / kWord + i) * kBlock, &word, sizeof(word));
    }
  }
}

// Interleaves four rows of values int8[D] to words [E]. Of every 64 dimensions, vector j has the dimensions 4 * j to 4 * j + 3 of
// each run of 16.
void interleave(const int8_t* const* rows, int64_t dims, uint32_t* values) {
  for (int64_t d = 0; d < dims; d += kStep) {
    __m512i x[kWord];
    for (int i = 0; i < kWord; ++i) x[i] = load_codes(rows[i] + d, dims - d);
    const __m512i low[2] = {_mm512_unpacklo_epi8(x[0], x[1]), _mm512_unpacklo_epi8(x[2], x[3])};
    const __m512i high[2] = {_mm512_unpackhi_epi8(x[0], x[1]), _mm512_unpackhi_epi8(x[2], x[3])};
    _mm512_storeu_si512(values + d, _mm512_unpacklo_epi16(low[0], low[1]));
    _mm512_storeu_si512(values + d + 16, _mm512_unpackhi_epi16(low[0], low[1]));
    _mm512_storeu_si512(values + d + 32, _mm512_unpacklo_epi16(high[0], high[1]));
    _mm512_storeu_si512(values + d + 48, _mm512_unpackhi_epi16(high[0], high[1]));
  }
}

// Divides the sums of E dimensions, in the order of `interleave`, by `total`, and writes them as bfloat16[D].
void write_row(const float* sums, float total, int64_t dims, uint16_t* out) {
  for (int64_t d = 0; d < dims; d += kStep) {
    float x[kStep];
    for (int j = 0; j < 4; ++j) {
      for (int lane = 0; lane < 4; ++lane) memcpy(x + lane * 16 + j * 4, sums + d + j * 16 + lane * 4, 16);
    }
    for (int64_t i = 0; i < kStep && d + i < dims; i += LANES) {
      const Bits bits = round_to_bfloat16(load(x + i) / total) >> 16;
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + d + i), _mm512_cvtepi32_epi16((__m512i)bits));
    }
  }
}

// Copies a block's keys and values to the buffers. Later positions of the buffers hold stale data, which must be masked or weighted
// by 0.
void gather_block(const Rows<int8_t>& rows, int64_t head_dim, const NextBlock& next, const Buffers& b) {
  for (int i = 0; i < rows.count; i += LANES) transpose_keys(rows.keys + i, head_dim, b.keys + i);
  for (int i = 0; i < rows.count; i += kWord) {
    for (int j = i; j < i + kWord; ++j) next.prefetch_key(j);
    interleave(rows.values + i, head_dim, b.values + i / kWord * b.dims);
  }
  for (int i = 0; i < kBlock; ++i) {
    memcpy(b.scales.keys + i, rows.keys[i] + head_dim, sizeof(float));
    memcpy(b.scales.values + i, rows.values[i] + head_dim, sizeof(float));
  }
}

// sum += x * y in lanes of 4 bytes, x unsigned and y signed. With the intrinsic, GCC 12 copies every sum needlessly.
inline void add_products(__m512i& sum, __m512i x, __m512i y) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(y));
}

// Returns the sum of products with integers, from the sums with their upper and their lower bytes.
inline __m512 join(__m512i upper, __m512i lower) {
  return _mm512_fmadd_ps(_mm512_cvtepi32_ps(upper), _mm512_set1_ps(256.0f), _mm512_cvtepi32_ps(lower));
}

// scores[R, kBlock] = q[R, E] * keys[E, kBlock], without the keys' scales.
template <int R>
void multiply_keys(const Buffers& b, int64_t row) {
  constexpr int C = R > 3 ? 2 : 4;  // vectors of a row; at largest_number 24 sums in registers
  const int64_t words = b.dims / kWord;
  const uint32_t* q = b.q + row * 2 * words;
  for (int c = 0; c < kVectors; c += C) {
    __m512i sums[R][2][C];
    for (int r = 0; r < R; ++r) {
      for (int p = 0; p < 2; ++p) {
        for (int j = 0; j < C; ++j) sums[r][p][j] = _mm512_set1_epi32(b.start[(row + r) * 2 + p]);
      }
    }
    for (int64_t w = 0; w < words; ++w) {
      __m512i key[C];
      for (int j = 0; j < C; ++j) key[j] = _mm512_loadu_si512(b.keys + w * kBlock + (c + j) * LANES);
      for (int r = 0; r < R; ++r) {
        for (int p = 0; p < 2; ++p) {
          const __m512i x = _mm512_set1_epi32((int32_t)q[(r * 2 + p) * words + w]);
          for (int j = 0; j < C; ++j) add_products(sums[r][p][j], key[j], x);
        }
      }
    }
    for (int r = 0; r < R; ++r) {
      const __m512 scale = _mm512_set1_ps(b.scale[row + r]);
      for (int j = 0; j < C; ++j) {
        const __m512 score = _mm512_mul_ps(join(sums[r][0][j], sums[r][1][j]), scale);
        _mm512_storeu_ps(b.scores + r * kBlock + (c + j) * LANES, score);
      }
    }
  }
}

// Writes the weights of a row, which are in `scores`, as integers. `poison` is 0, or NaN if a value is not finite, and makes the
// unit of the weights NaN.
void pack_weights(const Buffers& b, int r, float poison) {
  const float* weights = b.scores + r * kBlock;
  Floats best = {};
  for (int j = 0; j < kVectors; ++j) {
    const Floats x = load(weights + j * LANES);
    best = x > best ? x : best;
  }
  const float largest_number = max_lane(best);
  b.unit[r] = largest_number / kMaxWeight + poison;
  const __m512 factor = _mm512_set1_ps(largest_number > 1e-30f ? kMaxWeight / largest_number : 0.0f);
  uint8_t* upper = b.weights + r * 2 * kBlock;
  for (int j = 0; j < kVectors; ++j) {
    const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps((__m512)load(weights + j * LANES), factor));
    const auto put = [&](uint8_t* to, __m512i x) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + j * LANES), _mm512_cvtepi32_epi8(x));
    };
    put(upper, _mm512_srli_epi32(whole, 8));
    put(upper + kBlock, whole);
  }
}

// out[R, E] = out * decay[R] + weights[R, count] * values[count, E]
template <int R>
void multiply_values(const Buffers& b, int64_t row, int count) {
  constexpr int C = R > 3 ? 2 : 4;
  for (int64_t d = 0; d < b.dims; d += C * LANES) {
    __m512i sums[R][2][C] = {};
    for (int i = 0; i < count; i += kWord) {
      __m512i value[C];
      for (int j = 0; j < C; ++j) value[j] = _mm512_loadu_si512(b.values + i / kWord * b.dims + d + j * LANES);
      for (int r = 0; r < R; ++r) {
        for (int p = 0; p < 2; ++p) {
          int32_t word;
          memcpy(&word, b.weights + (r * 2 + p) * kBlock + i, sizeof(word));
          const __m512i x = _mm512_set1_epi32(word);
          for (int j = 0; j < C; ++j) add_products(sums[r][p][j], x, value[j]);
        }
      }
    }
    for (int r = 0; r < R; ++r) {
      const __m512 decay = _mm512_set1_ps(b.decay[r]), unit = _mm512_set1_ps(b.unit[r]);
      float* out = b.out + (row + r) * b.dims + d;
      for (int j = 0; j < C; ++j) {
        const __m512 before = _mm512_mul_ps(_mm512_loadu_ps(out + j * LANES), decay);
        _mm512_storeu_ps(out + j * LANES, _mm512_fmadd_ps(join(sums[r][0][j], sums[r][1][j]), unit, before));
      }
    }
  }
}

// Adds a block of `count` positions from `position` on to the outputs of R query rows. Row r of the tile belongs to token
// r / groups.
template <int R>
void attend_rows(const Attention& a, const Tile& t, int64_t row, int64_t position, int count, float poison,
                 const Buffers& b) {
  const int64_t last_seen = t.start + (row + R - 1) / a.groups;
  const int64_t first_seen = t.start + row / a.groups + 1 - a.window;
  if (last_seen < position || first_seen >= position + count) return;
  multiply_keys<R>(b, row);
  for (int r = 0; r < R; ++r) {
    const int64_t query = t.start + (row + r) / a.groups - position;  // relative to the block
    const int64_t begin = query + 1 > a.window ? query + 1 - a.window : 0;
    const int64_t end = query + 1 < count ? query + 1 : count;
    float* total = b.total + (row + r) * LANES;
    b.decay[r] = soften<true>(b.scores + r * kBlock, begin, end, b.top + row + r, total, b.scales);
    pack_weights(b, r, poison);
  }
  multiply_values<R>(b, row, count);
}

void attend_row_group(int rows, const Attention& a, const Tile& t, int64_t row, int64_t position, int count,
                      float poison, const Buffers& b) {
  switch (rows) {
    case 1: return attend_rows<1>(a, t, row, position, count, poison, b);
    case 2: return attend_rows<2>(a, t, row, position, count, poison, b);
    case 3: return attend_rows<3>(a, t, row, position, count, poison, b);
    case 4: return attend_rows<4>(a, t, row, position, count, poison, b);
    case 5: return attend_rows<5>(a, t, row, position, count, poison, b);
    default: return attend_rows<kRows>(a, t, row, position, count, poison, b);
  }
}

}  // namespace

void attend_vnni(const Attention& a, const Tile& t, const Tile* after, float* scratch) {
  const int64_t rows = t.length * a.groups, dims = a.head_dim;
  const Buffers b = lay_out(scratch, (dims + kStep - 1) / kStep * kStep, rows);
  const int64_t stride = a.kv_heads * a.groups * dims;  // between tokens in q and out
  const int64_t origin = t.row * stride + t.head * a.groups * dims;
  for (int64_t r = 0; r < rows; ++r) {
    const auto* q = static_cast<const uint16_t*>(a.q) + origin + r / a.groups * stride + r % a.groups * dims;
    pack_query(b, r, q, dims, a.scale * kLog2E);  // because weights are computed as powers of 2
    b.top[r] = -__builtin_inff();
  }
  memset(b.out, 0, (size_t)(rows * (b.dims + LANES)) * sizeof(float));  // clears b.total too

  const int64_t passes = (rows + kRows - 1) / kRows, height = (rows + passes - 1) / passes;
  for (Blocks<int8_t> blocks(a, t, after); blocks.more(); blocks.advance()) {
    const int count = blocks.rows().count;
    gather_block(blocks.rows(), dims, blocks.next(), b);
    blocks.next().prefetch_values();
    Floats poison = {};
    for (int j = 0; j < kVectors; ++j) poison += load(b.scales.values + j * LANES) * 0.0f;
    for (int64_t row = 0; row < rows; row += height) {
      const int some = (int)(rows - row < height ? rows - row : height);
      attend_row_group(some, a, t, row, blocks.position, count, sum(poison), b);
    }
  }

  for (int64_t r = 0; r < rows; ++r) {
    auto* out = static_cast<uint16_t*>(a.out) + origin + r / a.groups * stride + r % a.groups * dims;
    write_row(b.out + r * b.dims, sum(load(b.total + r * LANES)), dims, out);
  }
}

}  // namespace jaxserve

#endif
