// Flash attention of decode rows on AVX512-BF16 and on AVX2, for bfloat16 queries and pools. head_dim is a multiple of two vectors
// of floats.
//
// A decode row has few query rows for each key, so that transposing keys would take longer than the products. Instead keys are
// multiplied as they are stored, and the lanes of LANES products are summed together. AVX512-BF16 multiplies pairs of numbers. On
// AVX2 keys are widened in registers, once for all query rows. If many query rows share a kv head, AVX-512 transposes the words of
// four keys within quarters of a vector, once for all query rows, so that fewer lanes have to be summed. Products of bfloat16
// numbers are exact, and sums are in float32. Values are widened in registers, once for up to kRows query rows.

#if defined(__x86_64__)

#include "attention.h"

#include <immintrin.h>

#include "softmax.h"

#if LANES == 16
#define ATTEND attend_decode_avx512
#else
#define ATTEND attend_decode_avx2
#endif

namespace jaxserve {
namespace {

constexpr int kRows = LANES == 16 ? 8 : 6;  // maximum number of query rows that share loaded keys and values
constexpr int kPair = 2 * LANES;
constexpr int kFew = 4;       // maximum number of query rows for which keys are not transposed
constexpr int kQuarters = 4;  // of a vector of 16 words
constexpr int kTransposed = kQuarters * LANES;  // words for 32 numbers of a query row, as `spread_queries` writes them

struct Scratch {
  float *q;  // AVX2: [rows, D] in the order of pairs; AVX-512: the output of `spread_queries` for each pass over the rows
  float *quarters;  // [kQuarters, kRows, LANES]: sums of four keys
  float *scores, *decay, *out, *total, *top;
};

// Returns the sum of the lanes of vector i in lane i. Each step adds halves of two vectors.
template <int S, size_t... I>
inline Floats add_lanes(Floats (&x)[LANES], std::index_sequence<I...> lanes) {
  for (int i = 0; i < S; ++i) {
    const Floats a = x[i], b = x[i + S];
    x[i] = SHUFFLE(a, b, (int32_t)(I & S ? LANES + I : I)...) + SHUFFLE(a, b, (int32_t)(I & S ? LANES + (I ^ S) : I ^ S)...);
  }
  if constexpr (S > 1) {
    return add_lanes<S / 2>(x, lanes);
  } else {
    return x[0];
  }
}

// Prefetches `count` numbers of `row` from `d` on. All entries of a block's rows are valid unless the block is empty (`Rows`).
__attribute__((always_inline)) inline void prefetch(const void* row, int64_t d, int64_t count) {
  for (int64_t n = 0; n < count; n += 32) __builtin_prefetch(static_cast<const uint16_t*>(row) + d + n);
}

// The functions multiply_keys compute scores[R, kBlock] of query rows [R, D] and a block's keys. With `prefetch_next` they prefetch
// the keys of the next block.
#if LANES == 16
inline __m512bh load_numbers(const uint16_t* p) { return (__m512bh)_mm512_loadu_si512(p); }

// Computes the scores of one query row [32 * V], which stays in registers.
template <int V, bool prefetch_next>
void multiply_keys(const Rows<uint16_t>& rows, const NextBlock& next, const uint16_t* q, float scale, float* scores) {
  __m512bh query[V];
  for (int v = 0; v < V; ++v) query[v] = load_numbers(q + v * kPair);
  for (int t = 0; t < rows.count; t += LANES) {
    Floats sums[LANES];
    for (int i = 0; i < LANES; ++i) {
      if constexpr (prefetch_next) prefetch(next.keys[t + i], 0, V * kPair);
      __m512 sum = _mm512_setzero_ps();
      for (int v = 0; v < V; ++v) sum = _mm512_dpbf16_ps(sum, load_numbers(rows.keys[t + i] + v * kPair), query[v]);
      sums[i] = (Floats)sum;
    }
    store(scores + t, add_lanes<LANES / 2>(sums, std::make_index_sequence<LANES>()) * scale);
  }
}

template <bool prefetch_next>
void multiply_keys(
    const Rows<uint16_t>& rows, const NextBlock& next, int64_t dims, const uint16_t* q, float scale, float* scores) {
  switch (dims / kPair) {
    case 1: return multiply_keys<1, prefetch_next>(rows, next, q, scale, scores);
    case 2: return multiply_keys<2, prefetch_next>(rows, next, q, scale, scores);
    case 3: return multiply_keys<3, prefetch_next>(rows, next, q, scale, scores);
    case 4: return multiply_keys<4, prefetch_next>(rows, next, q, scale, scores);
    case 5: return multiply_keys<5, prefetch_next>(rows, next, q, scale, scores);
    case 6: return multiply_keys<6, prefetch_next>(rows, next, q, scale, scores);
    case 7: return multiply_keys<7, prefetch_next>(rows, next, q, scale, scores);
    default: return multiply_keys<8, prefetch_next>(rows, next, q, scale, scores);
  }
}

inline __m512i load_words(const void* p) { return _mm512_loadu_si512(p); }

// Writes the query rows [rows, D] of a pass to [D / kPair, kRows][4, 16]. Vector i has the quarter's word i in all lanes of each
// quarter.
void spread_queries(const uint16_t* q, int64_t rows, int64_t dims, float* to) {
  for (int64_t d = 0; d < dims; d += kPair, to += kRows * kTransposed) {
    for (int64_t r = 0; r < rows; ++r) {
      const __m512i x = load_words(q + r * dims + d);
      float* const words = to + r * kTransposed;
      _mm512_storeu_si512(words, _mm512_shuffle_epi32(x, (_MM_PERM_ENUM)0x00));
      _mm512_storeu_si512(words + LANES, _mm512_shuffle_epi32(x, (_MM_PERM_ENUM)0x55));
      _mm512_storeu_si512(words + 2 * LANES, _mm512_shuffle_epi32(x, (_MM_PERM_ENUM)0xaa));
      _mm512_storeu_si512(words + 3 * LANES, _mm512_shuffle_epi32(x, (_MM_PERM_ENUM)0xff));
    }
  }
}

// Transposes the words of four keys within quarters: vector i gets word i of each quarter, with one key in each lane of a quarter.
inline void transpose_quarters(__m512i (&x)[kQuarters]) {
  const __m512i low[2] = {_mm512_unpacklo_epi32(x[0], x[1]), _mm512_unpacklo_epi32(x[2], x[3])};
  const __m512i high[2] = {_mm512_unpackhi_epi32(x[0], x[1]), _mm512_unpackhi_epi32(x[2], x[3])};
  x[0] = _mm512_unpacklo_epi64(low[0], low[1]);
  x[1] = _mm512_unpackhi_epi64(low[0], low[1]);
  x[2] = _mm512_unpacklo_epi64(high[0], high[1]);
  x[3] = _mm512_unpackhi_epi64(high[0], high[1]);
}

// Returns the sum of the quarters of vector i in quarter i.
inline __m512 add_quarters(const __m512 (&x)[kQuarters]) {
  const auto add = [](__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  };
  return add(add(x[0], x[1]), add(x[2], x[3]));
}

// Computes the scores of R query rows by transposed keys. `quarters` is scratch memory.
template <int R, bool prefetch_next>
void multiply_transposed_keys(const Rows<uint16_t>& rows, const NextBlock& next, int64_t dims, const float* q, float scale, float* quarters,
                          float* scores) {
  for (int t = 0; t < rows.count; t += LANES) {
    for (int g = 0; g < kQuarters; ++g) {
      const int first = t + g * kQuarters;
      __m512 sums[R] = {};
      const float* queries = q;
      for (int64_t d = 0; d < dims; d += kPair, queries += kRows * kTransposed) {
        __m512i x[kQuarters];
        for (int i = 0; i < kQuarters; ++i) {
          x[i] = load_words(rows.keys[first + i] + d);
          if constexpr (prefetch_next) prefetch(next.keys[first + i], d, kPair);
        }
        transpose_quarters(x);
        for (int i = 0; i < kQuarters; ++i) {
          for (int r = 0; r < R; ++r) {
            const __m512i query = load_words(queries + r * kTransposed + i * LANES);
            sums[r] = _mm512_dpbf16_ps(sums[r], (__m512bh)x[i], (__m512bh)query);
          }
        }
      }
      for (int r = 0; r < R; ++r) _mm512_storeu_ps(quarters + (g * kRows + r) * LANES, sums[r]);
    }
    for (int r = 0; r < R; ++r) {
      __m512 x[kQuarters];
      for (int g = 0; g < kQuarters; ++g) x[g] = _mm512_loadu_ps(quarters + (g * kRows + r) * LANES);
      store(scores + r * kBlock + t, (Floats)add_quarters(x) * scale);
    }
  }
}

template <int R, bool prefetch_next>
void multiply_keys(const Rows<uint16_t>& rows, const NextBlock& next, int64_t dims, const uint16_t* q, const float* spread, float scale,
                   const Scratch& s) {
  if constexpr (R > kFew) {
    multiply_transposed_keys<R, prefetch_next>(rows, next, dims, spread, scale, s.quarters, s.scores);
  } else {
    multiply_keys<prefetch_next>(rows, next, dims, q, scale, s.scores);
    for (int r = 1; r < R; ++r) multiply_keys<false>(rows, next, dims, q + r * dims, scale, s.scores + r * kBlock);
  }
}
#else
template <int R, bool prefetch_next>
void multiply_keys(const Rows<uint16_t>& rows, const NextBlock& next, int64_t dims, const uint16_t*, const float* q, float scale,
                   const Scratch& s) {
  for (int t = 0; t < rows.count; t += LANES) {
    Floats sums[R][LANES];
    for (int i = 0; i < LANES; ++i) {
      if constexpr (prefetch_next) prefetch(next.keys[t + i], 0, dims);
      Floats some[R] = {};
      for (int64_t d = 0; d < dims; d += kPair) {
        const Pair key = load_pair(rows.keys[t + i] + d);
        for (int r = 0; r < R; ++r) {
          const Pair query = load_pair(q + r * dims + d);
          some[r] += key.first * query.first;
          some[r] += key.second * query.second;
        }
      }
      for (int r = 0; r < R; ++r) sums[r][i] = some[r];
    }
    for (int r = 0; r < R; ++r) {
      store(s.scores + r * kBlock + t, add_lanes<LANES / 2>(sums[r], std::make_index_sequence<LANES>()) * scale);
    }
  }
}
#endif

// out[R, C pairs of vectors] = out * decay[R] + weights[R, count] * values[count, C pairs of vectors], from dimension d on.
template <int R, int C, bool prefetch_next>
void multiply_values(
    const Rows<uint16_t>& rows, const NextBlock& next, int64_t d, int64_t dims, const Scratch& s, float* out) {
  Pair sums[R][C];
  for (int r = 0; r < R; ++r) {
    for (int j = 0; j < C; ++j) {
      const Pair before = load_pair(out + r * dims + d + j * kPair);
      sums[r][j] = {before.first * s.decay[r], before.second * s.decay[r]};
    }
  }
  for (int t = 0; t < rows.count; ++t) {
    if constexpr (prefetch_next) prefetch(next.values[t], d, C * kPair);
    Pair value[C];
    for (int j = 0; j < C; ++j) value[j] = load_pair(rows.values[t] + d + j * kPair);
    for (int r = 0; r < R; ++r) {
      const float weight = s.scores[r * kBlock + t];
      for (int j = 0; j < C; ++j) sums[r][j].first += value[j].first * weight, sums[r][j].second += value[j].second * weight;
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int j = 0; j < C; ++j) store_pair(out + r * dims + d + j * kPair, sums[r][j]);
  }
}

template <int R, bool prefetch_next>
void multiply_values(const Rows<uint16_t>& rows, const NextBlock& next, int64_t dims, const Scratch& s, float* out) {
  constexpr int kColumns = R <= (LANES == 16 ? 6 : 3) ? 2 : 1;  // at most 24 sums in registers on AVX-512, 12 on AVX2
  int64_t d = 0;
  for (; d + kColumns * kPair <= dims; d += kColumns * kPair) {
    multiply_values<R, kColumns, prefetch_next>(rows, next, d, dims, s, out);
  }
  if (d < dims) multiply_values<R, 1, prefetch_next>(rows, next, d, dims, s, out);
}

// Adds a block to the outputs of R query rows: scores, weights, and the weighted sum of values.
template <int R, bool prefetch_next>
void attend_rows(const Rows<uint16_t>& rows, const NextBlock& next, int64_t dims, const uint16_t* q, const float* packed, int64_t row,
                 float scale, const Scratch& s) {
  multiply_keys<R, prefetch_next>(rows, next, dims, q, packed, scale, s);
  for (int r = 0; r < R; ++r) {
    s.decay[r] = soften<false>(s.scores + r * kBlock, 0, rows.count, s.top + row + r, s.total + (row + r) * LANES, {});
  }
  multiply_values<R, prefetch_next>(rows, next, dims, s, s.out + row * dims);
}

using AttendRows = decltype(&attend_rows<1, false>);

template <bool prefetch_next>
AttendRows attend_some(int rows) {
  constexpr AttendRows some[kRows] = {attend_rows<1, prefetch_next>, attend_rows<2, prefetch_next>, attend_rows<3, prefetch_next>,
                                      attend_rows<4, prefetch_next>, attend_rows<5, prefetch_next>, attend_rows<6, prefetch_next>,
#if LANES == 16
                                      attend_rows<7, prefetch_next>, attend_rows<8, prefetch_next>,
#endif
  };
  return some[rows - 1];
}

}  // namespace

void ATTEND(const Attention& a, const Tile& t, const Tile* after, float* scratch) {
  const int64_t dims = a.head_dim, groups = a.groups, origin = (t.row * a.kv_heads + t.head) * groups * dims;
  const auto* q = static_cast<const uint16_t*>(a.q) + origin;
  const float scale = a.scale * kLog2E;  // because weights are computed as powers of 2
  const int64_t passes = (groups + kRows - 1) / kRows, height = (groups + passes - 1) / passes;
  const auto rows_of = [&](int64_t pass) { return groups - pass * height < height ? groups - pass * height : height; };
#if LANES == 16
  const int64_t pass_floats = dims / kPair * kRows * kTransposed;
#else
  const int64_t pass_floats = height * dims;
#endif
  Pieces pieces = {scratch};
  Scratch s;
  s.q = pieces.take(passes * pass_floats);
  s.quarters = pieces.take(kQuarters * kRows * LANES);
  s.scores = pieces.take(kRows * kBlock);
  s.decay = pieces.take(LANES);
  s.out = pieces.take(groups * dims);
  s.total = pieces.take(groups * LANES);
  s.top = pieces.take(groups);
  memset(s.out, 0, (size_t)(groups * (dims + LANES)) * sizeof(float));  // clears s.total too
  for (int64_t r = 0; r < groups; ++r) s.top[r] = -__builtin_inff();
  for (int64_t i = 0; i < passes; ++i) {
    const uint16_t* const of_pass = q + i * height * dims;
    float* const to = s.q + i * pass_floats;
#if LANES == 16
    if (rows_of(i) > kFew) spread_queries(of_pass, rows_of(i), dims, to);
#else
    for (int64_t d = 0; d < rows_of(i) * dims; d += kPair) store_pair(to + d, load_pair(of_pass + d));
#endif
  }

  for (Blocks<uint16_t> blocks(a, t, after); blocks.more(); blocks.advance()) {
    const NextBlock next = blocks.next();
    for (int64_t i = 0; i < passes; ++i) {
      const auto attend = i == 0 && next.count ? attend_some<true> : attend_some<false>;
      attend((int)rows_of(i))(blocks.rows(), next, dims, q + i * height * dims, s.q + i * pass_floats, i * height, scale, s);
    }
  }

  for (int64_t r = 0; r < groups; ++r) {
    const float total = sum(load(s.total + r * LANES));
    auto* out = static_cast<uint16_t*>(a.out) + origin + r * dims;
    for (int64_t d = 0; d < dims; d += kPair) {
      const Pair x = load_pair(s.out + r * dims + d);
      store_pair(out + d, {x.first / total, x.second / total});
    }
  }
}

}  // namespace jaxserve

#endif
