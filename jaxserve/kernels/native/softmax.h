// Transposition and the online softmax (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"), which all
// kernels of attention share. For files as in vectors.h.

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

// One step of a transposition: exchanges the off-diagonal S x S squares of every 2S x 2S square.
template <int S, size_t... I>
inline void exchange(Floats (&x)[LANES], std::index_sequence<I...> lanes) {
  for (int i = 0; i < LANES; ++i) {
    if (i & S) continue;
    Floats a = x[i], b = x[i + S];
    x[i] = SHUFFLE(a, b, (int32_t)(I & S ? LANES + I - S : I)...);
    x[i + S] = SHUFFLE(a, b, (int32_t)(I & S ? LANES + I : I + S)...);
  }
  if constexpr (S > 1) exchange<S / 2>(x, lanes);
}

inline void transpose(Floats (&x)[LANES]) { exchange<LANES / 2>(x, std::make_index_sequence<LANES>()); }

// Factors of the scores and of the weights of a block, [kBlock] each, where keys and values have scales.
struct Scales {
  float *keys, *values;
};

// Turns one row's scores into weights relative to the row's new maximum, for the positions [begin, end) of the block;
// returns by how much what was summed before must be scaled. With S, scores and weights have yet to be scaled.
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
