// Custom calls for KV pools: copies of pages, and memory that the operating system commits at the first write and takes back on
// request.
//
// XLA allocates results with malloc. A large result is only address space until its first write. A small one may be reused memory
// with its old contents. On Linux MADV_DONTNEED makes both equal: whole OS pages of private anonymous memory, which is all that
// malloc returns, are given back and then read as zero until they are written (madvise(2)). Other systems do not promise zeros, so
// there pools are cleared explicitly and never shrink.

#include <cstdint>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <utility>

#include "os_pages.h"
#include "parallel.h"
#include "pool.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jaxserve {
namespace {

#if defined(__linux__)

// Requests huge pages, with which attention takes 7 to 20 % less time and a first touch half as long. Does nothing if they are
// larger than the granule of kernels/elastic.py: with OS pages of 64 KB they have 512 MB.
void request_huge_pages(Range pages) {
  constexpr size_t granule = size_t{2} << 20;
  size_t size = 0;
  std::ifstream("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size") >> size;
  if (size != 0 && size <= granule) madvise(pages.begin, pages.size(), MADV_HUGEPAGE);  // a failure has no other effect
}

#endif

// Returns zeros that take no memory before the first write, if the platform supports that.
ffi::Error reserve(ffi::Result<ffi::AnyBuffer> out) {
  auto* begin = static_cast<char*>(out->untyped_data());
  const Range pool = {begin, begin + out->size_bytes()};
#if defined(__linux__)
  const Range pages = whole_pages(pool);
  if (discard(pages) == 0) {
    memset(pool.begin, 0, Range{pool.begin, pages.begin}.size());
    memset(pages.end, 0, Range{pages.end, pool.end}.size());
    request_huge_pages(pages);
    return ffi::Error::Success();
  }
#endif
  memset(pool.begin, 0, pool.size());
  return ffi::Error::Success();
}

using Ranges = ffi::Buffer<ffi::S32, 2>;

// Gives back the memory of the whole OS pages within a range of each segment's own pages: ranges[s] is [first, last). The pool does
// not move.
ffi::Error release(Ranges ranges, ffi::RemainingArgs segments, ffi::RemainingRets released) {
  Pool pool;
  auto unread = pool.read(segments, released);
  if (unread.failure()) return unread;
  if (ranges.element_count() != 2 * pool.segments.size()) {
    return ffi::Error::InvalidArgument("release_pages: ranges must be [segments, 2]");
  }
  for (size_t i = 0; i < pool.segments.size(); ++i) {
    const int64_t pages = pool.pages_of(i), first = ranges.typed_data()[2 * i], last = ranges.typed_data()[2 * i + 1];
    if (first < 0 || last < first || last > pages) {
      return ffi::Error::InvalidArgument("release_pages: pages " + std::to_string(first) + " to " + std::to_string(last) +
                                         " are outside a segment of " + std::to_string(pages) + " pages");
    }
  }
#if defined(__linux__)
  for (size_t i = 0; i < pool.segments.size(); ++i) {
    char* const begin = pool.segments[i].data;
    const int32_t* range = ranges.typed_data() + 2 * i;
    const int error = discard(whole_pages({begin + range[0] * pool.page_bytes, begin + range[1] * pool.page_bytes}));
    if (error != 0) return ffi::Error::Internal("release_pages: madvise: " + std::string(strerror(error)));
  }
  return ffi::Error::Success();
#else
  return ffi::Error(ffi::ErrorCode::kUnimplemented, "release_pages: needs Linux");
#endif
}

using PageIds = ffi::Buffer<ffi::S32, 1>;

// A job that copies pages between a pool and contents [N, ...]. An item is a page.
struct Copying final : Shared {
  static constexpr int64_t kBytesPerWork = 16;  // that are copied in the time of a multiplication, the unit of kWorkPerThread

  Pool pool;
  const int32_t* ids = nullptr;
  char* contents = nullptr;
  bool to_pool = false;

  void work() override {
    const Pages pages = pool.addresses();
    for (Items mine(*this); mine.more(); mine.advance()) {
      char *page = page_address(pages, ids[mine.now()]), *content = contents + mine.now() * pages.page_bytes;
      if (to_pool) std::swap(page, content);
      memcpy(content, page, static_cast<size_t>(pages.page_bytes));
    }
  }
};

// Copies the pages `ids` of a pool to contents [N, ...], or back.
ffi::Error copy(Pool pool, PageIds ids, void* contents, size_t bytes, bool to_pool) {
  auto copying = std::make_shared<Copying>();
  copying->items = static_cast<int64_t>(ids.element_count());
  for (int64_t i = 0; i < copying->items; ++i) {
    const int32_t page = ids.typed_data()[i];
    if (page < 0 || page >= pool.pages) {
      return ffi::Error::InvalidArgument("page " + std::to_string(page) + " is outside a pool of " + std::to_string(pool.pages) +
                                         " pages");
    }
  }
  if (static_cast<int64_t>(bytes) != copying->items * pool.page_bytes) {
    return ffi::Error::InvalidArgument("the contents must be one page of the pool for each id");
  }
  copying->pool = std::move(pool);
  copying->ids = ids.typed_data();
  copying->contents = static_cast<char*>(contents);
  copying->to_pool = to_pool;
  run(copying, static_cast<int64_t>(bytes) / Copying::kBytesPerWork);
  return ffi::Error::Success();
}

ffi::Error take(PageIds ids, ffi::RemainingArgs segments, ffi::Result<ffi::AnyBuffer> contents) {
  Pool pool;
  auto error = pool.read(segments, segments.size());
  if (error.failure()) return error;
  return copy(std::move(pool), ids, contents->untyped_data(), contents->size_bytes(), false);
}

ffi::Error put(PageIds ids, ffi::AnyBuffer contents, ffi::RemainingArgs segments, ffi::RemainingRets written) {
  Pool pool;
  auto error = pool.read(segments, written);
  if (error.failure()) return error;
  return copy(std::move(pool), ids, contents.untyped_data(), contents.size_bytes(), true);
}

}  // namespace
}  // namespace jaxserve

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_reserve_pool, jaxserve::reserve, ffi::Ffi::Bind().Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_release_pages, jaxserve::release,
                              ffi::Ffi::Bind()
                                  .Arg<jaxserve::Ranges>()
                                  .RemainingArgs()
                                  .RemainingRets());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_take_pages, jaxserve::take,
                              ffi::Ffi::Bind()
                                  .Arg<jaxserve::PageIds>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_put_pages, jaxserve::put,
                              ffi::Ffi::Bind()
                                  .Arg<jaxserve::PageIds>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .RemainingRets());
