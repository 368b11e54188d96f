// Products in float32 on the compiler's vector extension, with LANES floats in a vector.
//
// Four rows of the weight are widened and scaled into a buffer that stays in the cache. Then groups of up to kRows rows of x are
// multiplied by them, as many as the registers can hold sums of.

#include "groups.h"
#include "matmul.h"
#include "vectors.h"

#if LANES == 16
#define MULTIPLIER kMatmulFloatAvx512
#elif LANES == 8
#define MULTIPLIER kMatmulFloatAvx2
#else
#define MULTIPLIER kMatmulFloatBaseline
#endif

namespace jaxserve {
namespace {

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRows = 6;  // rows of x with kOuts sums each in registers: 24 of 32 registers
#else
constexpr int kRows = 2;  // 8 of 16 registers
#endif
constexpr int kOuts = 4;  // rows of the weight that are widened at once
constexpr int64_t kBlockRows = 96;
constexpr int64_t kBlockBytes = 128 << 10;  // maximum size of a block of the weight, so that threads get even shares

// Returns x rounded to bfloat16, to nearest even. NaN stays NaN.
inline uint16_t round_to_bfloat16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return static_cast<uint16_t>(x == x ? (bits + 0x7fff + ((bits >> 16) & 1)) >> 16 : 0x7fc0);
}

inline int64_t padded(int64_t inner) { return steps_of(inner) * kStep; }

inline void widen_row(const uint16_t* from, int64_t inner, float* to) {
  for (int64_t i = 0; i < inner; ++i) to[i] = widen(from[i]);
  for (int64_t i = inner; i < padded(inner); ++i) to[i] = 0;
}

// Writes a row of the weight in float32, padded to whole steps. Numbers beyond the last input are finite.
void widen_weight(const Weight& w, int64_t row, float* to) {
  const uint8_t* data = w.data + row * w.row_bytes;
  if (w.bits == 16) return widen_row(reinterpret_cast<const uint16_t*>(data), w.inner, to);
  Groups group = Groups::at(w, 0).of_row(row);
  for (int64_t step = 0; step < steps_of(w.inner); ++step, to += kStep) {
    const float scale = group.scale(), zero = group.zero() + static_cast<float>(1 << (w.bits - 1));
    if (w.bits == 8) {
      const int64_t left = w.inner - step * kStep;
      uint8_t codes[kStep] = {};
      memcpy(codes, data + step * kStep, static_cast<size_t>(left < kStep ? left : kStep));
      for (int i = 0; i < kStep; ++i) to[i] = (static_cast<float>(codes[i]) - zero) * scale;
    } else if (w.bits == 4) {
      uint16_t words[kStep];
      memcpy(words, data + step / 4 * 64, 64);
      const int shift = static_cast<int>(4 * (step % 4));
      for (int i = 0; i < kStep; ++i) to[i] = (static_cast<float>((words[i] >> shift) & 15) - zero) * scale;
    } else {
      uint16_t words[kStep];
      uint32_t mask;
      memcpy(words, data + step / 8 * 96, 64);
      memcpy(&mask, data + step / 8 * 96 + 64 + 4 * (step % 8), 4);
      const int shift = static_cast<int>(2 * (step % 8));
      for (int i = 0; i < kStep; ++i) {
        const uint32_t code = ((words[i] >> shift) & 3u) | ((mask >> i & 1u) << 2);
        to[i] = (static_cast<float>(static_cast<int32_t>(code)) - zero) * scale;
      }
    }
    group.advance(1);
  }
}

// Computes y[R, kOuts] from x [R, inner] and weights [kOuts, inner], which are padded to whole steps.
template <int R>
void dot(const Matmul& m, const float* x, const float* w, int64_t row, int64_t out, int64_t outs) {
  const int64_t inner = padded(m.w.inner);
  Floats sums[R][kOuts] = {};
  for (int64_t i = 0; i < inner; i += LANES) {
    Floats weights[kOuts];
    for (int o = 0; o < kOuts; ++o) weights[o] = load(w + o * inner + i);
    for (int r = 0; r < R; ++r) {
      const Floats numbers = load(x + r * inner + i);
      for (int o = 0; o < kOuts; ++o) sums[r][o] += numbers * weights[o];
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int o = 0; o < kOuts && o < outs; ++o) {
      const int64_t at = (row + r) * m.w.out + out + o;
      if (m.y_bfloat16) {
        static_cast<uint16_t*>(m.y)[at] = round_to_bfloat16(sum(sums[r][o]));
      } else {
        static_cast<float*>(m.y)[at] = sum(sums[r][o]);
      }
    }
  }
}

void dot_rows(int64_t rows, const Matmul& m, const float* x, const float* w, int64_t row, int64_t out, int64_t outs) {
  switch (rows) {
    case 1: return dot<1>(m, x, w, row, out, outs);
    case 2: return dot<2>(m, x, w, row, out, outs);
    case 3: return dot<3>(m, x, w, row, out, outs);
    case 4: return dot<4>(m, x, w, row, out, outs);
    case 5: return dot<5>(m, x, w, row, out, outs);
    default: return dot<6>(m, x, w, row, out, outs);
  }
}

size_t packed_bytes(const Matmul& m) { return static_cast<size_t>(m.rows * padded(m.w.inner)) * sizeof(float); }

void pack(const Matmul& m, int64_t row, void* packed) {
  const int64_t inner = m.w.inner, end = row + kPackRows < m.rows ? row + kPackRows : m.rows;
  for (; row < end; ++row) {
    float* to = static_cast<float*>(packed) + row * padded(inner);
    if (m.x_bfloat16) {
      widen_row(static_cast<const uint16_t*>(m.x) + row * inner, inner, to);
    } else {
      memcpy(to, static_cast<const float*>(m.x) + row * inner, static_cast<size_t>(inner) * sizeof(float));
      for (int64_t i = inner; i < padded(inner); ++i) to[i] = 0;
    }
  }
}

Block block(const Matmul& m) {
  const int64_t quads = kBlockBytes / (kOuts * m.w.row_bytes);
  return {0, kOuts * (quads ? quads : 1), 0, kBlockRows};
}

size_t scratch_bytes(const Matmul& m) { return static_cast<size_t>(kOuts * padded(m.w.inner)) * sizeof(float); }

void multiply(const Matmul& m, const void* packed, const Block& b, const Block*, void* scratch) {
  const int64_t inner = padded(m.w.inner);
  auto* weights = static_cast<float*>(scratch);
  for (int64_t out = b.out; out < b.out + b.outs; out += kOuts) {
    for (int64_t o = 0; o < kOuts; ++o) {
      widen_weight(m.w, out + o < m.w.out ? out + o : m.w.out - 1, weights + o * inner);
    }
    for (int64_t row = b.row; row < b.row + b.rows; row += kRows) {
      const float* x = static_cast<const float*>(packed) + row * inner;
      const int64_t left = b.row + b.rows - row;
      dot_rows(left < kRows ? left : kRows, m, x, weights, row, out, m.w.out - out);
    }
  }
}

}  // namespace

extern const Multiplier MULTIPLIER = {packed_bytes, pack, block, scratch_bytes, multiply};

}  // namespace jaxserve
