// Attention of a chunk of a prompt over 16-bit pages on AVX512-BF16, in columns (columns.h).
//
// An instruction multiplies a pair of numbers of a key, or of two values, brought to all lanes, by pairs of 16 rows. A weight is
// rounded to bfloat16, as an output is; what they are divided by is not.

#include "attention.h"

#if defined(__x86_64__)

#include "columns.h"

namespace jaxserve {
namespace {

struct Vectors {
  static constexpr bool kExact = false;
  static constexpr int kSums = 8;  // in registers: as many as an instruction takes cycles, and more

  // scores[kBlock, 16] = keys[kBlock, D] q[D, 16]
  static void multiply_keys(const Buffers& b, const uint32_t* q, int64_t dims) {
    const auto* keys = reinterpret_cast<const uint32_t*>(b.keys);
    for (int i = 0; i < kBlock; i += kSums) {
      __m512 sums[kSums] = {};
      for (int64_t pair = 0; pair < dims / 2; ++pair) {
        const __m512bh queries = load_pairs(q + pair * kTile);
        for (int j = 0; j < kSums; ++j) sums[j] = _mm512_dpbf16_ps(sums[j], queries, to_all(keys[(i + j) * dims / 2 + pair]));
      }
      for (int j = 0; j < kSums; ++j) _mm512_storeu_ps(b.scores + (i + j) * kTile, sums[j]);
    }
  }

  // out[D, 16] += values weights[steps, 16]
  static void add_values(const Buffers& b, int steps, int64_t dims, float* out) {
    for (int64_t d = 0; d < dims; d += kSums, out += kSums * kTile) {
      __m512 sums[kSums];
      for (int j = 0; j < kSums; ++j) sums[j] = _mm512_loadu_ps(out + j * kTile);
      const uint32_t* values = b.values + d / kTile * kSteps * kWords + d % kTile * kTile;
      for (int step = 0; step < steps; ++step, values += kWords) {
        for (int pair = 0; pair < kTile; ++pair) {
          const __m512bh weights = load_pairs(b.weights + step * 2 * kWords + pair * kTile);
          for (int j = 0; j < kSums; ++j) sums[j] = _mm512_dpbf16_ps(sums[j], weights, to_all(values[j * kTile + pair]));
        }
      }
      for (int j = 0; j < kSums; ++j) _mm512_storeu_ps(out + j * kTile, sums[j]);
    }
  }

 private:
  static __m512bh load_pairs(const uint32_t* from) { return (__m512bh)_mm512_loadu_si512(from); }
  static __m512bh to_all(uint32_t pair) { return (__m512bh)_mm512_set1_epi32((int32_t)pair); }
};

}  // namespace

void attend_avx512bf16(const Attention& a, const Tile& t, const Tile* after, float* scratch) {
  attend_columns<Vectors>(a, t, after, scratch);
}

}  // namespace jaxserve

#endif
