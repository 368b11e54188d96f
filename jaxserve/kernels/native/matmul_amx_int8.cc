// Products with codes on the integers of x86-64's matrix unit (AMX-INT8), which multiplies tiles of 16 x 64 unsigned bytes by 64 x 16
// signed bytes: twice as many products at once as of bfloat16, and codes need not become numbers first.
//
// As in matmul_amx.cc the weight is the first operand, and x is rearranged to be the second. x is rounded to integers (integers.h),
// and the unit sums the products of a segment exactly. A tile of these sums [16 outputs, 16 rows] is stored to L1, where each output
// is a vector of 16 rows: it is converted to float32, scaled and added to the output's sums, while the unit multiplies the next
// segments. Sums start from `Base::start`, which accounts for the offset of the codes. Floats are added as in matmul_panels.cc, so
// that results are the same, bit by bit.
//
// The codes of 32 outputs are unpacked once, 256 inputs at a time, one slice ahead of the unit, and multiplied by all rows of x.

#include "matmul.h"

#if defined(__x86_64__) && defined(__linux__)

#include <cpuid.h>

#include <type_traits>

#include "amx.h"
#include "scales512.h"
#include "tiles_int8.h"

namespace jaxserve {
namespace {

constexpr int64_t kBlockBytes = 128 << 10;  // maximum size of a block of the weight, so that threads get even shares
constexpr int64_t kMinBlocks = 4;           // minimum number of blocks of a small weight
constexpr int64_t kBeyond = 16;             // scales that may be written beyond the last one
constexpr int64_t kProducts = 4 * kSums;    // integers of two segments of two times 16 outputs

// The layout of kTile rows of packed x: the integers of all segments as tiles, and the numbers of `Base` [segments, kTile].
struct Layout {
  Segments segments;
  int64_t integers, numbers;  // bytes of the integers, and of each of the numbers

  explicit Layout(const Weight& w)
      : segments(w), integers(segments.number * segments.steps * kStep * kTile), numbers(segments.number * kTile * 4) {}

  int64_t bytes() const { return integers + 3 * numbers; }
};

// kTile rows of packed x.
struct Rows {
  uint8_t* integers;
  float *scales, *totals;
  int32_t* starts;

  Rows(const Layout& layout, const void* packed, int64_t row)
      : integers(static_cast<uint8_t*>(const_cast<void*>(packed)) + row / kTile * layout.bytes()),
        scales(reinterpret_cast<float*>(integers + layout.integers)),
        totals(reinterpret_cast<float*>(integers + layout.integers + layout.numbers)),
        starts(reinterpret_cast<int32_t*>(integers + layout.integers + 2 * layout.numbers)) {}
};

size_t packed_bytes(const Matmul& m) {
  return static_cast<size_t>((m.rows + kTile - 1) / kTile * Layout(m.w).bytes());
}

// Rows that do not exist become zeros.
void pack(const Matmul& m, int64_t row, void* packed) {
  const Layout layout(m.w);
  const int64_t steps = layout.segments.steps, bytes = steps * kStep, tile = min(bytes, 64);
  const Rows to(layout, packed, row);
  for (int64_t s = 0; s < layout.segments.number; ++s) {
    alignas(64) uint8_t integers[kTile][4 * kStep] = {};
    for (int64_t r = 0; r < kTile; ++r) {
      Base base(m.w.bits, 0, 0);
      if (row + r < m.rows) {
        __m512i words[4];
        const uint16_t* x = static_cast<const uint16_t*>(m.x) + (row + r) * m.w.inner + s * bytes;
        base = in_words(x, m.w.inner - s * bytes, steps, m.w.bits, words);
        store_bytes(words, steps, m.w.bits, integers[r]);
      }
      const int64_t at = s * kTile + r;
      to.scales[at] = base.scale;
      to.totals[at] = base.sum;
      to.starts[at] = base.start;
    }
    for (int64_t first = 0; first < bytes; first += tile) {
      __m512i fours[kTile];
      for (int64_t r = 0; r < kTile; ++r) fours[r] = _mm512_load_si512(integers[r] + first);
      transpose(fours);
      uint8_t* const from = to.integers + (s * bytes + first) * kTile;
      for (int64_t i = 0; i < tile / 4; ++i) _mm512_store_si512(from + i * 64, fours[i]);
    }
  }
}

// Returns the shapes of tiles: 0-3 are sums [16, 16], 4-5 codes [16, 16 words] and 6-7 fours of x [16, 16], or half as many.
inline TileConfig config_of(int64_t words) {
  TileConfig config;
  config.set(0, 4, kTile);
  config.set(4, 6, words);
  config.set(6, 8, kTile, words);
  return config;
}

// Computes the sums of products [N, 32 outputs, 16 rows] of the segments s to s + N - 1 of x, whose codes begin at a tile of a slice.
template <int L, int N>
inline void multiply(const Codes& w, int64_t tile, const Rows& x, int64_t s, int32_t* products) {
  constexpr int64_t kTiles = Sizes<L>::kTiles, kWords = Sizes<L>::kTileBytes * kTile;
  const int32_t* starts = x.starts + s * kTile;
  memory_barrier();  // x and the codes may have been written just before
  _tile_loadd(0, starts, 0);  // the same row for all outputs
  _tile_loadd(1, starts, 0);
  if (N == 2) {
    _tile_loadd(2, starts + kTile, 0);
    _tile_loadd(3, starts + kTile, 0);
  }
  const uint8_t* integers = x.integers + s * kTiles * kWords;
  for (int64_t i = 0; i < kTiles; ++i, integers += kWords) {
    _tile_loadd(6, integers, 64);
    _tile_loadd(4, w.at(tile + i, 0), w.row);
    _tile_dpbusd(0, 4, 6);
    _tile_loadd(5, w.at(tile + i, 1), w.row);
    _tile_dpbusd(1, 5, 6);
    if (N == 2) {
      _tile_loadd(7, integers + kTiles * kWords, 64);
      _tile_loadd(4, w.at(tile + kTiles + i, 0), w.row);
      _tile_dpbusd(2, 4, 7);
      _tile_loadd(5, w.at(tile + kTiles + i, 1), w.row);
      _tile_dpbusd(3, 5, 7);
    }
  }
  _tile_stored(0, products, 64);
  _tile_stored(1, products + kSums, 64);
  if (N == 2) {
    _tile_stored(2, products + 2 * kSums, 64);
    _tile_stored(3, products + 3 * kSums, 64);
  }
  memory_barrier();  // and may be overwritten just after
}

// The scales and zeros of kPair outputs in float32, [outputs, groups].
struct Numbers {
  float *scales, *zeros;
  int64_t groups;

  static int64_t floats(const Weight& w) { return 2 * (kPair * w.groups + kBeyond); }

  Numbers(const Weight& w, float* scratch) : scales(scratch), zeros(scratch + kPair * w.groups + kBeyond), groups(w.groups) {}

  void widen(const Weight& w, int64_t out) const {
    const int64_t count = min(kPair, w.out - out) * groups;
    const auto take = [&](const void* numbers, bool wide, float* to) {
      widen_all(numbers, wide, out * groups, count, to);
      for (int64_t i = count; i < kPair * groups; ++i) to[i] = 0;
    };
    take(w.scales, w.wide_scales, scales);
    if (w.zeros) take(w.zeros, w.wide_zeros, zeros);
  }
};

// sums [32 outputs, 16 rows] += the scaled products of the segments s to s + N - 1.
template <int N, bool Zeros>
inline void add(const int32_t* products, const Rows& x, int64_t s, int64_t per_group, const Numbers& w, float* sums) {
  __m512 scales[N], totals[N];
  int64_t groups[N];
  for (int n = 0; n < N; ++n) {
    scales[n] = _mm512_load_ps(x.scales + (s + n) * kTile);
    totals[n] = _mm512_load_ps(x.totals + (s + n) * kTile);
    groups[n] = (s + n) / per_group;
  }
  for (int64_t out = 0; out < kPair; ++out) {
    __m512 sum = _mm512_load_ps(sums + out * kTile);
    for (int n = 0; n < N; ++n) {
      const int64_t at = out * w.groups + groups[n];
      __m512 value = _mm512_cvtepi32_ps(_mm512_load_si512(products + n * 2 * kSums + out * kTile));
      if (Zeros) value = _mm512_fnmadd_ps(totals[n], _mm512_set1_ps(w.zeros[at]), value);
      sum = _mm512_fmadd_ps(value, _mm512_mul_ps(scales[n], _mm512_set1_ps(w.scales[at])), sum);
    }
    _mm512_store_ps(sums + out * kTile, sum);
  }
}

// sums += the products of `count` segments from segment s on, the first of a slice. `products` holds those of four segments: two are
// added while the unit multiplies the next two. It is not inlined, because it is the same for all bits.
template <int L, bool Zeros>
__attribute__((noinline)) void multiply_slice(const Codes& codes, const Rows& x, int64_t s, int64_t count, int64_t per_group,
                                              const Numbers& w, int32_t* products, float* sums) {
  const auto of = [&](int64_t i) { return products + i / 2 % 2 * kProducts; };
  int64_t i = 0;
  for (; i < count; i += 2) {
    const int64_t tile = i * Sizes<L>::kTiles;
    i + 1 < count ? multiply<L, 2>(codes, tile, x, s + i, of(i)) : multiply<L, 1>(codes, tile, x, s + i, of(i));
    if (i) add<2, Zeros>(of(i - 2), x, s + i - 2, per_group, w, sums);
  }
  i -= 2;
  i + 1 < count ? add<2, Zeros>(of(i), x, s + i, per_group, w, sums) : add<1, Zeros>(of(i), x, s + i, per_group, w, sums);
}

// The memory of a block's computation.
struct Memory {
  uint8_t* slabs;     // [2, kSlabBytes]
  int32_t* products;  // [2, kProducts]
  float *sums;        // [rows / 16, 32 outputs, 16 rows]
  float *numbers;

  explicit Memory(void* scratch)
      : slabs(static_cast<uint8_t*>(scratch)),
        products(reinterpret_cast<int32_t*>(slabs + 2 * kSlabBytes)),
        sums(reinterpret_cast<float*>(products + 2 * kProducts)),
        numbers(sums + kMaxRows * kPair) {}

  static int64_t bytes(const Weight& w) { return 2 * kSlabBytes + 4 * (2 * kProducts + kMaxRows * kPair + Numbers::floats(w)); }
};

// Computes the outputs [out, out + kPair) of a block's rows.
template <int Bits, int L, bool Zeros>
void multiply_pair(const Matmul& m, const void* packed, const Block& b, int64_t out, const Memory& memory) {
  constexpr int64_t kSegments = Sizes<L>::kSegments, kSlice = kSliceSteps * kStep * Bits / 8;
  const Weight& w = m.w;
  const Layout layout(w);
  const int64_t number = layout.segments.number, slices = (number + kSegments - 1) / kSegments;
  const bool stored = Bits == 8 && b.rows <= kTile && out + kPair <= w.out && w.inner % Sizes<L>::kBytes == 0;
  const auto count_of = [&](int64_t slice) { return min(kSegments, number - slice * kSegments); };
  const auto slab_of = [&](int64_t slice) { return memory.slabs + slice % 2 * kSlabBytes; };
  const Numbers numbers(w, memory.numbers);
  numbers.widen(w, out);
  __builtin_memset(memory.sums, 0, static_cast<size_t>((b.rows + kTile - 1) / kTile * kPair * kTile * 4));
  for (int64_t slice = 0; slice <= slices; ++slice) {  // unpack one slice ahead, because a tile load must wait for recent stores
    if (slice < slices) {
      const bool last = slice + 1 == slices;
      prefetch(w, last ? out + kPair : out, last ? 0 : (slice + 1) * kSlice, kSlice);
      if (!stored) unpack<Bits, L>(w, out, slice * kSegments, count_of(slice), slab_of(slice));
    }
    if (slice == 0) continue;
    const int64_t s = (slice - 1) * kSegments, count = count_of(slice - 1);
    const Codes codes = stored ? as_stored<L>(w, out, s) : of_slab<L>(slab_of(slice - 1));
    for (int64_t row = 0; row < b.rows; row += kTile) {
      float* const sums = memory.sums + row * kPair;
      multiply_slice<L, Zeros>(codes, {layout, packed, b.row + row}, s, count, layout.segments.per_group, numbers, memory.products, sums);
      if (slice == slices) write_outputs(m, sums, sums + kSums, out, b.row + row, min(kTile, b.rows - row));
    }
  }
}

template <int Bits, int L>
void multiply_outputs(const Matmul& m, const void* packed, const Block& b, const Memory& memory) {
  configure_tiles(config_of(Sizes<L>::kTileBytes / 4));
  const auto pair = m.w.zeros ? multiply_pair<Bits, L, true> : multiply_pair<Bits, L, false>;
  for (int64_t out = b.out; out < b.out + b.outs; out += kPair) pair(m, packed, b, out, memory);
  _tile_release();
}

Block block(const Matmul& m) {
  const int64_t pairs = min(kBlockBytes / (kPair * m.w.row_bytes), m.w.out / (kPair * kMinBlocks));
  return {0, kPair * (pairs ? pairs : 1), 0, kMaxRows};
}

size_t scratch_bytes(const Matmul& m) { return static_cast<size_t>(Memory::bytes(m.w)); }

void multiply_block(const Matmul& m, const void* packed, const Block& b, const Block*, void* scratch) {
  const auto in_segments = [&](auto bits) {
    const int64_t steps = Segments(m.w).steps;
    const auto outputs = steps == 4 ? multiply_outputs<bits, 4> : steps == 2 ? multiply_outputs<bits, 2> : multiply_outputs<bits, 1>;
    outputs(m, packed, b, Memory(scratch));
  };
  if (m.w.bits == 8) return in_segments(std::integral_constant<int, 8>{});
  if (m.w.bits == 4) return in_segments(std::integral_constant<int, 4>{});
  in_segments(std::integral_constant<int, 3>{});
}

}  // namespace

extern const Multiplier kMatmulAmxInt8 = {packed_bytes, pack, block, scratch_bytes, multiply_block};

bool amx_int8_available() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned kInt8 = 1u << 25;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kInt8) && amx_available();
}

}  // namespace jaxserve

#endif
