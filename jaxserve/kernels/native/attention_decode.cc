// Flash attention of rows that decode, on AVX512-BF16 and on AVX2: bfloat16 queries and pools, head_dim a multiple of two
// vectors of floats.
//
// A decode row brings few query rows to each key, so that turning keys would cost more than multiplying by them. Instead
// keys are multiplied as they lie, and the lanes of as many keys as there are lanes are added up together. AVX512-BF16
// multiplies pairs of numbers; on AVX2 keys are widened in registers, once for all query rows. Products of bfloat16 numbers are
// exact, and sums are in float32. Values are widened in registers, once for up to 6 query rows.

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

constexpr int kRows = 6;  // query rows that share what is read
constexpr int kPair = 2 * LANES;

struct Scratch {
  float *q, *scores, *decay, *out, *total, *top;  // q: on AVX2, in the order of pairs
};

// Adds up the lanes of each vector, sum of vector i in lane i: in each step halves of two vectors meet.
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

// `count` numbers of `row` from `d` on. All rows of a block can be asked for if it has any: see `Blocks`.
__attribute__((always_inline)) inline void ask(const void* row, int64_t d, int64_t count) {
  for (int64_t n = 0; n < count; n += 32) __builtin_prefetch(static_cast<const uint16_t*>(row) + d + n);
}

// scores[R, kBlock] of query rows [R, D] and the first keys, as many as there are. With `ask_next` the next ones are asked for.
#if LANES == 16
inline __m512bh load_numbers(const uint16_t* p) { return (__m512bh)_mm512_loadu_si512(p); }

// Of one row [32 V], which stays in registers.
template <int V, bool ask_next>
void multiply_keys(const Rows<uint16_t>& rows, const Coming& next, const uint16_t* q, float scale, float* scores) {
  __m512bh query[V];
  for (int v = 0; v < V; ++v) query[v] = load_numbers(q + v * kPair);
  for (int t = 0; t < rows.count; t += LANES) {
    Floats sums[LANES];
    for (int i = 0; i < LANES; ++i) {
      if constexpr (ask_next) ask(next.keys[t + i], 0, V * kPair);
      __m512 sum = _mm512_setzero_ps();
      for (int v = 0; v < V; ++v) sum = _mm512_dpbf16_ps(sum, load_numbers(rows.keys[t + i] + v * kPair), query[v]);
      sums[i] = (Floats)sum;
    }
    store(scores + t, add_lanes<LANES / 2>(sums, std::make_index_sequence<LANES>()) * scale);
  }
}

template <bool ask_next>
void multiply_keys(
    const Rows<uint16_t>& rows, const Coming& next, int64_t dims, const uint16_t* q, float scale, float* scores) {
  switch (dims / kPair) {
    case 1: return multiply_keys<1, ask_next>(rows, next, q, scale, scores);
    case 2: return multiply_keys<2, ask_next>(rows, next, q, scale, scores);
    case 3: return multiply_keys<3, ask_next>(rows, next, q, scale, scores);
    case 4: return multiply_keys<4, ask_next>(rows, next, q, scale, scores);
    case 5: return multiply_keys<5, ask_next>(rows, next, q, scale, scores);
    case 6: return multiply_keys<6, ask_next>(rows, next, q, scale, scores);
    case 7: return multiply_keys<7, ask_next>(rows, next, q, scale, scores);
    default: return multiply_keys<8, ask_next>(rows, next, q, scale, scores);
  }
}

template <int R, bool ask_next>
void multiply_keys(
    const Rows<uint16_t>& rows, const Coming& next, int64_t dims, const uint16_t* q, const float*, float scale, float* scores) {
  multiply_keys<ask_next>(rows, next, dims, q, scale, scores);
  for (int r = 1; r < R; ++r) multiply_keys<false>(rows, next, dims, q + r * dims, scale, scores + r * kBlock);
}
#else
template <int R, bool ask_next>
void multiply_keys(
    const Rows<uint16_t>& rows, const Coming& next, int64_t dims, const uint16_t*, const float* q, float scale, float* scores) {
  for (int t = 0; t < rows.count; t += LANES) {
    Floats sums[R][LANES];
    for (int i = 0; i < LANES; ++i) {
      if constexpr (ask_next) ask(next.keys[t + i], 0, dims);
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
      store(scores + r * kBlock + t, add_lanes<LANES / 2>(sums[r], std::make_index_sequence<LANES>()) * scale);
    }
  }
}
#endif

// out[R, C pairs of vectors] = out * decay[R] + weights[R, count] values[count, C pairs], from dimension d on.
template <int R, int C, bool ask_next>
void multiply_values(
    const Rows<uint16_t>& rows, const Coming& next, int64_t d, int64_t dims, const Scratch& s, float* out) {
  Pair sums[R][C];
  for (int r = 0; r < R; ++r) {
    for (int j = 0; j < C; ++j) {
      const Pair before = load_pair(out + r * dims + d + j * kPair);
      sums[r][j] = {before.first * s.decay[r], before.second * s.decay[r]};
    }
  }
  for (int t = 0; t < rows.count; ++t) {
    if constexpr (ask_next) ask(next.values[t], d, C * kPair);
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

template <int R, bool ask_next>
void multiply_values(const Rows<uint16_t>& rows, const Coming& next, int64_t dims, const Scratch& s, float* out) {
  constexpr int kColumns = LANES == 16 || R <= 3 ? 2 : 1;  // 24 sums in registers, or 12
  int64_t d = 0;
  for (; d + kColumns * kPair <= dims; d += kColumns * kPair) {
    multiply_values<R, kColumns, ask_next>(rows, next, d, dims, s, out);
  }
  if (d < dims) multiply_values<R, 1, ask_next>(rows, next, d, dims, s, out);
}

// R query rows against a block: scores, weights, and the weighted sum of values.
template <int R, bool ask_next>
void attend_rows(const Rows<uint16_t>& rows, const Coming& next, int64_t dims, const uint16_t* q, int64_t row, float scale,
                 const Scratch& s) {
  multiply_keys<R, ask_next>(rows, next, dims, q + row * dims, s.q + row * dims, scale, s.scores);
  for (int r = 0; r < R; ++r) {
    s.decay[r] = soften<false>(s.scores + r * kBlock, 0, rows.count, s.top + row + r, s.total + (row + r) * LANES, {});
  }
  multiply_values<R, ask_next>(rows, next, dims, s, s.out + row * dims);
}

using AttendRows = decltype(&attend_rows<1, false>);

template <bool ask_next>
AttendRows attend_some(int rows) {
  constexpr AttendRows some[kRows] = {attend_rows<1, ask_next>, attend_rows<2, ask_next>, attend_rows<3, ask_next>,
                                      attend_rows<4, ask_next>, attend_rows<5, ask_next>, attend_rows<6, ask_next>};
  return some[rows - 1];
}

}  // namespace

void ATTEND(const Attention& a, const Tile& t, const Tile* after, float* scratch) {
  const int64_t dims = a.head_dim, groups = a.groups, origin = (t.row * a.kv_heads + t.head) * groups * dims;
  const auto* q = static_cast<const uint16_t*>(a.q) + origin;
  const float scale = a.scale * kLog2E;  // weights are powers of 2
  Scratch s;
  s.q = scratch;
  s.scores = s.q + groups * dims;
  s.decay = s.scores + kRows * kBlock;
  s.out = s.decay + LANES;
  s.total = s.out + groups * dims;
  s.top = s.total + groups * LANES;
  memset(s.out, 0, (size_t)(groups * (dims + LANES)) * sizeof(float));  // and total
  for (int64_t r = 0; r < groups; ++r) s.top[r] = -__builtin_inff();
  if (LANES == 8) {
    for (int64_t d = 0; d < groups * dims; d += kPair) store_pair(s.q + d, load_pair(q + d));
  }

  const int64_t passes = (groups + kRows - 1) / kRows, height = (groups + passes - 1) / passes;
  for (Blocks<uint16_t> blocks(a, t, after); blocks.more(); blocks.advance()) {
    const Rows<uint16_t>& rows = blocks.rows();
    const Coming next = blocks.next();
    for (int64_t row = 0; row < groups; row += height) {
      const int some = (int)(groups - row < height ? groups - row : height);
      const auto attend = row == 0 && next.count ? attend_some<true> : attend_some<false>;
      attend(some)(rows, next, dims, q, row, scale, s);
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
