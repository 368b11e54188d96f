// The interface of the kernels that compute paged attention of one tile. There is one kernel for each instruction set
// (attention.cc, attention_decode.cc, attention_vnni.cc, attention_amx.cc, attention_bf16.cc), and attention_call.cc chooses one
// at run time.

#pragma once

#include <cstddef>
#include <cstdint>

#include "pages.h"

namespace jaxserve {

// The operands that all tiles of a call share, with shapes as in jaxserve/kernels/attention.py.
struct Attention {
  const void* q;  // [T, K, G, D]
  Pages pool;     // each [K, 2, S, R]
  void* out;      // [T, K, G, D]
  bool bfloat16;  // whether q and out are bfloat16; otherwise they are float32
  bool int8;      // whether a row of the pool is D codes and a float32 scale; otherwise it is D numbers of q's type
  int64_t kv_heads, groups, head_dim, page_size, row_size;
  float scale;
  int64_t window;  // a token sees the last `window` positions, its own included
};

// Consecutive tokens of one sequence, for one kv head. Their queries are the rows [row, row + length) of q, and their positions
// are start, start + 1, ...
struct Tile {
  int64_t row, start, length;
  const int32_t* pages;
  int64_t head;
};

// Returns the first position that the tile's first token sees. It is static because of the rule on inline functions in
// vectors.h.
static inline int64_t first_position(const Attention& a, const Tile& t) {
  return t.start + 1 > a.window ? t.start + 1 - a.window : 0;
}

// Returns the number of floats of scratch memory that a kernel needs for a tile of `tokens` tokens. The size suffices for every
// kernel. attention.cc needs the keys, values, scores, decay and scales of a block, then q, out, total and top of every row. Kernels
// for codes need less. columns.h needs half as much for keys and values, 64 floats of scores and weights for each position, and
// 1.5 dims + 2 for each of up to 15 padding rows. attention_decode.cc needs 2 dims of q for each row and for up to 7 padding rows,
// but no keys and values.
static inline size_t scratch_floats(const Attention& a, int64_t tokens) {
  const int64_t block = 64, lanes = 16, rows = tokens * a.groups, dims = (a.head_dim + 63) / 64 * 64;
  return static_cast<size_t>(2 * block * dims + 72 * block + lanes + rows * (2 * dims + lanes + 1) + a.groups * dims);
}

// A kernel: it writes a tile's outputs. `after` is the tile that this thread computes next, whose memory is prefetched, or null.
using Attend = void (*)(const Attention&, const Tile&, const Tile* after, float* scratch);

void attend_baseline(const Attention&, const Tile&, const Tile* after, float* scratch);
void attend_avx2(const Attention&, const Tile&, const Tile* after, float* scratch);
void attend_avx512(const Attention&, const Tile&, const Tile* after, float* scratch);
void attend_decode_avx2(const Attention&, const Tile&, const Tile* after, float* scratch);    // bfloat16, one token
void attend_decode_avx512(const Attention&, const Tile&, const Tile* after, float* scratch);  // bfloat16, one token
void attend_vnni(const Attention&, const Tile&, const Tile* after, float* scratch);  // bfloat16 queries, int8 pools
void attend_avx512bf16(const Attention&, const Tile&, const Tile* after, float* scratch);  // bfloat16; head_dim as for AMX
void attend_amx(const Attention&, const Tile&, const Tile* after, float* scratch);   // bfloat16; head_dim a multiple of 32

}  // namespace jaxserve
