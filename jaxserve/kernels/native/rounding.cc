// Rounding of weights to 8, 4 or 3 bits, with a search of each group's scale: quantization/scale_search.py defines the method. Lanes
// are neighbouring groups, and the numbers of a group are added in their order. It must be compiled without contraction to fused
// operations: then all instruction sets and the definition give the same codes, scales and zeros.

#include "rounding.h"

#include "vectors.h"

#if LANES == 16
#define ROUND kRoundAvx512
#elif LANES == 8
#define ROUND kRoundAvx2
#else
#define ROUND kRoundBaseline
#endif

namespace jaxserve {
namespace {

// The constants of quantization/scale_search.py.
constexpr float kShares[] = {1, 1.05f, 1.1f, 0.95f, 0.9f, 0.85f, 0.8f, 0.75f, 0.7f, 0.65f, 0.6f};
constexpr float kShrinks[] = {1, 0.95f, 0.9f, 0.85f, 0.8f, 0.75f, 0.7f, 0.6f};
constexpr float kLeast = 0x1p-40f, kMost = 0x1p40f;

// 1.5 * 2^23. Adding it rounds a small number to an integer, to nearest even.
constexpr float kMagic = 12582912.0f;

inline Floats rint(Floats x) { return (x + kMagic) - kMagic; }
inline Floats floor(Floats x) {
  const Floats near = rint(x);
  return near > x ? near - 1.0f : near;
}
inline Floats narrowed(Floats x) { return (Floats)(round_to_bfloat16(x) & 0xffff0000u); }
inline Floats magnitude(Floats x) { return (Floats)((Bits)x & 0x7fffffffu); }
inline Floats choose(Ints which, Floats a, Floats b) { return which ? a : b; }
inline Floats square_root(Floats x) {
  for (int lane = 0; lane < LANES; ++lane) x[lane] = __builtin_sqrtf(x[lane]);
  return x;
}

// The numbers of LANES groups and how often their errors count, transposed [group, LANES], and the range of codes without their offset.
struct Lanes {
  const float *x, *h;
  int64_t group;
  float low, high;

  Lanes(const float* x, const float* h, const RoundedRows& r)
      : x(x), h(h), group(r.group), low(static_cast<float>(-(1 << (r.bits - 1)))), high(static_cast<float>((1 << (r.bits - 1)) - 1)) {}

  Floats at(int64_t i) const { return load(x + i * LANES); }
  Floats importance(int64_t i) const { return load(h + i * LANES); }
  Floats clip(Floats q) const {
    q = q < low ? splat(low) : q;
    return q > high ? splat(high) : q;
  }
  Floats code(int64_t i, Floats scale, Floats zero) const { return rint(clip(at(i) / scale + zero)); }
};

// A scale and a zero of each group.
struct Grid {
  Floats scale, zero;
};

// The sums from which the best scale for given codes follows, which is ab / bb, and what that gains, which is ab^2 / bb.
struct Fit {
  Floats ab = {}, bb = {};

  void add(Floats x, Floats h, Floats step) {
    const Floats weighted = h * step;
    ab += weighted * x;
    bb += weighted * step;
  }
};

inline Floats stored_scale(Floats scale) {
  scale = narrowed(scale);
  return scale == 0 ? splat(1) : scale;
}

// Returns the errors, and the fit of the codes.
inline Floats error_of(const Lanes& g, Grid grid, Fit& fit) {
  Floats sum = {};
  for (int64_t i = 0; i < g.group; ++i) {
    const Floats step = g.code(i, grid.scale, grid.zero) - grid.zero, off = g.at(i) - step * grid.scale;
    fit.add(g.at(i), g.importance(i), step);
    sum += off * off * g.importance(i);
  }
  return sum;
}

// The best of the grids that were tried, by the sum that each gains.
struct Search {
  const Lanes& g;
  Floats gain = splat(-1);
  Grid best;

  // Tries codes for x * factor + zero.
  void attempt(Floats factor, Floats zero) {
    Fit fit;
    for (int64_t i = 0; i < g.group; ++i) fit.add(g.at(i), g.importance(i), rint(g.clip(g.at(i) * factor + zero)) - zero);
    const Floats gained = fit.ab * fit.ab / fit.bb;
    const Ints better = gained > gain;
    best = {choose(better, fit.ab / fit.bb, best.scale), choose(better, zero, best.zero)};
    gain = choose(better, gained, gain);
  }
};

// Returns the better of the plain grid and the found one, whose scale is fitted once more to its codes.
Grid best_of(const Lanes& g, Grid plain, Grid found, Ints searched) {
  Fit fit;
  Grid best = plain;
  Floats error = error_of(g, plain, fit);
  for (int turn = 0; turn < 2; ++turn) {
    found.scale = stored_scale(found.scale);
    fit = {};
    const Floats other = error_of(g, found, fit);
    const Ints better = searched & (other < error);
    best = {choose(better, found.scale, best.scale), choose(better, found.zero, best.zero)};
    error = choose(better, other, error);
    found.scale = fit.ab / fit.bb;
  }
  return best;
}

Grid symmetric(const Lanes& g, int bits) {
  Floats extreme = {}, largest = {};
  for (int64_t i = 0; i < g.group; ++i) {
    const Floats size = magnitude(g.at(i));
    extreme = choose(size > largest, g.at(i), extreme);
    largest = choose(size > largest, size, largest);
  }
  if (bits == 8) return {stored_scale(largest / g.high), Floats{}};
  const Grid plain = {stored_scale(extreme / g.low), Floats{}};
  Search search = {g, splat(-1), plain};
  for (const float sign : {1.0f, -1.0f}) {
    for (const float share : kShares) search.attempt(sign * g.low / share / extreme, Floats{});
  }
  return best_of(g, plain, search.best, (largest >= kLeast) & (largest <= kMost));
}

Grid asymmetric(const Lanes& g, int bits) {
  Floats least = {}, most = {};
  for (int64_t i = 0; i < g.group; ++i) {
    least = choose(g.at(i) < least, g.at(i), least);
    most = choose(g.at(i) > most, g.at(i), most);
  }
  const float steps = g.high - g.low, limit = static_cast<float>(uint64_t{1} << (64 - bits)) * 0x1p64f;  // all multiples are finite
  const Floats range = (most - least) / steps, scale = stored_scale(range > limit ? splat(limit) : range);
  const Grid plain = {scale, g.clip(rint(-least / scale) + g.low)};
  if (bits == 8) return plain;
  Search search = {g, splat(-1), plain};
  const Floats half = (most - least) * 0.5f, middle = least + half;
  for (const float shrink : kShrinks) {
    const Floats tried = half * shrink / steps * 2.0f, below = floor(g.low - (middle - half * shrink) / tried);
    for (const float more : {0.0f, 1.0f}) search.attempt(1.0f / tried, g.clip(below + more));
  }
  const Floats largest = choose(most > -least, most, -least);
  return best_of(g, plain, search.best, (largest >= kLeast) & (largest <= kMost));
}

// Writes LANES groups from index `first` on, the last one again in place of missing ones, transposed [group, LANES].
void transpose(const RoundedRows& r, int64_t first, int64_t groups, float* to) {
  for (int64_t lane = 0; lane < LANES; ++lane) {
    const int64_t at = (first + lane < groups ? first + lane : groups - 1) * r.group;
    if (r.bfloat16) {
      const uint16_t* from = static_cast<const uint16_t*>(r.w) + at;
      for (int64_t i = 0; i < r.group; ++i) {
        const uint32_t bits = static_cast<uint32_t>(from[i]) << 16;
        memcpy(to + i * LANES + lane, &bits, 4);
      }
    } else {
      const float* from = static_cast<const float*>(r.w) + at;
      for (int64_t i = 0; i < r.group; ++i) to[i * LANES + lane] = from[i];
    }
  }
}

// Writes how often the error of each number of LANES groups counts.
void weigh(const float* x, int64_t group, float* h) {
  Floats sum = {};
  for (int64_t i = 0; i < group; ++i) sum += load(x + i * LANES) * load(x + i * LANES);
  const Floats mean = sum / static_cast<float>(group);
  for (int64_t i = 0; i < group; ++i) {
    const Floats at = load(x + i * LANES), root = square_root(1.0f + at * at / mean);
    memcpy(h + i * LANES, &root, sizeof(root));
  }
}

// Writes a row of codes in the layout of quantization/packing.py.
void pack_row(const uint8_t* codes, int64_t size, int bits, uint8_t* to) {
  if (bits == 8) return void(memcpy(to, codes, static_cast<size_t>(size)));
  const int64_t unit = bits == 4 ? 128 : 256;
  uint8_t rest[256];
  for (int64_t at = 0; at < size; at += unit) {
    const uint8_t* from = codes + at;
    if (size - at < unit) {
      memset(rest, 1 << (bits - 1), sizeof(rest));
      memcpy(rest, from, static_cast<size_t>(size - at));
      from = rest;
    }
    uint16_t words[32] = {};
    const int width = bits == 4 ? 4 : 2;
    for (int plane = 0; plane < 16 / width; ++plane) {
      for (int i = 0; i < 32; ++i) words[i] |= static_cast<uint16_t>((from[plane * 32 + i] & ((1 << width) - 1)) << width * plane);
    }
    memcpy(to, words, sizeof(words));
    to += sizeof(words);
    if (bits == 4) continue;
    for (int plane = 0; plane < 8; ++plane) {
      uint32_t mask = 0;
      for (int i = 0; i < 32; ++i) mask |= static_cast<uint32_t>(from[plane * 32 + i] >> 2) << i;
      memcpy(to, &mask, sizeof(mask));
      to += sizeof(mask);
    }
  }
}

inline uint16_t upper(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return static_cast<uint16_t>(bits >> 16);
}

void round_rows(const RoundedRows& r, void* scratch) {
  float *const x = static_cast<float*>(scratch), *const h = x + r.group * kMaxLanes;
  auto* const codes = reinterpret_cast<uint8_t*>(h + r.group * kMaxLanes);
  const int64_t groups = r.rows * (r.size / r.group);
  for (int64_t first = 0; first < groups; first += LANES) {
    transpose(r, first, groups, x);
    if (r.bits < 8) weigh(x, r.group, h);
    const Lanes g(x, h, r);
    const Grid grid = r.zeros ? asymmetric(g, r.bits) : symmetric(g, r.bits);
    const int64_t count = groups - first < LANES ? groups - first : LANES;
    for (int64_t i = 0; i < r.group; ++i) {
      const Ints unsigned_codes = convert<Ints>(g.code(i, grid.scale, grid.zero) - g.low);
      for (int64_t lane = 0; lane < count; ++lane) codes[(first + lane) * r.group + i] = static_cast<uint8_t>(unsigned_codes[lane]);
    }
    for (int64_t lane = 0; lane < count; ++lane) {
      r.scales[first + lane] = upper(grid.scale[lane]);
      if (r.zeros) r.zeros[first + lane] = upper(grid.zero[lane]);
    }
  }
  const int64_t row_bytes = r.bits == 8 ? r.size : r.bits == 4 ? (r.size + 127) / 128 * 64 : (r.size + 255) / 256 * 96;
  for (int64_t row = 0; row < r.rows; ++row) pack_row(codes + row * r.size, r.size, r.bits, r.codes + row * row_bytes);
}

}  // namespace

extern const RoundRows ROUND = round_rows;

}  // namespace jaxserve
