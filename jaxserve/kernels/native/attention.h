// Paged attention of one tile, compiled once per instruction set (attention.cc, attention_decode.cc, attention_vnni.cc,
// attention_amx.cc, attention_bf16.cc) and chosen at run time (attention_call.cc).

#pragma once

#include <cstddef>
#include <cstdint>

namespace jaxserve {

// The operands that all tiles of a call share, with shapes as in jaxserve/kernels/attention.py.
struct Attention {
  const void* q;     // [T, K, G, D]
  const void* pool;  // [P, K, 2, S, R]
  void* out;         // [T, K, G, D]
  bool bfloat16;     // q and out; otherwise float32
  bool int8;         // the pool: R = D codes and their float32 scale; otherwise R = D numbers as in q
  int64_t kv_heads, groups, head_dim, page_size, row_size;
  float scale;
  int64_t window;  // a token sees the last `window` positions, its own included
};

// Consecutive tokens of one sequence: rows [row, row + length) of q, at positions start, start + 1, ...; for one kv head.
struct Tile {
  int64_t row, start, length;
  const int32_t* pages;
  int64_t head;
};

// The first position that the tile's first token sees.  Static: see the rule on inline functions in attention.cc.
static inline int64_t first_position(const Attention& a, const Tile& t) {
  return t.start + 1 > a.window ? t.start + 1 - a.window : 0;
}

// Floats of scratch memory that `attend` needs for a tile of `tokens` tokens.
size_t scratch_floats(const Attention& a, int64_t tokens);

// Writes a tile's outputs. `after` is the tile that this thread computes next, if known: its memory is prefetched.
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
