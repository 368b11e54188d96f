// What panels of a weight and rows of x are made of where they meet on vectors (matmul_panels.cc): elements of 32 bits, in slices.
//
// Of bfloat16 numbers an element is a pair (AVX-512 multiplies and adds up pairs) or one, widened to float32 (AVX2: of 256 inputs
// first the even ones, then the odd ones). Of codes it is four bytes or, of 8 bits on AVX2, whose sums of bytes are too narrow for
// them, a pair of words. For files as in vectors.h.

#pragma once

#include <immintrin.h>

#include "vectors.h"

namespace jaxserve {
namespace {

constexpr int64_t kLanes = LANES;
constexpr int64_t kPanel = 2 * kLanes;  // outs

inline int64_t parts(int64_t whole, int64_t part) { return (whole + part - 1) / part; }
inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Inputs of a slice, the least that any kind of weight unpacks as a whole; what they take in a row of the weight; and how many
// elements they make.
constexpr int64_t inputs_of(int bits) { return bits == 3 || bits == 16 ? 256 : 128; }
constexpr int64_t bytes_of(int bits) { return inputs_of(bits) * bits / 8; }
constexpr bool in_bytes(int bits) { return LANES == 16 ? bits <= 8 : bits < 8; }
constexpr int64_t in_element(int bits) { return in_bytes(bits) ? 4 : bits == 16 && LANES == 8 ? 1 : 2; }
constexpr int64_t elements_of(int bits) { return inputs_of(bits) / in_element(bits); }
constexpr int kChains = LANES == 16 ? 1 : 2;   // sums of a slice of numbers, one after the other;
constexpr int64_t kChain = inputs_of(16) / 2;  // and elements of each

inline Ints load(const int32_t* from) { return (Ints)load(reinterpret_cast<const float*>(from)); }
inline void store(int32_t* to, Ints x) { store(reinterpret_cast<float*>(to), (Floats)x); }

// Calls f with each element that a pair of bfloat16 numbers makes, in one lane or in all: the chain that it belongs to and itself.
template <typename T, typename F>
inline void elements_of_pair(T numbers, F f) {
#if LANES == 16
  f(0, numbers);
#else
  f(0, numbers << 16);
  f(1, numbers & 0xffff0000u);
#endif
}

// sums + products of elements: numbers, pairs of words, fours of bytes.
template <int B>
inline Ints add_products(Ints sums, Ints codes, Ints x) {
#if LANES == 16
  if constexpr (in_bytes(B)) return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes, (__m512i)x);
#else
  // As one piece, because compilers move the additions behind all products, and then run out of registers. Of bytes sums of 16 bits.
  Ints products;
  if constexpr (in_bytes(B)) {
    __asm__("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(sums), "=&x"(products) : "x"(codes), "x"(x));
  } else {
    __asm__("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(sums), "=&x"(products) : "x"(codes), "x"(x));
  }
  return sums;
#endif
}

template <int B>
inline Floats add_products(Floats sums, Ints weights, Ints x) {
#if LANES == 16
  return (Floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)weights, (__m512bh)x);
#else
  return (Floats)weights * (Floats)x + sums;
#endif
}

}  // namespace
}  // namespace jaxserve
