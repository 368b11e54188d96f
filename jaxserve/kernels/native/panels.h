// The elements of the product in panels (matmul_panels.cc). Panels of the weight and rows of x consist of elements of 32 bits, in
// slices of inputs. Only for files that are compiled once per instruction set (vectors.h).
//
// An element of bfloat16 numbers is a pair on AVX-512, which multiplies and adds pairs. On AVX2 it is one number, widened to
// float32; a slice then has its even inputs first and its odd inputs last. An element of codes is four bytes. Codes of 8 bits on
// AVX2 are the exception: sums of their products as bytes would overflow, so an element is a pair of words.

#pragma once

#include <immintrin.h>

#include "vectors.h"

namespace jaxserve {
namespace {

constexpr int64_t kLanes = LANES;
constexpr int64_t kPanel = 2 * kLanes;  // outputs of a panel

inline int64_t ceil_div(int64_t whole, int64_t part) { return (whole + part - 1) / part; }
inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }

// The inputs of a slice (the smallest number that can be unpacked on its own), its bytes in a row of the weight, the inputs of an
// element and the elements of a slice, for a weight of `bits` bits.
constexpr int64_t inputs_of(int bits) { return bits == 3 || bits == 16 ? 256 : 128; }
constexpr int64_t bytes_of(int bits) { return inputs_of(bits) * bits / 8; }
constexpr bool in_bytes(int bits) { return LANES == 16 ? bits <= 8 : bits < 8; }
constexpr int64_t in_element(int bits) { return in_bytes(bits) ? 4 : bits == 16 && LANES == 8 ? 1 : 2; }
constexpr int64_t elements_of(int bits) { return inputs_of(bits) / in_element(bits); }
constexpr int kChains = LANES == 16 ? 1 : 2;   // runs of elements in a slice of bfloat16 numbers (AVX2: even and odd inputs)
constexpr int64_t kChain = inputs_of(16) / 2;  // elements of a run

inline Ints load(const int32_t* from) { return (Ints)load(reinterpret_cast<const float*>(from)); }
inline void store(int32_t* to, Ints x) { store(reinterpret_cast<float*>(to), (Floats)x); }

// Calls f(chain, element) for each element of a pair of bfloat16 numbers. `numbers` is a word or a vector of words.
template <typename T, typename F>
inline void elements_of_pair(T numbers, F f) {
#if LANES == 16
  f(0, numbers);
#else
  f(0, numbers << 16);
  f(1, numbers & 0xffff0000u);
#endif
}

// Returns the sums plus the products of codes and x, element by element: pairs of words or fours of bytes.
template <int B>
inline Ints add_products(Ints sums, Ints codes, Ints x) {
#if LANES == 16
  if constexpr (in_bytes(B)) return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes, (__m512i)x);
#else
  // Assembly, because compilers move the additions after all products and then run out of registers. Products of bytes have sums of
  // 16 bits.
  Ints products;
  if constexpr (in_bytes(B)) {
    __asm__("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(sums), "=&x"(products) : "x"(codes), "x"(x));
  } else {
    __asm__("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(sums), "=&x"(products) : "x"(codes), "x"(x));
  }
  return sums;
#endif
}

// Returns the sums plus the products of bfloat16 numbers, element by element.
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
