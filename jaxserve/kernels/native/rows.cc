// Functions of the rows of x that cost too little to be a call of their own.

#include "rows.h"

#include "vectors.h"

#if LANES == 16
#define FUNCTIONS kRowsAvx512
#elif LANES == 8
#define FUNCTIONS kRowsAvx2
#else
#define FUNCTIONS kRowsBaseline
#endif

namespace jaxserve {
namespace {

constexpr int64_t kPair = 2 * LANES;

// The last numbers of a row, filled up with zeros.
template <typename T>
struct Rest {
  T numbers[kPair] = {};

  Rest(const T* x, int64_t count) { memcpy(numbers, x, static_cast<size_t>(count) * sizeof(T)); }
};

// Calls f(i, pair of x at i) over a row.
template <typename T, typename F>
inline void for_pairs(const T* x, int64_t size, F f) {
  int64_t i = 0;
  for (; i + kPair <= size; i += kPair) f(i, load_pair(x + i));
  if (i < size) f(i, load_pair(Rest<T>(x + i, size - i).numbers));
}

// The pair of x at i, of a row of `size`.
template <typename T>
inline Pair pair_at(const T* x, int64_t i, int64_t size) {
  return i + kPair <= size ? load_pair(x + i) : load_pair(Rest<T>(x + i, size - i).numbers);
}

template <typename T>
inline void put(T* to, int64_t i, int64_t size, Pair x) {
  if (i + kPair <= size) return store_pair(to + i, x);
  T numbers[kPair];
  store_pair(numbers, x);
  memcpy(to + i, numbers, static_cast<size_t>(size - i) * sizeof(T));
}

template <typename T>
void norm(const T* x, const T* weight, float eps, int64_t size, T* to) {
  Floats squares = {};
  for_pairs(x, size, [&](int64_t, Pair p) { squares += p.first * p.first + p.second * p.second; });
  const float factor = 1 / __builtin_sqrtf(sum(squares) / static_cast<float>(size) + eps);
  for_pairs(x, size, [&](int64_t i, Pair p) {
    const Pair w = pair_at(weight, i, size);
    put(to, i, size, {p.first * factor * w.first, p.second * factor * w.second});
  });
}

inline Floats silu(Floats x) {
  const Floats power = exp2((x < 0 ? x : -x) * kLog2E);  // e^-|x|
  return x * (x < 0 ? power : splat(1)) / (1 + power);
}

template <typename T>
void swiglu(const T* gate, const T* up, int64_t size, T* to) {
  for_pairs(gate, size, [&](int64_t i, Pair p) {
    const Pair u = pair_at(up, i, size);
    put(to, i, size, {silu(p.first) * u.first, silu(p.second) * u.second});
  });
}

void norm_row(const void* x, const void* weight, float eps, int64_t size, bool bfloat16, void* to) {
  using F = float;
  using B = uint16_t;
  if (bfloat16) return norm(static_cast<const B*>(x), static_cast<const B*>(weight), eps, size, static_cast<B*>(to));
  norm(static_cast<const F*>(x), static_cast<const F*>(weight), eps, size, static_cast<F*>(to));
}

void swiglu_row(const void* gate, const void* up, int64_t size, bool bfloat16, void* to) {
  using F = float;
  using B = uint16_t;
  if (bfloat16) return swiglu(static_cast<const B*>(gate), static_cast<const B*>(up), size, static_cast<B*>(to));
  swiglu(static_cast<const F*>(gate), static_cast<const F*>(up), size, static_cast<F*>(to));
}

}  // namespace

extern const RowFunctions FUNCTIONS = {norm_row, swiglu_row};

}  // namespace jaxserve
