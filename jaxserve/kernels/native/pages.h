// The addresses of the pages of a KV pool, which has one or several arrays (segments). Page ids run through the segments in order,
// as in jaxserve/kernels/pool_segments.py.

#pragma once

#include <cstdint>

namespace jaxserve {

struct Segment {
  int64_t first;  // its first page
  char* data;     // [pages, ...]
};

// The segments of a pool, at least one, in a table that the job of a call owns.
struct Pages {
  const Segment* segments;
  int64_t count;       // of segments
  int64_t page_bytes;  // of a page
};

// Returns the address of a page, by binary search. It is static because of the rule on inline functions in vectors.h.
static inline char* page_address(const Pages& pages, int64_t page) {
  const Segment* segment = pages.segments;
  for (int64_t left = pages.count; left > 1;) {
    const int64_t half = left / 2;
    segment = segment[half].first <= page ? segment + half : segment;
    left -= half;
  }
  return segment->data + (page - segment->first) * pages.page_bytes;
}

}  // namespace jaxserve
