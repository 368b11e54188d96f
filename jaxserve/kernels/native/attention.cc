// Flash attention over pages in float32, on the compiler's vector extension with LANES floats in a vector.
//
// The context is read in blocks of 64 positions. A block's keys are transposed and its values widened to float32, once, into a
// buffer that stays in L1. Then groups of up to 6 query rows compute scores, the online softmax (softmax.h) and the weighted sum
// of values in registers. A decode row is a tile of one token, whose query rows are the query heads that share the kv head.
//
// In int8 pools only the codes are widened. Their scales multiply the scores and the weights, once for each position.

#include "attention.h"

#include "softmax.h"

#if LANES == 16
#define COLUMNS 4  // vectors of a row in registers: 6 rows x 4 = 24 of 32 registers
#define ATTEND attend_avx512
#elif LANES == 8
#define COLUMNS 2  // 6 rows x 2 = 12 of 16 registers
#define ATTEND attend_avx2
#else
#if defined(__aarch64__)
#define COLUMNS 4
#else
#define COLUMNS 2
#endif
#define ATTEND attend_baseline
#endif

namespace jaxserve {
namespace {

constexpr int kRows = 6;  // maximum number of query rows in registers

// Loads 2 * LANES int8 codes in the order of a pair of T.
template <typename T>
inline Pair load_codes(const int8_t* p);

template <>
inline Pair load_codes<float>(const int8_t* p) {
  typedef int8_t Bytes __attribute__((vector_size(LANES)));
  Bytes first, second;
  memcpy(&first, p, LANES);
  memcpy(&second, p + LANES, LANES);
  return {convert<Floats>(convert<Ints>(first)), convert<Floats>(convert<Ints>(second))};
}

template <>
inline Pair load_codes<uint16_t>(const int8_t* p) {
  Shorts x;
  memcpy(&x, p, sizeof(x));
  return {convert<Floats>(convert<Ints>((Shorts)(x << 8) >> 8)), convert<Floats>(convert<Ints>(x >> 8))};
}

// The buffers of one tile and kv head.
struct Scratch {
  float *q, *out, *keys, *values, *scores, *decay, *top, *total;
  Scales scales;  // for int8 pools
};

// Loads LANES positions x LANES floats (or pairs of bfloat16) from dimension d on, and transposes them.
template <typename T>
inline void load_transposed(const T* const* rows, int64_t d, Floats (&x)[LANES]) {
  for (int i = 0; i < LANES; ++i) x[i] = load(reinterpret_cast<const float*>(rows[i] + d));
  transpose(x);
}

// Writes the keys [kBlock, D] at `rows` to keys[D, kBlock], with the dimensions in the order of pairs.
void transpose_keys(const float* const* rows, int64_t dims, float* keys) {
  for (int t = 0; t < kBlock; t += LANES) {
    for (int64_t d = 0; d < dims; d += LANES) {
      Floats x[LANES];
      load_transposed(rows + t, d, x);
      for (int i = 0; i < LANES; ++i) store(keys + (d + i) * kBlock + t, x[i]);
    }
  }
}

void transpose_keys(const uint16_t* const* rows, int64_t dims, float* keys) {
  for (int t = 0; t < kBlock; t += LANES) {
    for (int64_t d = 0; d < dims; d += 2 * LANES) {
      Floats x[LANES];
      load_transposed(rows + t, d, x);
      for (int i = 0; i < LANES; ++i) {
        Pair pair = unpack((Bits)x[i]);
        store(keys + (d + i) * kBlock + t, pair.first);
        store(keys + (d + LANES + i) * kBlock + t, pair.second);
      }
    }
  }
}

// Returns the index of a dimension in the order of pairs of T.
template <typename T>
inline int64_t place(int64_t dim) {
  return sizeof(T) == sizeof(float) ? dim : dim / (2 * LANES) * 2 * LANES + dim % 2 * LANES + dim % (2 * LANES) / 2;
}

// Writes the codes of keys to keys[D, kBlock] for queries of T. Words of four codes are transposed, then widened.
template <typename T>
void transpose_codes(const int8_t* const* rows, int64_t dims, float* keys) {
  constexpr int kStep = 4 * LANES;
  for (int t = 0; t < kBlock; t += LANES) {
    for (int64_t d = 0; d < dims; d += kStep) {
      const int64_t step = dims - d < kStep ? kStep / 2 : kStep;
      Floats x[LANES] = {};
      for (int i = 0; i < LANES; ++i) {
        if (step == kStep) {
          memcpy(&x[i], rows[t + i] + d, kStep);
        } else {
          memcpy(&x[i], rows[t + i] + d, kStep / 2);
        }
      }
      transpose(x);
      for (int i = 0; i < step / 4; ++i) {
        float* const to = keys + t;
        for (int b = 0; b < 4; ++b) {
          store(to + place<T>(d + 4 * i + b) * kBlock, convert<Floats>((Ints)x[i] << (24 - 8 * b) >> 24));
        }
      }
    }
  }
}

// scores[R, kBlock] = q[R, D] * keys[D, kBlock]
template <int R>
void multiply_keys(const float* q, const float* keys, int64_t dims, float* scores) {
  for (int c = 0; c < kBlock; c += COLUMNS * LANES) {
    Floats sum[R][COLUMNS] = {};
    for (int64_t d = 0; d < dims; ++d) {
      Floats key[COLUMNS];
      for (int j = 0; j < COLUMNS; ++j) key[j] = load(keys + d * kBlock + c + j * LANES);
      for (int r = 0; r < R; ++r) {
        for (int j = 0; j < COLUMNS; ++j) sum[r][j] += key[j] * q[r * dims + d];
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int j = 0; j < COLUMNS; ++j) store(scores + r * kBlock + c + j * LANES, sum[r][j]);
    }
  }
}

// out[R, C vectors] = out * decay[R] + weights[R, count] * values[count, C vectors]. Rows of out and values are D floats apart.
template <int R, int C>
void multiply_values(const float* weights, const float* values, int count, int64_t dims, const float* decay, float* out) {
  Floats sum[R][C];
  for (int r = 0; r < R; ++r) {
    for (int j = 0; j < C; ++j) sum[r][j] = load(out + r * dims + j * LANES) * decay[r];
  }
  for (int t = 0; t < count; ++t) {
    Floats value[C];
    for (int j = 0; j < C; ++j) value[j] = load(values + t * dims + j * LANES);
    for (int r = 0; r < R; ++r) {
      for (int j = 0; j < C; ++j) sum[r][j] += value[j] * weights[r * kBlock + t];
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int j = 0; j < C; ++j) store(out + r * dims + j * LANES, sum[r][j]);
  }
}

// Adds a block of `count` positions from `position` on to the outputs of R query rows. Row r of the tile belongs to token
// r / groups.
template <int R, bool S>
void attend_rows(const Attention& a, const Tile& t, int64_t row, int64_t position, int count, const Scratch& s) {
  const int64_t dims = a.head_dim;
  const int64_t last_seen = t.start + (row + R - 1) / a.groups;
  const int64_t first_seen = t.start + row / a.groups + 1 - a.window;
  if (last_seen < position || first_seen >= position + count) return;
  multiply_keys<R>(s.q + row * dims, s.keys, dims, s.scores);
  for (int r = 0; r < R; ++r) {
    const int64_t query = t.start + (row + r) / a.groups - position;  // relative to the block
    const int64_t begin = query + 1 > a.window ? query + 1 - a.window : 0;
    const int64_t end = query + 1 < count ? query + 1 : count;
    s.decay[r] = soften<S>(s.scores + r * kBlock, begin, end, s.top + row + r, s.total + (row + r) * LANES, s.scales);
  }
  float* out = s.out + row * dims;
  int64_t d = 0;
  for (; d + COLUMNS * LANES <= dims; d += COLUMNS * LANES) {
    multiply_values<R, COLUMNS>(s.scores, s.values + d, count, dims, s.decay, out + d);
  }
  for (; d < dims; d += LANES) multiply_values<R, 1>(s.scores, s.values + d, count, dims, s.decay, out + d);
}

template <bool S>
void attend_row_group(int rows, const Attention& a, const Tile& t, int64_t row, int64_t pos, int n, const Scratch& s) {
  switch (rows) {
    case 1: return attend_rows<1, S>(a, t, row, pos, n, s);
    case 2: return attend_rows<2, S>(a, t, row, pos, n, s);
    case 3: return attend_rows<3, S>(a, t, row, pos, n, s);
    case 4: return attend_rows<4, S>(a, t, row, pos, n, s);
    case 5: return attend_rows<5, S>(a, t, row, pos, n, s);
    default: return attend_rows<kRows, S>(a, t, row, pos, n, s);
  }
}

// Copies the keys and values [count, D] of a block to the scratch buffers.
template <typename T>
void gather_block(const Rows<T>& rows, int64_t dims, const NextBlock& next, const Scratch& s) {
  transpose_keys(rows.keys, dims, s.keys);
  for (int i = 0; i < rows.count; ++i) {
    next.prefetch_key(i);
    for (int64_t d = 0; d < dims; d += 2 * LANES) store_pair(s.values + i * dims + d, load_pair(rows.values[i] + d));
  }
}

// Copies the codes and scales of a block to the scratch buffers, for queries of T.
template <typename T>
void gather_block(const Rows<int8_t>& rows, int64_t dims, const NextBlock& next, const Scratch& s) {
  const int count = rows.count;
  transpose_codes<T>(rows.keys, dims, s.keys);
  for (int i = 0; i < count; ++i) {
    next.prefetch_key(i);
    for (int64_t d = 0; d < dims; d += 2 * LANES) store_pair(s.values + i * dims + d, load_codes<T>(rows.values[i] + d));
    memcpy(s.scales.keys + i, rows.keys[i] + dims, sizeof(float));
    memcpy(s.scales.values + i, rows.values[i] + dims, sizeof(float));
  }
  memset(s.scales.keys + count, 0, (size_t)(kBlock - count) * sizeof(float));
  memset(s.scales.values + count, 0, (size_t)(kBlock - count) * sizeof(float));
}

// Computes a tile. T is the type of queries and outputs, and P the type of the pool.
template <typename T, typename P>
void attend(const Attention& a, const Tile& t, const Tile* after, float* scratch) {
  const int64_t dims = a.head_dim, rows = t.length * a.groups;
  Scratch s;
  s.keys = scratch;
  s.values = s.keys + dims * kBlock;
  s.scores = s.values + kBlock * dims;
  s.decay = s.scores + kRows * kBlock;
  s.scales.keys = s.decay + 16;  // kRows floats, rounded up to a cache line
  s.scales.values = s.scales.keys + kBlock;
  s.q = s.scales.values + kBlock;
  s.out = s.q + rows * dims;
  s.total = s.out + rows * dims;
  s.top = s.total + rows * LANES;

  const int64_t stride = a.kv_heads * a.groups * dims;  // between tokens in q and out
  const int64_t origin = t.row * stride + t.head * a.groups * dims;
  const float scale = a.scale * kLog2E;  // because weights are computed as powers of 2
  for (int64_t i = 0; i < t.length; ++i) {
    const T* q = static_cast<const T*>(a.q) + origin + i * stride;
    for (int64_t d = 0; d < a.groups * dims; d += 2 * LANES) {
      Pair x = load_pair(q + d);
      store_pair(s.q + i * a.groups * dims + d, {x.first * scale, x.second * scale});
    }
  }
  memset(s.out, 0, (size_t)(rows * (dims + LANES)) * sizeof(float));  // clears s.total too
  for (int64_t r = 0; r < rows; ++r) s.top[r] = -__builtin_inff();

  const int64_t passes = (rows + kRows - 1) / kRows, height = (rows + passes - 1) / passes;
  for (Blocks<P> blocks(a, t, after); blocks.more(); blocks.advance()) {
    gather_block<T>(blocks.rows(), dims, blocks.next(), s);
    blocks.next().prefetch_values();
    for (int64_t row = 0; row < rows; row += height) {
      const int some = (int)(rows - row < height ? rows - row : height);
      attend_row_group<sizeof(P) == 1>(some, a, t, row, blocks.position, blocks.rows().count, s);
    }
  }

  for (int64_t r = 0; r < rows; ++r) {
    float total = 0;
    for (int i = 0; i < LANES; ++i) total += s.total[r * LANES + i];
    T* out = static_cast<T*>(a.out) + origin + r / a.groups * stride + r % a.groups * dims;
    for (int64_t d = 0; d < dims; d += 2 * LANES) {
      Pair x = load_pair(s.out + r * dims + d);
      store_pair(out + d, {x.first / total, x.second / total});
    }
  }
}

}  // namespace

void ATTEND(const Attention& a, const Tile& t, const Tile* after, float* scratch) {
  if (a.bfloat16) {
    a.int8 ? attend<uint16_t, int8_t>(a, t, after, scratch) : attend<uint16_t, uint16_t>(a, t, after, scratch);
  } else {
    a.int8 ? attend<float, int8_t>(a, t, after, scratch) : attend<float, float>(a, t, after, scratch);
  }
}

}  // namespace jaxserve
