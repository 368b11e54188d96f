// A KV pool among the operands and results of a custom call, for files that define such calls.

#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "pages.h"
#include "xla/ffi/api/ffi.h"

namespace jaxserve {

// The segments [P, ...] of a pool, which differ in their numbers of pages alone.
struct Pool {
  std::vector<Segment> segments;
  xla::ffi::AnyBuffer::Dimensions shape;  // of the first segment
  xla::ffi::DataType type{};
  int64_t pages = 0;       // of all segments
  int64_t page_bytes = 0;  // of a page

  // Returns the addresses of the pages. The pool must not change as long as they are used.
  Pages addresses() const { return {segments.data(), static_cast<int64_t>(segments.size()), page_bytes}; }

  // Returns the number of pages of a segment.
  int64_t pages_of(size_t segment) const {
    return (segment + 1 < segments.size() ? segments[segment + 1].first : pages) - segments[segment].first;
  }

  // Takes the first `count` of the remaining operands of a call as the pool, or returns an error.
  xla::ffi::Error read(const xla::ffi::RemainingArgs& operands, size_t count) {
    namespace ffi = xla::ffi;
    if (count == 0) return ffi::Error::InvalidArgument("a KV pool must have at least one segment");
    segments.reserve(count);
    for (size_t i = 0; i < count; ++i) {
      const auto segment = operands.get<ffi::AnyBuffer>(i);
      if (!segment.has_value()) return segment.error();
      const auto dims = segment->dimensions();
      if (dims.size() == 0 || dims[0] == 0) return ffi::Error::InvalidArgument("a segment of a KV pool must have pages");
      if (i == 0) {
        shape = dims;
        type = segment->element_type();
        page_bytes = static_cast<int64_t>(segment->size_bytes()) / dims[0];
      } else if (segment->element_type() != type || !std::equal(dims.begin() + 1, dims.end(), shape.begin() + 1, shape.end())) {
        return ffi::Error::InvalidArgument("the segments of a KV pool must have pages of the same shape and dtype");
      }
      segments.push_back({pages, static_cast<char*>(segment->untyped_data())});
      pages += dims[0];
    }
    return ffi::Error::Success();
  }

  // Takes the first of the remaining operands of a call as the pool, which are also its remaining results, or returns an error.
  xla::ffi::Error read(const xla::ffi::RemainingArgs& operands, const xla::ffi::RemainingRets& results) {
    namespace ffi = xla::ffi;
    auto error = read(operands, results.size());
    for (size_t i = 0; error.success() && i < results.size(); ++i) {
      auto result = results.get<ffi::AnyBuffer>(i);
      if (!result.has_value()) return result.error();
      if ((*result)->untyped_data() != segments[i].data) return ffi::Error::Internal("the KV pool was copied");
    }
    return error;
  }
};

}  // namespace jaxserve
