// The blocks of positions that attention reads from a context: the addresses of their keys and values, and the prefetching of
// the next block. Only for files that are compiled once per instruction set (vectors.h).

#pragma once

#include "attention.h"

namespace jaxserve {
namespace {

constexpr int kBlock = 64;  // positions

// The addresses of a block's keys and values. The block has `count` positions, and later entries repeat the first one.
template <typename P>
struct Rows {
  const P *keys[kBlock], *values[kBlock];
  int count;
};

// The next block, which is prefetched explicitly because its pages are scattered and the hardware does not foresee them. Memory
// takes few requests at once, so the keys are prefetched while the present block is read, and the values while it is multiplied.
struct NextBlock {
  const void *const *keys, *const *values;
  int count;
  int64_t row_bytes;

  // These functions must be inlined: GCC regards a function that only prefetches as one without effect, and drops its calls.
  __attribute__((always_inline)) void prefetch(const void* row) const {
    for (int64_t at = 0; at < row_bytes; at += 64) __builtin_prefetch(static_cast<const char*>(row) + at);
  }
  __attribute__((always_inline)) void prefetch_key(int i) const {
    if (i < count) prefetch(keys[i]);
  }
  __attribute__((always_inline)) void prefetch_values() const {
    for (int i = 0; i < count; ++i) prefetch(values[i]);
  }
};

// An iterator over the blocks that a tile sees, in a pool of type P. The block after the last one is the first block of the tile
// `after`.
template <typename P>
class Blocks {
 public:
  int64_t position;  // the position of the block's first row

  Blocks(const Attention& a, const Tile& t, const Tile* after) : position(first_position(a, t)), a_(a), t_(t), after_(after) {
    locate(t, position, rows_[0]);
    locate_next(rows_[1]);
  }

  bool more() const { return position < t_.start + t_.length; }

  const Rows<P>& rows() const { return rows_[now_]; }

  NextBlock next() const {
    const Rows<P>& next = rows_[1 - now_];
    const auto untyped = [](const P* const* rows) { return reinterpret_cast<const void* const*>(rows); };
    return {untyped(next.keys), untyped(next.values), next.count, a_.row_size * static_cast<int64_t>(sizeof(P))};
  }

  void advance() {
    position += kBlock;
    locate_next(rows_[now_]);
    now_ = 1 - now_;
  }

 private:
  const Attention& a_;
  const Tile& t_;
  const Tile* const after_;
  Rows<P> rows_[2];
  int now_ = 0;

  void locate_next(Rows<P>& rows) const {
    rows.count = 0;
    if (position + kBlock < t_.start + t_.length) {
      locate(t_, position + kBlock, rows);
    } else if (more() && after_) {
      locate(*after_, first_position(a_, *after_), rows);
    }
  }

  void locate(const Tile& t, int64_t from, Rows<P>& rows) const {
    const int64_t left = t.start + t.length - from;
    rows.count = static_cast<int>(left < kBlock ? left : kBlock);
    const int64_t half = a_.page_size * a_.row_size;
    const Pages pool = a_.pool;  // a copy that the loop's writes cannot change
    int64_t page = from / a_.page_size, within = from % a_.page_size;
    for (int i = 0; i < rows.count; ++page, within = 0) {
      const P* key = reinterpret_cast<const P*>(page_address(pool, t.pages[page])) + t.head * 2 * half + within * a_.row_size;
      const int64_t here = a_.page_size - within, end = rows.count - i < here ? rows.count : i + here;
      for (; i < end; ++i, key += a_.row_size) rows.keys[i] = key, rows.values[i] = key + half;
    }
    for (int i = rows.count; i < kBlock; ++i) rows.keys[i] = rows.keys[0], rows.values[i] = rows.values[0];
  }
};

}  // namespace
}  // namespace jaxserve
