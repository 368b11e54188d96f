// Transposition, and the online softmax of Milakov and Gimelshein (2018, "Online normalizer calculation for softmax"), for all
// attention kernels. Only for files that are compiled once per instruction set (vectors.h).

#pragma once

#include <utility>

#include "blocks.h"
#include "vectors.h"

namespace jaxserve {
namespace {

constexpr int kVectors = kBlock / LANES;

template <size_t... I>
inline Ints iota(std::index_sequence<I...>) {
  return Ints{(int32_t)I...};
}

// One step of a transposition: swaps the off-diagonal S x S squares of every 2S x 2S square.
template <int S, size_t... I>
inline void swap_squares(Floats (&x)[LANES], std::index_sequence<I...> lanes) {
  for (int i = 0; i < LANES; ++i) {
    if (i & S) continue;
    Floats a = x[i], b = x[i + S];
    x[i] = SHUFFLE(a, b, (int32_t)(I & S ? LANES + I - S : I)...);
    x[i + S] = SHUFFLE(a, b, (int32_t)(I & S ? LANES + I : I + S)...);
  }
  if constexpr (S > 1) swap_squares<S / 2>(x, lanes);
}

inline void transpose(Floats (&x)[LANES]) { swap_squares<LANES / 2>(x, std::make_index_sequence<LANES>()); }

// The scales of a block's keys and values, [kBlock] each, for pools of int8.
struct Scales {
  float *keys, *values;
};

// Replaces one row's scores by weights relative to the row's new maximum, for the positions [begin, end) of the block, and returns
// the factor for the sums of earlier blocks. With S, the scores are first multiplied by the scales of keys, and the weights that
// are stored by the scales of values.
template <bool S>
float soften(float* scores, int64_t begin, int64_t end, float* top, float* total, Scales scales) {
  if (end <= begin) {
    for (int j = 0; j < kVectors; ++j) store(scores + j * LANES, Floats{});
    return 1.0f;
  }
  Floats x[kVectors], best = splat(-__builtin_inff());
  const bool partial = begin > 0 || end < kBlock;
  for (int j = 0; j < kVectors; ++j) {
    x[j] = load(scores + j * LANES);
    if constexpr (S) x[j] *= load(scales.keys + j * LANES);
    if (partial) {
      Ints position = iota(std::make_index_sequence<LANES>()) + j * LANES;
      x[j] = ((position >= (int32_t)begin) & (position < (int32_t)end)) ? x[j] : splat(-__builtin_inff());
    }
    best = x[j] > best ? x[j] : best;
  }
  const float block_top = max_lane(best);
  const float new_top = block_top > *top ? block_top : *top;
  Floats decay = splat(1.0f);
  if (new_top != *top) decay = exp2(splat(*top - new_top));  // seldom after the first blocks
  Floats sum = load(total) * decay;
  for (int j = 0; j < kVectors; ++j) {
    Floats weight = exp2(x[j] - new_top);
    sum += weight;
    if constexpr (S) weight *= load(scales.values + j * LANES);
    store(scores + j * LANES, weight);
  }
  store(total, sum);
  *top = new_top;
  return decay[0];
}

}  // namespace
}  // namespace jaxserve
