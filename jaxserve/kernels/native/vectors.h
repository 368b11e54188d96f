// Vectors of LANES floats, by the compiler's vector extension, for files that are compiled once per instruction set.
//
// The namespace is unnamed, so that each of these files has its own copy of the functions. The files must not use inline functions
// of the standard library or of other headers without such a namespace, for the same reason: the linker keeps one copy of an
// inline function, which may have instructions that the machine lacks.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX512F__)
#include <immintrin.h>
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Ints{__VA_ARGS__})
#endif

namespace jaxserve {
namespace {

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t Bits __attribute__((vector_size(LANES * 4)));
typedef int16_t Shorts __attribute__((vector_size(LANES * 2)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));

constexpr float kLog2E = 1.4426950408889634f;

inline Floats load(const float* p) {
  Floats x;
  memcpy(&x, p, sizeof(x));
  return x;
}

inline void store(float* p, Floats x) { memcpy(p, &x, sizeof(x)); }

// A region of scratch memory that is divided into pieces.
struct Pieces {
  float* at;

  float* take(int64_t floats) {
    float* taken = at;
    at += floats;
    return taken;
  }
};

// Returns a vector with x in every lane. Compilers omit this subtraction, but would compute x + 0, because of -0.
inline Floats splat(float x) { return x - Floats{}; }

template <typename To, typename From>
inline To convert(From x) {
  return __builtin_convertvector(x, To);
}

inline float sum(Floats x) {
#if LANES == 16
  x += SHUFFLE(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  x += SHUFFLE(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
  x += SHUFFLE(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
#elif LANES == 8
  x += SHUFFLE(x, x, 4, 5, 6, 7, 0, 1, 2, 3);
  x += SHUFFLE(x, x, 2, 3, 0, 1, 6, 7, 4, 5);
#else
  x += SHUFFLE(x, x, 2, 3, 0, 1);
#endif
  return x[0] + x[1];
}

template <int S, size_t... I>
inline float max_lane(Floats x, std::index_sequence<I...> lanes) {
  if constexpr (S == 0) {
    return x[0];
  } else {
    Floats y = SHUFFLE(x, x, (int32_t)((I + S) % LANES)...);
    return max_lane<S / 2>(x > y ? x : y, lanes);
  }
}

inline float max_lane(Floats x) { return max_lane<LANES / 2>(x, std::make_index_sequence<LANES>()); }

// 2 * LANES consecutive values in two vectors. For bfloat16 these are the even and the odd values, which needs no shuffles. Code
// that both reads and writes pairs does not depend on this order.
struct Pair {
  Floats first, second;
};

inline Pair unpack(Bits x) { return {(Floats)(x << 16), (Floats)(x & 0xffff0000u)}; }

inline Pair load_pair(const float* p) { return {load(p), load(p + LANES)}; }

inline Pair load_pair(const uint16_t* p) { return unpack((Bits)load(reinterpret_cast<const float*>(p))); }

inline void store_pair(float* p, Pair x) {
  store(p, x.first);
  store(p + LANES, x.second);
}

// Returns x rounded to bfloat16, to nearest even, in the upper half of each word. NaN stays NaN.
inline Bits round_to_bfloat16(Floats x) {
  Bits bits = (Bits)x;
  return x == x ? bits + 0x7fff + ((bits >> 16) & 1) : Bits{} + 0x7fc00000u;
}

inline void store_pair(uint16_t* p, Pair x) {
  Bits pair = round_to_bfloat16(x.first) >> 16 | (round_to_bfloat16(x.second) & 0xffff0000u);
  memcpy(p, &pair, sizeof(pair));
}

// These functions read and write LANES consecutive values in their order.
inline Floats load_in_order(const float* p) { return load(p); }

inline Floats load_in_order(const uint16_t* p) {
  Halves x;
  memcpy(&x, p, sizeof(x));
  return (Floats)(convert<Bits>(x) << 16);
}

inline void store_in_order(float* p, Floats x) { store(p, x); }

inline void store_in_order(uint16_t* p, Floats x) {
  const Halves upper = convert<Halves>(round_to_bfloat16(x) >> 16);
  memcpy(p, &upper, sizeof(upper));
}

// Returns 2^x for x <= 0 with a relative error of 2e-7, by a polynomial on [-1/2, 1/2] and the exponent. Results below 2^-126, or
// with AVX-512 below 2^-149, are 0.
inline Floats exp2(Floats x) {
#if LANES == 16
  const __m512 whole = _mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const Floats f = x - (Floats)whole;  // NaN if x is infinite; a NaN times 2^-infinity is 0, by scalef's definition
#else
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  const Floats bounded = x < -126.0f ? splat(-126.0f) : x, shifted = bounded + magic;
  const Floats f = bounded - (shifted - magic);
#endif
  Floats p = 1.5403530e-4f * f + 1.3333558e-3f;
  p = p * f + 9.6181291e-3f;
  p = p * f + 5.5504109e-2f;
  p = p * f + 2.4022651e-1f;
  p = p * f + 6.9314718e-1f;
  p = p * f + 1.0f;
#if LANES == 16
  return (Floats)_mm512_scalef_ps((__m512)p, whole);
#else
  return x < -126.0f ? Floats{} : p * (Floats)(((Bits)shifted << 23) + 0x3f800000u);
#endif
}

}  // namespace
}  // namespace jaxserve
