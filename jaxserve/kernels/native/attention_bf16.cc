// Attention of a chunk of a prompt over 16-bit pages on AVX512-BF16, with the layout of columns.h.
//
// An instruction broadcasts a pair of numbers (of a key, or of two values) to all lanes, and multiplies it by pairs of 16 rows.
// Weights are rounded to bfloat16, like outputs. The sum of weights, by which outputs are divided, is not rounded.

#include "attention.h"

#if defined(__x86_64__)

#include "columns.h"

namespace jaxserve {
namespace {

struct Vectors {
  static constexpr bool kExact = false;
  static constexpr int kTiles = kAtOnce;
  // Vectors of sums in registers, for each 16 rows. With twice 16 rows two multipliers are busy, and there are half the loads.
  static constexpr int kSums = 8;

  // scores[N][kBlock, 16] = keys[kBlock, D] * q[N][D, 16]
  template <int N>
  static void multiply_keys(const Buffers& b, const uint32_t* q, int64_t dims) {
    const auto* keys = reinterpret_cast<const uint32_t*>(b.keys);
    for (int i = 0; i < kBlock; i += kSums) {
      __m512 sums[N][kSums] = {};
      for (int64_t pair = 0; pair < dims / 2; ++pair) {
        __m512bh queries[N];
        for (int n = 0; n < N; ++n) queries[n] = load_pairs(q + n * kTile * dims / 2 + pair * kTile);
        for (int j = 0; j < kSums; ++j) add<N>(sums, j, queries, keys[(i + j) * dims / 2 + pair]);
      }
      for (int n = 0; n < N; ++n) {
        for (int j = 0; j < kSums; ++j) _mm512_storeu_ps(b.scores + n * kScores + (i + j) * kTile, sums[n][j]);
      }
    }
  }

  // out[N][D, 16] += values * weights[N] over `steps` steps of positions.
  template <int N>
  static void add_values(const Buffers& b, int steps, int64_t dims, float* out) {
    for (int64_t d = 0; d < dims; d += kSums) {
      const auto at = [&](int n, int j) { return out + (n * dims + d + j) * kTile; };
      __m512 sums[N][kSums];
      for (int n = 0; n < N; ++n) {
        for (int j = 0; j < kSums; ++j) sums[n][j] = _mm512_loadu_ps(at(n, j));
      }
      const uint32_t* values = b.values + d / kTile * kSteps * kWords + d % kTile * kTile;
      for (int step = 0; step < steps; ++step, values += kWords) {
        for (int pair = 0; pair < kTile; ++pair) {
          __m512bh weights[N];
          for (int n = 0; n < N; ++n) weights[n] = load_pairs(b.weights + n * kWeights + step * 2 * kWords + pair * kTile);
          for (int j = 0; j < kSums; ++j) add<N>(sums, j, weights, values[j * kTile + pair]);
        }
      }
      for (int n = 0; n < N; ++n) {
        for (int j = 0; j < kSums; ++j) _mm512_storeu_ps(at(n, j), sums[n][j]);
      }
    }
  }

 private:
  static __m512bh load_pairs(const uint32_t* from) { return (__m512bh)_mm512_loadu_si512(from); }

  // sums[N][j] += pairs[N] * one, with the pair `one` in all lanes.
  template <int N>
  static void add(__m512 (&sums)[N][kSums], int j, const __m512bh (&pairs)[N], uint32_t one) {
    const auto all = (__m512bh)_mm512_set1_epi32((int32_t)one);
    for (int n = 0; n < N; ++n) sums[n][j] = _mm512_dpbf16_ps(sums[n][j], pairs[n], all);
  }
};

}  // namespace

void attend_avx512bf16(const Attention& a, const Tile& t, const Tile* after, float* scratch) {
  attend_columns<Vectors>(a, t, after, scratch);
}

}  // namespace jaxserve

#endif
