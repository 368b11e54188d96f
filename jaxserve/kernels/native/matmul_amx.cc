// Products on the matrix unit of x86-64 (AMX-BF16), which multiplies tiles of 16 x 32 by 32 x 16 values, with the second operand in
// pairs. The weight is stored row by row, so it is the first operand. x is smaller, and is rearranged to be the second operand. The
// product is transposed, and is transposed back when it is written to y. Two tiles of the weight, two tiles of x and their four
// products fill the unit's eight tile registers.
//
// With few rows, reading the weight takes the time: each tile is read, or unpacked into L1, and used at once. With many rows, a
// block of the weight is unpacked into L2, one slice of the inputs at a time. It is multiplied there by all rows, 32 at a time,
// whose slice stays in L1. Meanwhile the memory of the next slice is prefetched.

#include "matmul.h"

#if defined(__x86_64__) && defined(__linux__)

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "amx.h"
#include "tiles.h"

namespace jaxserve {
namespace {

constexpr int64_t kFewRows = 2 * kTile;     // maximum of "few rows"
constexpr int64_t kFewSteps = kUnitSteps;   // few rows: steps that are unpacked at once
constexpr int64_t kManySteps = kUnitSteps;  // steps of a slice: 16 KiB of 32 rows of x, and of 32 of the weight, fit into L1
constexpr int64_t kManyOuts = 8 * kPair;    // many rows: outputs of a block; a slice has 128 KiB
constexpr int64_t kManyBlocks = 8;          // with fewer blocks than this they are halved, so that threads get equal shares

// Returns the shapes of two products at once: tiles 0-3 are sums [16, columns], 4-5 weights [16, 32], and 6-7 pairs of
// x [16, columns]. Even tiles of sums and of x have `first` columns, odd ones `second`.
inline TileConfig config_of(int64_t first, int64_t second) {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) config.set(tile, tile + 1, tile % 2 ? second : first);
  config.set(4, 6, kTile);
  return config;
}

// Returns the number of rows of x in the tile of `row`. Only with many rows the last tile is padded with zeros.
inline int64_t columns_of(const Matmul& m, int64_t row) {
  return m.rows > kFewRows || m.rows - row >= kTile ? kTile : m.rows - row;
}

// Returns the steps between packed rows. The number is odd, so that slices of many rows are not in the same sets of a cache.
inline int64_t stride_of(const Matmul& m) { return steps_of(m.w.inner) | 1; }

// Returns the tile of `row` in packed x, which consists of tiles of pairs [inner / 2, columns].
inline const uint32_t* packed_tile(const Matmul& m, const void* packed, int64_t row) {
  return static_cast<const uint32_t*>(packed) + row * stride_of(m) * kStep / 2;
}

size_t packed_bytes(const Matmul& m) {
  const int64_t rows = m.rows > kFewRows ? (m.rows + kTile - 1) / kTile * kTile : m.rows;
  return static_cast<size_t>(rows * stride_of(m) * kStep * 2);
}

void pack(const Matmul& m, int64_t row, void* packed) {
  const int64_t inner = m.w.inner, columns = columns_of(m, row), steps = steps_of(inner);
  const __mmask16 mask = static_cast<__mmask16>((1u << columns) - 1);
  uint32_t* to = const_cast<uint32_t*>(packed_tile(m, packed, row));
  for (int64_t step = 0; step < steps; ++step) {
    const int64_t left = inner - step * kStep;
    const __mmask32 inputs = left >= kStep ? ~0u : (1u << left) - 1;
    __m512i x[kTile];
    for (int64_t r = 0; r < kTile; ++r) {
      const uint16_t* from = static_cast<const uint16_t*>(m.x) + (row + r) * inner + step * kStep;
      x[r] = row + r < m.rows ? _mm512_maskz_loadu_epi16(inputs, from) : _mm512_setzero_si512();
    }
    transpose(x);
    for (int64_t pair = 0; pair < kTile; ++pair, to += columns) _mm512_mask_storeu_epi32(to, mask, x[pair]);
  }
}

// The two tiles of a block of the weight.
struct Source {
  const uint16_t *first, *second;
  int64_t row_bytes;  // bytes between rows
  int64_t step;       // values between steps
};

// Two tiles of packed rows of x, and their numbers of columns.
struct Rows {
  const uint32_t *first, *second;
  int64_t first_columns, second_columns;

  Rows from(int64_t step) const {
    const int64_t pairs = step * kStep / 2;
    return {first + pairs * first_columns, second + pairs * second_columns, first_columns, second_columns};
  }
};

// Adds the products of `steps` steps to tiles 0-3. Without a second tile of rows these are only tiles 0 and 2.
template <bool Two>
inline void multiply(const Source& w, const Rows& x, int64_t steps) {
  memory_barrier();  // x and the weight may have been written just before
  const uint16_t *w0 = w.first, *w1 = w.second;
  const uint32_t *x0 = x.first, *x1 = x.second;
  for (; steps > 0; --steps, w0 += w.step, w1 += w.step) {
    _tile_loadd(6, x0, 4 * x.first_columns);
    _tile_loadd(4, w0, w.row_bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, w1, w.row_bytes);
    _tile_dpbf16ps(2, 5, 6);
    x0 += kStep / 2 * x.first_columns;
    if (Two) {
      _tile_loadd(7, x1, 4 * x.second_columns);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
      x1 += kStep / 2 * x.second_columns;
    }
  }
  memory_barrier();  // and may be overwritten just after
}

template <bool Two>
inline void zero_sums() {
  _tile_zero(0);
  _tile_zero(2);
  if (Two) {
    _tile_zero(1);
    _tile_zero(3);
  }
}

template <bool Two>
inline void load_sums(const float* sums) {
  _tile_loadd(0, sums, 64);
  _tile_loadd(2, sums + 2 * kSums, 64);
  if (Two) {
    _tile_loadd(1, sums + kSums, 64);
    _tile_loadd(3, sums + 3 * kSums, 64);
  }
}

// Stores the sums [4][16, 16]. The first and third tile are the products with the first tile of rows.
template <bool Two>
inline void store_sums(float* sums) {
  _tile_stored(0, sums, 64);
  _tile_stored(2, sums + 2 * kSums, 64);
  if (Two) {
    _tile_stored(1, sums + kSums, 64);
    _tile_stored(3, sums + 3 * kSums, 64);
  }
}

template <bool Two>
inline void write_tile(const Matmul& m, const float* sums, int64_t out, int64_t row) {
  const int64_t left = m.rows - row;
  write_outputs(m, sums, sums + 2 * kSums, out, row, left < kTile ? left : kTile);
  if (Two) write_outputs(m, sums + kSums, sums + 3 * kSums, out, row + kTile, left < kFewRows ? left - kTile : kTile);
}

inline Source unpacked(const uint16_t* block) { return {block, block + kTile * kStep, 2 * kStep, kPairStep}; }

template <bool Two>
void few_rows(const Matmul& m, const Rows& x, int64_t out, uint16_t* blocks, float* sums) {
  const Weight& w = m.w;
  const int64_t steps = steps_of(w.inner);
  zero_sums<Two>();
  if (w.bits == 16 && out + kPair <= w.out && w.inner % kStep == 0) {
    const uint16_t* rows = reinterpret_cast<const uint16_t*>(w.data + out * w.row_bytes);
    multiply<Two>({rows, rows + kTile * w.inner, w.row_bytes, kStep}, x, steps);
  } else {
    const int64_t parts = (steps + kFewSteps - 1) / kFewSteps;
    const auto block = [&](int64_t part) { return blocks + part % 2 * kFewSteps * kPairStep; };
    const auto some = [&](int64_t part) { return part + 1 < parts ? kFewSteps : steps - part * kFewSteps; };
    for (int64_t part = 0; part <= parts; ++part) {  // unpack one part ahead, because a tile load must wait for recent stores
      if (part < parts) {
        const int64_t to_next_rows = kPair * w.row_bytes - offset_of(w, part * kFewSteps);
        const int64_t ahead = part + 1 < parts ? offset_of(w, kFewSteps) : to_next_rows;
        unpack(w, out, part * kFewSteps, some(part), ahead, block(part));
      }
      if (part > 0) multiply<Two>(unpacked(block(part - 1)), x.from((part - 1) * kFewSteps), some(part - 1));
    }
  }
  store_sums<Two>(sums);
  write_tile<Two>(m, sums, out, 0);
}

// The next slice of the weight, which is prefetched line by line while the present one is multiplied.
class NextSlice {
 public:
  NextSlice(const Weight& w, int64_t out, int64_t outs, int64_t step, int64_t steps)
      : data_(w.data + out * w.row_bytes + offset_of(w, step)),
        row_bytes_(w.row_bytes),
        bytes_(offset_of(w, steps)),
        rows_(outs) {}

  int64_t lines() const { return rows_ * ((bytes_ + 63) / 64); }

  void prefetch(int64_t lines) {
    for (; lines > 0 && rows_ > 0; --lines) {
      _mm_prefetch(reinterpret_cast<const char*>(data_ + at_), _MM_HINT_T1);
      at_ += 64;
      if (at_ >= bytes_) data_ += row_bytes_, at_ = 0, --rows_;
    }
  }

 private:
  const uint8_t* data_;
  int64_t row_bytes_, bytes_, rows_, at_ = 0;
};

// Multiplies 32 rows of x by one slice of the inputs, for all outputs of the block. Sums are written to y while the next ones are
// computed.
template <bool Two>
void panel(const Matmul& m, const Block& b, const Rows& x, int64_t row, int64_t step, int64_t steps,
           const uint16_t* slice, float* sums, NextSlice& next_slice, int64_t lines) {
  const bool last = step + steps == steps_of(m.w.inner);
  const auto finish = [&](int64_t out) {
    if (last) write_tile<Two>(m, sums + out / kPair * 4 * kSums, b.out + out, row);
  };
  int64_t out = 0;
  for (; out < b.outs; out += kPair, slice += kManySteps * kPairStep) {
    float* mine = sums + out / kPair * 4 * kSums;
    step ? load_sums<Two>(mine) : zero_sums<Two>();
    multiply<Two>(unpacked(slice), x, steps);
    if (out) finish(out - kPair);
    store_sums<Two>(mine);
    next_slice.prefetch(lines);
  }
  finish(out - kPair);
}

void many_rows(const Matmul& m, const void* packed, const Block& b, const Block* after, uint16_t* slices, float* sums) {
  const int64_t all = steps_of(m.w.inner), tile = stride_of(m) * kSums;  // pairs of a packed tile
  const int64_t products = (b.rows + kFewRows - 1) / kFewRows * ((b.outs + kPair - 1) / kPair);
  for (int64_t step = 0; step < all; step += kManySteps) {
    const int64_t steps = min(kManySteps, all - step), next = step + steps;
    for (int64_t out = 0; out < b.outs; out += kPair) {
      unpack(m.w, b.out + out, step, steps, 2 * m.w.row_bytes, slices + out * kStep * kManySteps);
    }
    NextSlice next_slice = next < all ? NextSlice(m.w, b.out, b.outs, next, min(kManySteps, all - next))
                               : NextSlice(m.w, after ? after->out : 0, after ? after->outs : 0, 0, min(kManySteps, all));
    const int64_t lines = (next_slice.lines() + products - 1) / products;
    for (int64_t row = 0; row < b.rows; row += kFewRows) {
      const uint32_t* first = packed_tile(m, packed, b.row + row);
      const Rows x = Rows{first, first + tile, kTile, kTile}.from(step);
      const auto multiply = b.rows - row > kTile ? panel<true> : panel<false>;
      multiply(m, b, x, b.row + row, step, steps, slices, sums + row * kManyOuts, next_slice, lines);
    }
  }
}

Block block(const Matmul& m) {
  if (m.rows > kFewRows) return {0, m.w.out < kManyBlocks * kManyOuts ? kManyOuts / 2 : kManyOuts, 0, kMaxRows};
  constexpr int64_t kRunBytes = 128 << 10;  // maximum size of a block of the weight, so that threads get even shares
  const int64_t pairs = kRunBytes / (kPair * m.w.row_bytes);
  return {0, kPair * (pairs ? pairs : 1), 0, kFewRows};
}

size_t scratch_bytes(const Matmul& m) {
  const int64_t many = kManyOuts * kManySteps * kStep * 2 + kMaxRows * kManyOuts * 4;
  const int64_t few = 2 * kFewSteps * kPairStep * 2 + 4 * kSums * 4;
  return static_cast<size_t>(m.rows > kFewRows ? many : few);
}

void multiply_block(const Matmul& m, const void* packed, const Block& b, const Block* after, void* scratch) {
  auto* weights = static_cast<uint16_t*>(scratch);
  if (m.rows > kFewRows) {
    configure_tiles(config_of(kTile, kTile));
    many_rows(m, packed, b, after, weights, reinterpret_cast<float*>(weights + kManyOuts * kManySteps * kStep));
  } else {
    const int64_t first = columns_of(m, 0), second = m.rows - first;
    const Rows x = {packed_tile(m, packed, 0), packed_tile(m, packed, first), first, second};
    configure_tiles(config_of(first, second));
    float* sums = reinterpret_cast<float*>(weights + 2 * kFewSteps * kPairStep);
    for (int64_t out = b.out; out < b.out + b.outs; out += kPair) {
      second ? few_rows<true>(m, x, out, weights, sums) : few_rows<false>(m, x, out, weights, sums);
    }
  }
  _tile_release();
}

}  // namespace

extern const Multiplier kMatmulAmx = {packed_bytes, pack, block, scratch_bytes, multiply_block};

bool amx_available() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned kBf16 = 1u << 22, kTiles = 1u << 24;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kBf16) == 0 || (d & kTiles) == 0) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // arch_prctl: ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}  // namespace jaxserve

#endif
