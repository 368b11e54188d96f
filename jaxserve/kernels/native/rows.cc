// Functions on rows of x that are too cheap for a custom call of their own.

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
typedef int8_t Bytes __attribute__((vector_size(LANES)));

// The last numbers of a row, padded with zeros.
template <typename T>
struct Rest {
  T numbers[kPair] = {};

  Rest(const T* x, int64_t count) { memcpy(numbers, x, static_cast<size_t>(count) * sizeof(T)); }
};

// Calls f(i, pair) for each pair of a row, where i is the index of its first number.
template <typename T, typename F>
inline void for_pairs(const T* x, int64_t size, F f) {
  int64_t i = 0;
  for (; i + kPair <= size; i += kPair) f(i, load_pair(x + i));
  if (i < size) f(i, load_pair(Rest<T>(x + i, size - i).numbers));
}

// Returns the pair at index i of a row of `size` numbers.
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

template <typename T>
void add(const T* x, int64_t size, T* to) {
  for_pairs(x, size, [&](int64_t i, Pair p) {
    const Pair sum = pair_at(to, i, size);
    put(to, i, size, {sum.first + p.first, sum.second + p.second});
  });
}

// Rotates LANES numbers of both halves.
template <typename T>
inline void rotate_lanes(const T* first, const T* second, const float* cos, const float* sin, T* to_first, T* to_second) {
  const Floats a = load_in_order(first), b = load_in_order(second), c = load(cos), s = load(sin);
  store_in_order(to_first, a * c - b * s);
  store_in_order(to_second, b * c + a * s);
}

template <typename T>
void rotate(const T* x, const float* cos, const float* sin, int64_t half, T* to) {
  int64_t i = 0;
  for (; i + LANES <= half; i += LANES) rotate_lanes(x + i, x + half + i, cos + i, sin + i, to + i, to + half + i);
  if (i == half) return;
  const Rest<T> first(x + i, half - i), second(x + half + i, half - i);
  const Rest<float> c(cos + i, half - i), s(sin + i, half - i);
  T rotated[2][LANES];
  rotate_lanes(first.numbers, second.numbers, c.numbers, s.numbers, rotated[0], rotated[1]);
  for (int part = 0; part < 2; ++part) memcpy(to + part * half + i, rotated[part], static_cast<size_t>(half - i) * sizeof(T));
}

inline Floats magnitude(Floats x) { return x < 0 ? -x : x; }

// 1.5 * 2^23. Adding it rounds a number to an integer, to nearest even, in the low bits of the sum.
constexpr float kMagic = 12582912.0f;

// Stores a pair of vectors of integers in [-128, 127], which are the low bytes of `first` and `second`.
inline void put_bytes(const float*, Bits first, Bits second, int8_t* to) {
  const Bytes bytes[] = {convert<Bytes>(first), convert<Bytes>(second)};
  memcpy(to, bytes, sizeof(bytes));
}

inline void put_bytes(const uint16_t*, Bits even, Bits odd, int8_t* to) {
  const Shorts bytes = convert<Shorts>((even & 255) | (odd & 255) << 8);
  memcpy(to, &bytes, sizeof(bytes));
}

// Writes a row as codes and their scale. A number that is not finite makes the scale NaN.
template <typename T>
void quantize(const T* x, int64_t size, int8_t* to) {
  constexpr float kMaxCode = 127;
  Floats largest = {}, poison = {};
  for_pairs(x, size, [&](int64_t, Pair p) {
    const Floats first = magnitude(p.first), second = magnitude(p.second), larger = first > second ? first : second;
    largest = larger > largest ? larger : largest;
    poison += (p.first + p.second) * 0.0f;
  });
  float top = 0;
  for (int i = 0; i < LANES; ++i) top = largest[i] > top ? largest[i] : top;
  const float scale = top * (1 / kMaxCode) + sum(poison), divisor = scale == 0 ? 1 : scale;
  for_pairs(x, size, [&](int64_t i, Pair p) {
    int8_t codes[kPair];
    put_bytes(x, (Bits)(p.first / divisor + kMagic), (Bits)(p.second / divisor + kMagic), codes);
    memcpy(to + i, codes, static_cast<size_t>(size - i < kPair ? size - i : kPair));
  });
  memcpy(to + size, &scale, sizeof(scale));
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

void add_row(const void* x, int64_t size, bool bfloat16, void* to) {
  if (bfloat16) return add(static_cast<const uint16_t*>(x), size, static_cast<uint16_t*>(to));
  add(static_cast<const float*>(x), size, static_cast<float*>(to));
}

void rotate_row(const void* x, const float* cos, const float* sin, int64_t half, bool bfloat16, void* to) {
  if (bfloat16) return rotate(static_cast<const uint16_t*>(x), cos, sin, half, static_cast<uint16_t*>(to));
  rotate(static_cast<const float*>(x), cos, sin, half, static_cast<float*>(to));
}

void quantize_row(const void* x, int64_t size, bool bfloat16, void* to) {
  auto* codes = static_cast<int8_t*>(to);
  if (bfloat16) return quantize(static_cast<const uint16_t*>(x), size, codes);
  quantize(static_cast<const float*>(x), size, codes);
}

}  // namespace

extern const RowFunctions FUNCTIONS = {norm_row, swiglu_row, add_row, rotate_row, quantize_row};

}  // namespace jaxserve
