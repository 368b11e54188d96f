// Paged attention of one tile for one kv head, compiled once per instruction set (attention.cc) and chosen at run time
// (handlers.cc).

#pragma once

#include <cstddef>
#include <cstdint>

namespace jaxserve {

// What all tiles of a call share. Shapes as in jaxserve/kernels/attention.py; values are bfloat16 or float32.
struct Attention {
  const void* q;     // [T, K, G, D]
  const void* pool;  // [P, K, 2, S, D]
  void* out;         // [T, K, G, D]
  bool bfloat16;
  int64_t kv_heads, groups, head_dim, page_size;
  float scale;
  int64_t window;  // a token sees the last `window` positions, its own included
};

// Consecutive tokens of one sequence: rows [row, row + length) of q, at positions start, start + 1, ...
struct Tile {
  int64_t row, start, length;
  const int32_t* pages;
};

// The first position that the tile's first token sees.  Static: see the rule on inline functions in attention.cc.
static inline int64_t first_position(const Attention& a, const Tile& t) {
  return t.start + 1 > a.window ? t.start + 1 - a.window : 0;
}

// Floats of scratch memory that `attend` needs for a tile of `tokens` tokens.
size_t scratch_floats(const Attention& a, int64_t tokens);

// Writes the tile's outputs for one kv head.
using Attend = void (*)(const Attention&, const Tile&, int64_t head, float* scratch);

void attend_baseline(const Attention&, const Tile&, int64_t head, float* scratch);
void attend_avx2(const Attention&, const Tile&, int64_t head, float* scratch);
void attend_avx512(const Attention&, const Tile&, int64_t head, float* scratch);

}  // namespace jaxserve
